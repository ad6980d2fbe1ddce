"""Measures the memory that runs on fake devices take of the machine, beside what is predicted before they start.

    python -m experiments.process_memory

Each case runs in a process of its own (`--case=NAME`), with a batch that is trained on a few times, saved and trained
on again. Measured are the largest resident sizes (VmHWM of /proc/self/status, which only Linux has), less the resident
size before the state is made: when `fiddlex.train.run.faults.require_memory` asks what is free. Programs are compiled
anew.
docs/memory.md has the table.
"""

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any

from absl import flags

from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.overrides import override
from fiddlex.errors import ConfigError
from fiddlex.planner.enough_memory import Use, process_needs
from fiddlex.terminal.command_line import run

ALONE = ("mesh.data=1", "mesh.pipe=1", "mesh.tensor=1", "pipeline.schedule=1f1b", "pipeline.num_chunks=1")
WIDE = ("model.hidden_size=1024", "model.num_heads=16", "pipeline.num_microbatches=8")
CASES: dict[str, tuple[str, tuple[str, ...]]] = {  # a config and its changes
    "gpt_tiny": ("gpt_tiny", ()),
    "gpt_tiny:2bw": ("gpt_tiny:2bw", ()),
    "1,024 wide": ("gpt_tiny", WIDE),
    "1,024 wide, 12 layers": ("gpt_tiny", (*WIDE, "model.num_layers=12", *ALONE[3:])),
    "1,024 wide, one device": ("gpt_tiny", (*WIDE, *ALONE, "data.global_batch_size=8", "pipeline.num_microbatches=4")),
    "768 wide, eight replicas": (
        "gpt_tiny",
        ("model.hidden_size=768", "model.num_heads=12", *ALONE, "mesh.data=8", "pipeline.num_microbatches=1"),
    ),
    "vocabulary of 32,000": (
        "gpt_tiny",
        ("model.hidden_size=512", "model.num_heads=8", "model.seq_len=512", "model.vocab_size=32000"),
    ),
    "sequences of 2,048": (
        "gpt_tiny",
        (*ALONE, "mesh.pipe=4", "model.seq_len=2048", "pipeline.num_microbatches=8"),
    ),
}
_CASE = flags.DEFINE_string("case", None, "measure this case in this process, and print it as JSON")
_GIB = 2**30


def main(argv: list[str]) -> None:
    """Measures all cases, or one."""
    if _CASE.value is not None:
        if _CASE.value not in CASES:
            raise ConfigError(f"--case={_CASE.value} is none of {', '.join(CASES)}.")
        print(json.dumps(measure(config_of(_CASE.value))))
        return
    print("| run | devices | steps predicted | measured | | with a checkpoint predicted | measured | |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for name in CASES:
        line = [sys.executable, "-m", "experiments.process_memory", f"--case={name}"]
        done = subprocess.run(line, stdout=subprocess.PIPE, text=True, check=True)
        print(row(name, json.loads(done.stdout.splitlines()[-1])), flush=True)


def config_of(name: str) -> Config:
    """The config of a case."""
    config, changes = CASES[name]
    return override(load_config(config), *changes, "train.checkpoint_every=1", "train.compilation_cache=").validate()


def measure(config: Config) -> dict[str, Any]:
    """Bytes that a run has taken at most: `steps`, and `saving` with a checkpoint that is written beside steps."""
    from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
    from fiddlex.train.trainer import Trainer

    trainer = Trainer(config)
    before = _status("VmRSS")
    list(trainer.steps(3))
    steps = _status("VmHWM") - before
    with tempfile.TemporaryDirectory() as folder, Checkpoints(pathlib.Path(folder)) as checkpoints:
        trainer.save(checkpoints)
        list(trainer.steps(3))
    needs = {use: process_needs(trainer.config, use, num_processes=1) for use in (Use.MEASURING, Use.TRAINING)}
    predicted = {use.value: sum(parts.values()) for use, parts in needs.items()}
    return predicted | {"steps": steps, "saving": _status("VmHWM") - before, "devices": config.mesh.num_devices}


def row(name: str, facts: dict[str, Any]) -> str:
    """A line of the table, in GiB, with predictions over measured sizes less one."""
    pairs = (facts[Use.MEASURING.value], facts["steps"]), (facts[Use.TRAINING.value], facts["saving"])
    cells = [f"{a / _GIB:.2f} | {b / _GIB:.2f} | {a / b - 1:+.0%}" for a, b in pairs]
    return f"| {name} | {facts['devices']} | {' | '.join(cells)} |"


def _status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = pathlib.Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    run(main)
