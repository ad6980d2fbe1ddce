"""Chooses a layout for a model on a cluster: mesh, schedule, microbatches, semantics and recomputation. Trains nothing.

    python experiments/plan.py --config=configs/gpt3.py:18.4b --topology=a100_80 --num_devices=256
    python experiments/plan.py --config=… --topology=tpu_v5p --num_devices=128 --objective=cost --write=/tmp/planned.py

The config's mesh and pipeline are what is looked for; all else in it stays. `--write` gives a config file that runs.
"""

import datetime
import json
import pathlib

from absl import flags

from fiddlex.config import Config
from fiddlex.errors import DeviceError
from fiddlex.flags import define_config, run
from fiddlex.planner.advice import why_none
from fiddlex.planner.report import GIB, as_json, as_python, as_text, describe
from fiddlex.planner.search import OBJECTIVES, SEMANTICS, Problem, search
from fiddlex.topology import load_topology

_CONFIG = define_config()
_TOPOLOGY = flags.DEFINE_string(
    "topology", None, "name of the catalogue (python -m fiddlex.topology lists it) or a .toml file", required=True
)
_NUM_DEVICES = flags.DEFINE_integer("num_devices", None, "devices to use", lower_bound=1, required=True)
_HBM_GIB = flags.DEFINE_float(
    "hbm_gib", None, "memory of a device that a step may take; by default 90% of the chip's", lower_bound=0
)
_BATCH = flags.DEFINE_integer("global_batch_size", None, "in place of data.global_batch_size", lower_bound=1)
_OBJECTIVE = flags.DEFINE_enum(
    "objective", "time", OBJECTIVES, "what of a step is to be least; for cost it may take fewer devices, by halves"
)
_SEMANTICS = flags.DEFINE_multi_enum("semantics", SEMANTICS, SEMANTICS, "weight-update semantics that are allowed")
_KEEP = flags.DEFINE_integer("keep", 5, "plans to print", lower_bound=1)
_WRITE = flags.DEFINE_string("write", None, "config file to write the first plan to")
_FORMAT = flags.DEFINE_enum("format", "table", ["table", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Prints the plans."""
    config = _CONFIG.value
    if _BATCH.value:
        config.data.global_batch_size = _BATCH.value
    for section in (config.model, config.optimizer, config.data, config.train):
        section.validate()
    problem = Problem(
        config,
        load_topology(_TOPOLOGY.value),
        _NUM_DEVICES.value,
        memory_bytes=None if _HBM_GIB.value is None else int(_HBM_GIB.value * GIB),
        objective=_OBJECTIVE.value,
        semantics=tuple(_SEMANTICS.value),
    )
    found = search(problem, keep=_KEEP.value)
    if _FORMAT.value == "json":
        print(json.dumps(as_json(problem, found)))
    if not found.plans:
        assert found.least is not None  # search raises where there is no layout at all
        raise DeviceError(why_none(problem, found.least))
    if _FORMAT.value == "table":
        print(as_text(problem, found))
    if _WRITE.value:
        _write(pathlib.Path(_WRITE.value), problem, found.plans[0].config.validate())


def _write(path: pathlib.Path, problem: Problem, config: Config) -> None:
    title = (
        f"{describe(problem)}: planned for {problem.topology.name} on {datetime.date.today()} by experiments/plan.py."
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_python(config, title), encoding="utf-8")


if __name__ == "__main__":
    run(main)
