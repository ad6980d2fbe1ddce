"""What several processes cost: the step of one mesh of eight fake devices in 1, 2, 4 and 8 processes, in turns.

    python -m experiments.benchmarks.processes [--rounds=3 --num_steps=60]

Each turn is a run of its own. Prints a Markdown table: the median step over all turns, its ratio to that of one
process, and the median of the time that the host of rank 0 is busy in a step. The mesh is data=2 × pipe=2 × tensor=2.
"""

import json
import os
import pathlib
import socket
import statistics
import subprocess
import sys
import tempfile
from typing import NamedTuple

from absl import flags

from fiddlex.errors import DeviceError
from fiddlex.terminal.command_line import run

_ROUNDS = flags.DEFINE_integer("rounds", 3, "turns of each number of processes", lower_bound=1)
_STEPS = flags.DEFINE_integer("num_steps", 60, "steps of each run", lower_bound=20)

DEVICES = 8
NUMBERS = (1, 2, 4, 8)  # of processes
_WARM_UP = 10  # steps of each run that are not counted


class Times(NamedTuple):
    """Seconds of the steps of one run: of the whole step, and of the host's own work in it."""

    step_s: list[float]
    host_s: list[float]


def measure(number: int, folder: pathlib.Path) -> Times:
    """The times of a run in `number` processes, whose compiled programs are kept beside `folder`."""
    with socket.create_server(("", 0)) as server:
        address = f"localhost:{server.getsockname()[1]}"
    command = [sys.executable, "-P", "-m", "fiddlex", "train", "--config=gpt_tiny", f"--workdir={folder / 'run'}"]
    command += [f"--config.train.num_steps={_STEPS.value}", "--config.train.log_every=1"]
    command += ["--config.train.eval_every=0", "--config.train.checkpoint_every=0", "--config.train.sample_tokens=0"]
    command += [f"--fake_devices={DEVICES // number}"]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs")}
    places = [
        [f"--coordinator_address={address}", f"--num_processes={number}", f"--process_id={rank}"]
        for rank in range(number)
    ]
    started = [
        subprocess.Popen([*command, *(place if number > 1 else [])], env=environment, stderr=subprocess.DEVNULL)
        for place in places
    ]
    if any([process.wait() for process in started]):
        raise DeviceError(f"A run in {number} processes failed. Run it by hand: {' '.join(command)}")
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    counted = [record for record in records if "loss" in record and record["step"] > _WARM_UP]
    return Times([each["step_time_s"] for each in counted], [each["host_time_s"] for each in counted])


def main(argv: list[str]) -> None:
    """Prints the table."""
    found = {number: Times([], []) for number in NUMBERS}
    with tempfile.TemporaryDirectory() as root:
        for turn in range(_ROUNDS.value):
            for number in NUMBERS:
                folder = pathlib.Path(root) / f"{turn}-{number}"
                folder.mkdir()
                for total, part in zip(found[number], measure(number, folder), strict=True):
                    total.extend(part)
    alone = statistics.median(found[1].step_s)
    print("| processes × devices | step, ms | of one process | host, ms |\n|---|---:|---:|---:|")
    for number, times in found.items():
        step, host = statistics.median(times.step_s), statistics.median(times.host_s)
        print(f"| {number} × {DEVICES // number} | {1e3 * step:.0f} | {step / alone:.2f} | {1e3 * host:.1f} |")


if __name__ == "__main__":
    run(main)
