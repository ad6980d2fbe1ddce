"""Runs tasks of EleutherAI's lm-evaluation-harness on the best or newest good checkpoint of a workdir.

    pip install 'fiddlex[lm-eval]'
    fiddlex harness --workdir=/tmp/gpt2 --tasks=hellaswag,arc_easy [--limit=100 --num_fewshot=5]
    fiddlex harness --workdir=/tmp/gpt2 --tasks=my_task --include_path=/data/tasks

It prints the harness' table, and last one JSON object with `step` and the metrics of each task. --include_path names a
folder of task files (YAML) of your own. The harness downloads the data of published tasks; HF_HUB_OFFLINE=1 forbids it
to. Overrides such as --config.mesh.data=2 are applied to the workdir's own config.
"""

import json
import os
import pathlib

from absl import flags

from fiddlex.cluster.process_flags import define_processes
from fiddlex.errors import ConfigError
from fiddlex.files.whole_files import write_output
from fiddlex.terminal.command_line import apply_overrides, define_overrides, define_path, define_workdir
from fiddlex.terminal.output_format import check_output

define_overrides()
_WORKDIR = define_workdir("directory of a training run, or made by convert.py")
_TASKS = flags.DEFINE_list("tasks", None, "names of tasks, separated by commas", required=True)
_INCLUDE_PATH = define_path("include_path", None, "folder of task files in addition to the harness' own")
_LIMIT = flags.DEFINE_integer("limit", None, "examples of each task; by default all", lower_bound=1)
_NUM_FEWSHOT = flags.DEFINE_integer(
    "num_fewshot", None, "examples in a context; by default as the task says", lower_bound=0
)
_OUTPUT = define_path("output", "", "JSON file for the harness' results, with each sample")
_FORCE = flags.DEFINE_bool("force", False, "go on although the memory is predicted not to be enough (docs/memory.md)")
_join = define_processes()


def main(argv: list[str]) -> None:
    """Prints the metrics of the tasks."""
    _join()
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    if output:
        check_output("--output", output)
    from fiddlex.tools.harness import FiddlexLM
    from fiddlex.tools.harness_tasks import task_manager
    from fiddlex.train.run.workdir import read_config

    read_config(pathlib.Path(_WORKDIR.value))  # a wrong name is told before the harness reads its catalogue
    if _INCLUDE_PATH.value and not os.path.isdir(_INCLUDE_PATH.value):
        raise ConfigError(f"--include_path={_INCLUDE_PATH.value} is not a folder. Name one with task files (YAML).")
    if not _TASKS.value:
        raise ConfigError("--tasks is empty: name tasks, separated by commas.")
    manager = task_manager(_TASKS.value, _INCLUDE_PATH.value, _NUM_FEWSHOT.value)

    import lm_eval
    import lm_eval.utils

    model = FiddlexLM(_WORKDIR.value, change=apply_overrides, force=_FORCE.value)
    results = lm_eval.simple_evaluate(
        model=model,
        tasks=_TASKS.value,
        num_fewshot=_NUM_FEWSHOT.value,
        limit=_LIMIT.value,
        task_manager=manager,
        log_samples=bool(output),
    )
    print(lm_eval.utils.make_table(results))
    print(json.dumps({"step": model.step, "results": results["results"]}, default=str), flush=True)
    if output:
        write_output(output, json.dumps({"step": model.step, **results}, default=str, ensure_ascii=False, indent=1))
