"""Tests fiddlex on a GPU that is at hand and measures it there, beside other systems, in one command.

    python -m experiments.gpu --results=gpu.jsonl --clone=nanogpt=FOLDER
    python -m experiments.gpu --results=gpu.jsonl --stages=sizes --sizes=1.3b --clone=nanogpt=FOLDER
    python -m experiments.gpu --results=/tmp/cpu.jsonl --device=cpu --sizes=tiny

Stages: `tests` runs tests of the repository, `flash` runs the fused kernel of attention and compares it with attention
that computes all scores, and `sizes` measures tokens per second, MFU and memory of models of real sizes. Each part adds
a line to the results as soon as it ends. A part that failed stops no other one. The same command continues: it repeats
only parts that failed, or had other settings, or ran on another machine. Beside the results, a file whose name ends in
`.md` has their tables. docs/gpu.md tells more.
"""

import logging
import pathlib

from absl import flags

from experiments.benchmarks.comparison import TOLERANCES
from experiments.benchmarks.known_systems import DEVICES, KNOWN, pairs
from experiments.on_device.kernels import run_kernels
from experiments.on_device.machine import machine
from experiments.on_device.report import document
from experiments.on_device.sizes import SIZES
from experiments.on_device.speed import Options, run_sizes
from experiments.on_device.study import Record, Study
from experiments.on_device.suite import run_suite
from experiments.results import owned
from fiddlex.config import rules
from fiddlex.errors import ConfigError, FiddlexError
from fiddlex.files.whole_files import write_whole
from fiddlex.terminal.command_line import run

logger = logging.getLogger("fiddlex.gpu")

STAGES = ("tests", "flash", "sizes")

_RESULTS = flags.DEFINE_string("results", None, "JSON Lines file of the results, read and added to", required=True)
_DEVICE = flags.DEFINE_enum("device", "cuda", DEVICES, "cpu: tries everything but CUDA")
_STAGES = flags.DEFINE_list("stages", list(STAGES), "what to do")
_SIZES = flags.DEFINE_list("sizes", ["small", "1.3b"], f"models to measure, of {', '.join(SIZES)}")
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", list(TOLERANCES), "dtype of arithmetic")
_AGAINST = flags.DEFINE_list("against", ["nanogpt-compile"], "systems to measure beside fiddlex (docs/comparisons.md)")
_PYTHON = flags.DEFINE_multi_string("python", [], "NAME=PATH, the Python that has torch")
_CLONE = flags.DEFINE_multi_string("clone", [], "NAME=FOLDER, a clone of nanogpt or nanochat")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns that each system gets", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 4, "steps in a turn", lower_bound=1)


def main(argv: list[str]) -> None:
    """Runs the stages and prints the tables."""
    for flag, choices in ((_STAGES, STAGES), (_SIZES, tuple(SIZES))):
        if not flag.value:
            raise ConfigError(f"--{flag.name}=: name some of {', '.join(choices)}.")
        for value in flag.value:
            rules.choice(f"--{flag.name}", value, choices)
    for name in _AGAINST.value:
        rules.choice("--against", name.partition(":")[0], ("fiddlex", *KNOWN))
    path = pathlib.Path(_RESULTS.value)
    if path.suffix == ".md":
        raise ConfigError(f"--results={path}: the tables go to a file of this name. Use another ending, as in .jsonl.")
    pythons = pairs("python", _PYTHON.value, [known.environment for known in KNOWN.values()])
    clones = pairs("clone", _CLONE.value, [known.cloned for known in KNOWN.values() if known.cloned])
    device = _DEVICE.value
    here = machine(device)
    logger.info("This is %s: %s.", here["device_kind"], here["driver"] or f"{here['cores']} cores")

    def write(records: list[Record]) -> None:
        write_whole(path.with_suffix(".md"), document(records))

    with owned(path):
        study = Study(path, here, write)
        if "tests" in _STAGES.value:
            run_suite(study, device)
        if "flash" in _STAGES.value:
            run_kernels(study, device)
        if "sizes" in _STAGES.value:
            against, rounds, steps = _AGAINST.value, _ROUNDS.value, _STEPS.value
            kind = here["device_kind"]
            run_sizes(study, _SIZES.value, Options(device, kind, _DTYPE.value, against, pythons, clones, rounds, steps))
    print(document(study.records))
    if study.failed:
        raise FiddlexError(f"failed: {'; '.join(study.failed)}. {path} has all results; the same command tries again.")


if __name__ == "__main__":
    run(main)
