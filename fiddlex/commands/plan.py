"""Chooses a layout for a model on a cluster: mesh, schedule, microbatches, semantics and recomputation. Trains nothing.

    fiddlex plan --config=gpt3:18.4b --topology=a100_80 --num_devices=256
    fiddlex plan --config=… --topology=tpu_v5p --num_devices=128 --objective=cost --write=/tmp/planned.py
    fiddlex plan --config=gpt3:18.4b --topology=a100_80 --num_devices=256 --partition
    fiddlex plan --partition --profile_graph=graph.txt --topology=v100_16 --num_devices=16

The planner chooses the config's mesh and pipeline and leaves the rest unchanged. `--write` writes the first plan as a
config file, for `fiddlex train` and `fiddlex compile`. `--partition` compares its layouts with pipelines of unequal
stages, which PipeDream's and Piper's partitioners find.
"""

import dataclasses
import datetime
import json
import logging
import os
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any, NamedTuple

from absl import flags
from ml_collections import config_flags

from fiddlex.config import Config, rules
from fiddlex.config.user_code.registries import added
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.files.whole_files import write_output, write_whole
from fiddlex.hardware.compilers import missing_compiler
from fiddlex.hardware.topology import Topology, load_topology
from fiddlex.planner.auto_plans import with_auto
from fiddlex.planner.layouts import HEADROOM, OBJECTIVES, SEMANTICS, Layout, Problem
from fiddlex.planner.no_plan import too_little, why_none
from fiddlex.planner.plans import Plan
from fiddlex.planner.report import GIB, as_json, as_python, as_text, describe, further_text, layout_text
from fiddlex.planner.search import Found, search, search_further
from fiddlex.schedules.generators import require_schedule
from fiddlex.synthesis.search import NAME as AUTO
from fiddlex.terminal.command_line import define_config, define_path
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import readable_size, readable_time, signal_name
from fiddlex.tools.unequal_stages import report as unequal_report
from fiddlex.tools.unequal_stages.answers import Answers, answers_for_model, answers_for_profile
from fiddlex.tools.unequal_stages.profile_graph import read_profile

logger = logging.getLogger("fiddlex.plan")

_CONFIG = define_config(required=False)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "name of the catalogue (python -m fiddlex.hardware.topology lists it) or a .toml file",
    required=True,
)
_NUM_DEVICES = flags.DEFINE_integer("num_devices", None, "devices to use", lower_bound=1, required=True)
_HBM_GIB = flags.DEFINE_float("hbm_gib", None, "memory of a device that a step may take; by default 90% of the chip's")
_BATCH = flags.DEFINE_integer("global_batch_size", None, "in place of data.global_batch_size", lower_bound=1)
_OBJECTIVE = flags.DEFINE_enum(
    "objective", "time", OBJECTIVES, "what of a step is to be least; for cost it may take fewer devices, by halves"
)
_SEMANTICS = flags.DEFINE_multi_enum("semantics", SEMANTICS, SEMANTICS, "weight-update semantics that are allowed")
_SCHEDULES = flags.DEFINE_multi_string(
    "schedule",
    [],
    "the only schedule to plan with, on two ranks or more: a name, PATH.py:FUNCTION or file:PATH.csv; may be given "
    "several times; by default the planner chooses among the names, and may choose a single rank",
)
_KEEP = flags.DEFINE_integer("keep", 5, "plans to print", lower_bound=1)
_AUTO = flags.DEFINE_integer(
    "auto", 0, "also find a schedule (pipeline.schedule=auto) for so many of the best plans with a flush", lower_bound=0
)
_VERIFY = flags.DEFINE_integer(
    "verify", 0, "compile so many of the plans for that cluster, the best first", lower_bound=0
)
_WRITE = define_path("write", None, "config file to write the first plan to; of those that --verify found to fit")
_PARTITION = flags.DEFINE_bool(
    "partition",
    False,
    "also print PipeDream's and Piper's pipelines, whose stages may differ in layers, replicas and tensor size",
)
_PROFILE = define_path(
    "profile_graph", None, "with --partition: in place of a config, a profile as PipeDream's graph.txt"
)
_MICROBATCHES = flags.DEFINE_integer(
    "num_microbatches",
    None,
    "with --profile_graph: microbatches of a batch; by default one for each device",
    lower_bound=1,
)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints the plans, or with `--partition` the partitioners' answers beside them."""
    _check_flags()
    if _PROFILE.value is not None:
        _print_answers(_profile_answers(_PROFILE.value))
        return
    config = _CONFIG.value
    if _BATCH.value:
        config.data.global_batch_size = _BATCH.value
    for section in (config.model, config.optimizer, config.data, config.train, config.pipeline):
        section.validate()
    topology = load_topology(_TOPOLOGY.value)
    problem = Problem(
        config,
        topology,
        _NUM_DEVICES.value,
        memory_bytes=None if _HBM_GIB.value is None else _bytes(_HBM_GIB.value, topology),
        objective=_OBJECTIVE.value,
        semantics=tuple(_SEMANTICS.value),
        schedules=_schedules(),
    )
    if _PARTITION.value:
        with phase("Partitioning the layers"):
            answers = answers_for_model(problem, keep=_KEEP.value)
        _print_answers(answers)
        return
    if _WRITE.value is not None and pathlib.Path(_WRITE.value).exists():
        raise ConfigError(f"--write={_WRITE.value} is there already. Name another file, or remove it.")
    if told := too_little(problem):
        raise DeviceError(told)
    asked = problem
    with phase("Searching the layouts"):
        problem, found = search_further(asked, keep=_KEEP.value)
    found = with_auto(problem, found, _AUTO.value)
    names = [topology.compile_name(plan.layout.mesh.num_devices) for plan in found.plans[: _VERIFY.value]]
    if problem is not asked and _FORMAT.value == "text":
        print(f"{further_text(asked, problem)}\n")
    if found.plans and _FORMAT.value == "text":
        print(as_text(problem, found, _flushed(problem, found)), flush=True)
    verdicts, missing = [], missing_compiler(names[0]) if names else ""
    for number, (plan, name) in enumerate(zip(found.plans, [] if missing else names, strict=False), start=1):
        with phase(f"Compiling plan {number} of {len(names)} for {name}"):
            result = compile_plan(plan.config, name)
        verdicts.append(Verdict.of(plan.layout, plan.memory.peak, result, problem.memory_bytes))
        if _FORMAT.value == "text":
            print(verdicts[-1].text, flush=True)
    if _FORMAT.value == "json":
        compiled = {"compiled": [verdict.result for verdict in verdicts]} if verdicts else {}
        print(json.dumps(as_json(problem, found) | compiled))
    if not found.plans:
        assert found.least is not None  # search raises where there is no layout at all
        raise DeviceError(why_none(problem, found.least))
    if missing:
        raise DeviceError(f"--verify={_VERIFY.value}: the plans are not verified. {missing}")
    chosen = _chosen(found.plans, verdicts)
    if _WRITE.value is not None:
        _write(pathlib.Path(_WRITE.value), problem, chosen.config.validate())
    elif _FORMAT.value == "text":
        print("--write=FILE.py makes a config of the first, for fiddlex compile and fiddlex train.")


def _check_flags() -> None:
    """Raises ConfigError when flags do not go together, or the config is missing."""
    profile = _PROFILE.value is not None
    if profile and not _PARTITION.value:
        raise ConfigError(f"--profile_graph={_PROFILE.value} needs --partition: only partitioners read a profile.")
    if _MICROBATCHES.value is not None and not profile:
        raise ConfigError(
            f"--num_microbatches={_MICROBATCHES.value} is of --profile_graph. For a config, the planner chooses the "
            "microbatches."
        )
    if not _CONFIG.present and not profile:
        raise ConfigError("--config is required: the model to plan for (or --partition --profile_graph=FILE).")
    of_plans = {
        "--write": _WRITE.value,
        "--auto": _AUTO.value,
        "--verify": _VERIFY.value,
        "--objective": _OBJECTIVE.value != "time",
    }
    if given := [name for name, value in of_plans.items() if value and _PARTITION.value]:
        raise ConfigError(f"{', '.join(given)}: --partition only prints the fastest pipelines. Leave it out.")
    if _VERIFY.value > _KEEP.value:
        raise ConfigError(
            f"--verify={_VERIFY.value} with --keep={_KEEP.value}: no more plans than these are there to compile. Keep "
            f"as many (--keep={_VERIFY.value}), or verify fewer."
        )
    if _AUTO.value and "sync" not in _SEMANTICS.value:
        raise ConfigError(
            f"--auto={_AUTO.value} with --semantics={','.join(_SEMANTICS.value)}: schedules are searched for batches "
            "that are flushed. Allow sync too, or leave --auto out."
        )
    if not profile:
        return
    of_config = {
        "--config": _CONFIG.present,
        "--config.…": config_flags.get_override_values(flags.FLAGS["config"]),
        "--global_batch_size": _BATCH.value,
        "--semantics": _SEMANTICS.present,
        "--schedule": _SCHEDULES.present,
        "--keep": _KEEP.present,
    }
    if given := [name for name, value in of_config.items() if value]:
        raise ConfigError(
            f"{', '.join(given)}: --profile_graph takes the place of a config, and there are no uniform layouts for a "
            "profile. Leave one out."
        )


def _schedules() -> tuple[str, ...]:
    """The schedules of --schedule, each once.

    Raises:
      ConfigError, ScheduleError: when one of them is no schedule that a layout can have.
    """
    for name in _SCHEDULES.value:
        if name == AUTO:
            raise ConfigError(
                "--schedule=auto: a schedule is searched for one layout. Plan without it, and set "
                "pipeline.schedule=auto in the config that --write makes."
            )
        require_schedule(name)
    return tuple(dict.fromkeys(_SCHEDULES.value))


def _profile_answers(path: str) -> Answers:
    topology, devices = load_topology(_TOPOLOGY.value), _NUM_DEVICES.value
    limit = topology.chip.memory_bytes * (1 - HEADROOM) if _HBM_GIB.value is None else _bytes(_HBM_GIB.value, topology)
    layers = read_profile(path)
    return answers_for_profile(
        layers, topology, devices, memory_bytes=int(limit), num_microbatches=_MICROBATCHES.value or devices
    )


def _print_answers(answers: Answers) -> None:
    """Prints the partitioners' answers.

    Raises:
      DeviceError: when Piper has none, after the others are printed.
    """
    if _FORMAT.value == "json":
        print(json.dumps(unequal_report.as_json(answers)))
    else:
        print(unequal_report.as_text(answers))
    if answers.shortage:
        raise DeviceError(answers.shortage)


def _bytes(hbm_gib: float, topology: Topology) -> int:
    rules.positive("--hbm_gib", hbm_gib, topology.chip.memory_gib)
    return int(hbm_gib * GIB)


def _flushed(problem: Problem, found: Found) -> Plan | None:
    """The best plan without delayed weights, where the best plan of all has delayed weights."""
    if found.plans[0].layout.semantics == "sync" or "sync" not in problem.semantics:
        return None
    among = [plan for plan in found.plans if plan.layout.semantics == "sync"]
    among = among or search(dataclasses.replace(problem, semantics=("sync",)), keep=1).plans
    return among[0] if among else None


class Verdict(NamedTuple):
    """What the compiler reports for a plan.

    Attributes:
      fits: whether the plan fits by the compiler's figures and within --hbm_gib; None when that is not known.
      text: a line for people.
      result: the report of `fiddlex compile`, or why the plan did not compile.
    """

    fits: bool | None
    text: str
    result: dict[str, Any]

    @classmethod
    def of(cls, planned: Layout, peak: int, result: dict[str, Any], limit: int | None) -> "Verdict":
        """Compares predicted bytes with the compiler's result, and that result with the limit, if there is one."""
        layout, predicted = layout_text(planned), f"{readable_size(peak)} predicted"
        if "error" in result:
            return cls(None, f"not compiled for {result['topology']}: {layout}: {result['error']}", result)
        needed, there = result["needed_bytes"], limit or result["memory_limit_bytes"]
        fits = result["fits"] and (limit is None or needed <= limit)
        said = f"{readable_size(needed)} by XLA ({peak / needed - 1:+.1%})" if needed else "by XLA more"
        verdict = {True: "", False: ": does not fit", None: ": whether it fits is not known"}[fits]
        room = f" the {readable_size(there)} there are" if fits is False and there else ""
        took = readable_time(result["trace_s"] + result["compile_s"])
        return cls(
            fits,
            f"compiled for {result['topology']} in {took}: {layout}: {predicted}, {said}{verdict}{room}",
            result,
        )


def _chosen(plans: Sequence[Plan], verdicts: Sequence[Verdict]) -> Plan:
    """The first plan that fits according to the compiler; the first plan when none was compiled.

    Raises:
      DeviceError: when no compiled plan fits, or none could be compiled.
    """
    if not verdicts:
        return plans[0]
    fitting = [plan for plan, verdict in zip(plans, verdicts, strict=False) if verdict.fits]
    if all("error" in verdict.result for verdict in verdicts):
        raise DeviceError(
            f"--verify={len(verdicts)}: the plans are not verified, since the compiler failed for each of them: "
            f"{verdicts[0].result['error']}"
        )
    if not fitting:
        raise DeviceError(
            f"--verify={len(verdicts)}: by the compiler none of them fits. Verify more (--verify, --keep), or allow "
            "less memory (--hbm_gib)."
        )
    return fitting[0]


def compile_plan(config: Config, name: str) -> dict[str, Any]:
    """The report of `fiddlex compile` on a plan, from its own process: the compiler can be started only once.

    Args:
      config: the plan's config.
      name: the topology to compile for.

    Returns:
      The JSON object that it prints; an object with `topology` and `error` when the plan did not compile.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "planned.py"
        write_whole(path, as_python(config, "A plan.", registering=_registering(config)))
        command = [sys.executable, "-P", "-m", "fiddlex", "compile"]
        command += [f"--config={path}", f"--topology={name}", "--format=json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"topology": name, "error": _why(done.stderr, done.returncode)}
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _why(stderr: str, status: int) -> str:
    """Why `fiddlex compile` failed, in one line: its own message, or else the exception of its traceback."""
    if said := re.findall(r"^(?:fiddlex compile|[\w.]*(?:Error|Exception)): (.+)", stderr, re.MULTILINE):
        return str(said[-1])
    if status < 0:
        return f"the compiler crashed ({signal_name(-status)})"
    return (stderr.strip().splitlines() or ["it said nothing"])[-1]


def _write(path: pathlib.Path, problem: Problem, config: Config) -> None:
    title = f"{describe(problem)}: planned for {problem.topology.name} on {datetime.date.today()} by fiddlex plan."
    path.parent.mkdir(parents=True, exist_ok=True)
    write_output(path, as_python(config, title, registering=_registering(config)))
    logger.info("wrote %s", path)
    if platform := problem.topology.platform:
        form, others = ("jobset", "ssh") if platform == "tpu" else ("slurm", "jobset, mpi, ssh")
        place = f"--topology={problem.topology.name} --num_devices={config.mesh.num_devices} --workdir=DIR"
        logger.info("fiddlex launch %s --config=%s %s makes a job file of it (also %s).", form, path, place, others)


def _registering(config: Config) -> str:
    """The config file of the command line if that registers the family or the schedule of `config`; else empty."""
    used = {("model.family", config.model.family), ("pipeline.schedule", config.pipeline.schedule)}
    if used.isdisjoint(added()):
        return ""
    file, colon, argument = str(config_flags.get_config_filename(flags.FLAGS["config"])).partition(":")
    return f"{os.path.abspath(file)}{colon}{argument}"
