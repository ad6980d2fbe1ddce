"""Measures the train step of a config beside other systems that train the same model.

    experiments/benchmark.py --against=torch,torch-compile --python=torch=ENV/bin/python --config=gpt_tiny
    experiments/benchmark.py --against=torch-gpipe,torch-1f1b:layers=3+1 --python=… --config=gpt_tiny --format=json

All systems start from the same weights and train on the same batches with the same update rule. First the losses of
their first steps are compared; then they take turns on the same cores, or with `--device=cuda` on the same GPU.
docs/comparisons.md has the systems, their options, and what makes the comparison fair. `fiddlex:FIELD=VALUE` is one of
the systems: fiddlex with another value of a field, as in `--against=fiddlex:mesh.pipe=2`. Nothing is installed.
"""

import json
import os
import pathlib
import tempfile

from absl import flags

from experiments.benchmarks.comparison import TOLERANCES, compare, first_losses, table
from experiments.benchmarks.known_systems import DEVICES, IN_FLOAT32, KNOWN, as_json, ask, pairs
from fiddlex.config import rules
from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import define_config

_CONFIG = define_config()
_AGAINST = flags.DEFINE_list("against", [], f"systems to compare with: fiddlex, {', '.join(KNOWN)}")
_PYTHON = flags.DEFINE_multi_string("python", [], "NAME=PATH, the Python that has torch or another system's packages")
_CLONE = flags.DEFINE_multi_string("clone", [], "NAME=FOLDER, a clone of nanogpt or nanochat")
_CORES = flags.DEFINE_list("cores", [], "cores of each system; by default those that this process may use")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns that each system gets", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 4, "steps in a turn", lower_bound=1)
_CHECK_STEPS = flags.DEFINE_integer("check_steps", 5, "first steps, whose losses are compared", lower_bound=1)
_TOLERANCE = flags.DEFINE_float(
    "tolerance",
    None,
    "largest difference of two losses, relative to fiddlex's; by default "
    + ", ".join(f"{tolerance:g} in {dtype}" for dtype, tolerance in TOLERANCES.items()),
)
_DEVICE = flags.DEFINE_enum("device", "cpu", DEVICES, "what trains; cuda: the first GPU")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")


def main(argv: list[str]) -> None:
    """Compares, and prints the table or the record."""
    config = _CONFIG.value.validate()
    rules.choice("model.dtype", config.model.dtype, tuple(TOLERANCES))
    if not all(_AGAINST.value) or not _AGAINST.value:
        raise ConfigError(f"--against={','.join(_AGAINST.value)}: name some of fiddlex, {', '.join(KNOWN)}.")
    pythons = pairs("python", _PYTHON.value, [known.environment for known in KNOWN.values()])
    clones = pairs("clone", _CLONE.value, [known.cloned for known in KNOWN.values() if known.cloned])
    cores = _cores()
    names = ["fiddlex", *_AGAINST.value]
    device = _DEVICE.value
    asked = [ask(name, config, pythons=pythons, clones=clones, device=device) for name in names]

    from experiments.benchmarks.same_start import require_comparable, write_start  # starts jax
    from fiddlex.train.timing import about

    require_comparable(config)
    tolerance = TOLERANCES[config.model.dtype] if _TOLERANCE.value is None else _TOLERANCE.value
    rules.between("--tolerance", tolerance, 0, 1)
    with tempfile.TemporaryDirectory() as folder:
        job = write_start(config, pathlib.Path(folder), check_steps=_CHECK_STEPS.value, cores=cores, device=device)
        steps, expected = _STEPS.value, None
        if config.model.dtype != "float32":
            expected = first_losses(ask(IN_FLOAT32, config, pythons={}, clones={}), job)
        results = compare(asked, job, rounds=_ROUNDS.value, steps=steps, tolerance=tolerance, expected=expected)
    if _FORMAT.value == "text":
        print(table(results, config.tokens_per_step))
        return
    facts = about() | {"cores": cores, "device": device, "steps_in_a_turn": steps, "config": as_json(config)}
    print(json.dumps(facts | {"systems": [result.to_record(config.tokens_per_step) for result in results]}))


def _cores() -> list[int]:
    """The cores that systems are bound to.

    Raises:
      ConfigError: when one is not among those that this process may use.
    """
    usable = sorted(os.sched_getaffinity(0))
    if wrong := [core for core in _CORES.value if core not in map(str, usable)]:
        raise ConfigError(f"--cores={','.join(_CORES.value)}: {wrong[0]} is not among the usable cores, {usable}.")
    return sorted({int(core) for core in _CORES.value}) or usable
