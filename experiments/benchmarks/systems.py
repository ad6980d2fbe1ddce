"""Systems to be compared: each trains in a process of its own, bound to its cores, and they take turns.

A process waits for a line of input while another one works, so that other load on the machine affects all of them. It
is bound to its cores before it starts, so that jax starts as many threads as the process has cores. What processes say
to each other is in `third_party/protocol.py`; fiddlex itself is one such process
(`experiments/benchmarks/fiddlex_driver.py`).
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

from fiddlex.config import Config
from fiddlex.errors import FiddlexError
from third_party.protocol import Job

ROOT = pathlib.Path(__file__).parents[2]
FIDDLEX_DRIVER = "experiments.benchmarks.fiddlex_driver"
_LAST_LINES = 12  # of what a driver wrote, in the error when it ended

Times = list[float]  # seconds of a step, and its CPU seconds over all threads


class System:
    """A driver that runs.

    Args:
      name: what to call it.
      process: its process.
      log: the file that its standard error goes to.

    Attributes:
      name: what to call it.
      peak_bytes: the most bytes of the device's memory that it has had so far; None where none are told.
    """

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]):
        self.name, self._process, self._log = name, process, log
        self.peak_bytes: int | None = None

    def ask(self, steps: int) -> None:
        """Tells the driver to train some steps."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # `answer` tells that it has ended
            self._process.stdin.write(f"{steps}\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """The driver's next answer.

        Raises:
          FiddlexError: when the driver has ended, or writes something else.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            last = "\n".join(self._log.read().splitlines()[-_LAST_LINES:])
            raise FiddlexError(f"{self.name} ended with status {status}. The last that it wrote:\n{last}")
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise FiddlexError(
                f"{self.name} answered {line.rstrip()!r}, which is not JSON. third_party/protocol.py says what a "
                "driver answers."
            ) from None
        self.peak_bytes = answer.get("peak_bytes", self.peak_bytes)
        return answer


def two_cores(chosen: Sequence[str]) -> list[int]:
    """The cores that the user chose, or the first two that this process may use.

    Raises:
      FiddlexError: when there are not exactly two.
    """
    cores = [int(core) for core in chosen] or sorted(os.sched_getaffinity(0))[:2]
    if len(cores) != 2:
        raise FiddlexError(f"{len(cores)} core(s) to use, {cores}; the comparison needs two.")
    return cores


@contextlib.contextmanager
def bound_to(cores: Sequence[int]) -> Iterator[None]:
    """Binds this thread to some cores, and with it the processes that it starts meanwhile."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextlib.contextmanager
def started(name: str, command: Sequence[str], job: Job) -> Iterator[System]:
    """A driver that has begun a job; leaving the context ends it.

    Args:
      name: what to call it.
      command: its command line, to which the path of the job is added.
      job: the job.
    """
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8"))
        file.write(json.dumps(dataclasses.asdict(job)))
        file.flush()
        log = stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"))
        with bound_to(job.cores):
            process = stack.enter_context(
                subprocess.Popen(
                    [*command, file.name],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    cwd=ROOT,
                )
            )
        try:
            yield System(name, process, log)
        except BaseException:
            process.kill()  # it may be in the middle of a turn
            raise


@contextlib.contextmanager
def started_fiddlex(config: Config, cores: list[int]) -> Iterator[System]:
    """A process of fiddlex that trains a config and is ready for its first turn."""
    job = Job(config=json.loads(config.to_json()), cores=cores)
    with started("fiddlex", [sys.executable, "-m", FIDDLEX_DRIVER], job) as system:
        system.answer()
        yield system


def turn(*systems: System, steps: int) -> Times:
    """Mean seconds and CPU seconds of a step over a turn of one system, or over simultaneous turns of several systems.

    Raises:
      FiddlexError: when a process has ended.
    """
    for system in systems:
        system.ask(steps)
    answers = [system.answer() for system in systems]
    return [statistics.fmean(answer[name] / steps for answer in answers) for name in ("seconds", "cpu_seconds")]


def measured(turns: Sequence[Callable[[], Times]], *, rounds: int) -> list[list[Times]]:
    """The times of each kind of turn, over rounds with one turn of each kind, after a warm-up round."""
    taken = [[take() for take in turns] for _ in range(1 + rounds)][1:]
    return [list(times) for times in zip(*taken, strict=True)]


def medians(turns: Sequence[Callable[[], Times]], *, rounds: int) -> list[Times]:
    """The medians of each kind of turn; see `measured`."""
    return [
        [statistics.median(values) for values in zip(*times, strict=True)] for times in measured(turns, rounds=rounds)
    ]
