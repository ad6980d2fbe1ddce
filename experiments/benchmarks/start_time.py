"""How long a run takes from its start to the end of its first step, with and without programs of an earlier run.

    python -m experiments.benchmarks.start_time [--rounds=5 --run=--config=gpt_tiny]

Each turn is a process of its own: one with an empty cache of compiled programs (`train.compilation_cache`), then one
with what that one has kept. Prints a Markdown table of medians, the smallest and the largest.
"""

import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

from absl import flags

from fiddlex.errors import DeviceError
from fiddlex.terminal.command_line import run

_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns of each kind", lower_bound=1)
_RUN = flags.DEFINE_multi_string("run", ["--config=gpt_tiny"], "flags of the run")

_LONGEST_S = 600.0


def seconds_to_first_step(workdir: pathlib.Path, programs: pathlib.Path) -> float:
    """The seconds from the start of a process to the record of its first step."""
    command = [sys.executable, "-P", "-m", "fiddlex", "train", f"--workdir={workdir}", *_RUN.value]
    command += ["--config.train.log_every=1", f"--config.train.compilation_cache={programs}"]
    environment = {name: value for name, value in os.environ.items() if name != "JAX_COMPILATION_CACHE_DIR"}
    metrics = workdir / "metrics.jsonl"
    start_s = time.monotonic()
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        try:
            while not metrics.exists() or not metrics.stat().st_size:
                if process.poll() is not None or time.monotonic() - start_s > _LONGEST_S:
                    raise DeviceError(f"A run made no step. Run it by hand: {' '.join(command)}")
                time.sleep(0.005)
            return time.monotonic() - start_s
        finally:
            process.kill()


def main(argv: list[str]) -> None:
    """Prints the table."""
    found: dict[str, list[float]] = {"compiled": [], "kept by an earlier run": []}
    with tempfile.TemporaryDirectory() as root:
        for turn in range(_ROUNDS.value):
            for kind, times in found.items():
                folder = pathlib.Path(root) / str(turn)
                times.append(seconds_to_first_step(folder / kind.replace(" ", "-"), folder / "programs"))
    print("| train step | seconds to the end of the first step | from | to |\n|---|---:|---:|---:|")
    for kind, times in found.items():
        print(f"| {kind} | {statistics.median(times):.1f} | {min(times):.1f} | {max(times):.1f} |")


if __name__ == "__main__":
    run(main)
