"""Scores the held-out data with the best or newest good checkpoint of a workdir; prints one JSON object last.

    fiddlex evaluate --workdir=/tmp/gpt_tiny [--config.mesh.data=1 --config.data.eval_batches=0 …]
    fiddlex evaluate --workdir=/tmp/gpt_tiny --config.data.eval_stride=32
    fiddlex evaluate --workdir=/tmp/gpt_tiny --config.data.eval_source=jsonl:/tmp/lines.jsonl
    fiddlex evaluate --workdir=/tmp/bert_swaps --output=/tmp/guesses.jsonl

Overrides are applied to the workdir's own config, so they can change the data, the batch or the mesh.
docs/evaluation.md says what the numbers mean, which files can be evaluated on and what --output writes.
"""

import json
import logging
import pathlib

from absl import flags

from fiddlex.cluster.process_flags import define_processes
from fiddlex.files.whole_files import write_output
from fiddlex.terminal.command_line import apply_overrides, define_overrides, define_path, define_workdir
from fiddlex.terminal.output_format import check_output
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted

define_overrides()
_WORKDIR = define_workdir("directory of a training run")
_OUTPUT = define_path("output", "", "file for a JSON line about each held-out line of a task or continuation")
_FORCE = flags.DEFINE_bool(
    "force", False, "evaluate although the memory is predicted not to be enough (docs/memory.md)"
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "text: a line for people before the JSON object")

logger = logging.getLogger("fiddlex.evaluate")
_join = define_processes()


def main(argv: list[str]) -> None:
    """Prints `step`, `eval_loss` and the other metrics (`fiddlex.train.inference.evaluation.summarise`)."""
    _join()
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    if output:
        check_output("--output", output)
    with phase("Importing jax"):
        from fiddlex.train.run.records.metrics import describe
        from fiddlex.train.trainer import load_trainer

    trainer = load_trainer(pathlib.Path(_WORKDIR.value), apply_overrides, force=_FORCE.value)
    for line in trainer.dataset.description.splitlines():
        logger.info("%s", line)
    if output:
        predictions = trainer.predictions()
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in predictions)
        write_output(output, text)
        logger.info("%s: what the model says of %s", output, counted(len(predictions), "line"))
    record = trainer.evaluate()
    if "eval_masked_accuracy" in record:
        record["eval_masked_majority"] = trainer.majority()
    if _FORMAT.value == "text":
        kinds = [kind for kind in ("token", "example", "line") if f"eval_{kind}s" in record]
        over = " and ".join(counted(record[f"eval_{kind}s"], kind) for kind in kinds)
        print(f"step {record['step']}: {describe(record)}, over {over}")
    print(json.dumps(record))
