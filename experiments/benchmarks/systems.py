"""Training runs to be compared: each runs in its own process on its own cores, and they take turns.

A process waits for a line of input while another one works, so that other load on the machine affects all of them. It
is bound to its cores before jax starts, so that jax starts as many threads as the process has cores. Run as a program,
this module is one such process:

    python -m experiments.benchmarks.systems CONFIG.JSON STEPS
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence

from fiddlex.config import Config
from fiddlex.errors import FiddlexError

Process = subprocess.Popen[str]
Times = list[float]  # seconds of a step, and its CPU seconds over all threads


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
def started(config: Config, cores: list[int], *, steps: int) -> Iterator[Process]:
    """A process that trains a config for `steps` steps in each of its turns."""
    with subprocess.Popen(
        [sys.executable, "-m", "experiments.benchmarks.systems", config.to_json(), str(steps)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        yield process


def turn(*systems: Process) -> list[float]:
    """Mean seconds and CPU seconds of a step over a turn of one system, or over simultaneous turns of several systems.

    Raises:
      FiddlexError: when a process has ended.
    """
    for process in systems:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = []
    for process in systems:
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise FiddlexError(f"a run ended with status {process.wait()}; what it said stands above.")
        answers.append(json.loads(answer))
    return [statistics.fmean(values) for values in zip(*answers, strict=True)]


def medians(turns: Sequence[Callable[[], Times]], *, rounds: int) -> list[Times]:
    """The medians of each kind of turn over rounds with one turn of each kind, after a warm-up round."""
    measured = [[take() for take in turns] for _ in range(1 + rounds)][1:]
    return [[statistics.median(values) for values in zip(*times, strict=True)] for times in zip(*measured, strict=True)]


def work(config: Config, steps: int) -> None:
    """Trains one turn for each line of input and prints a step's seconds and CPU seconds."""
    import jax

    from fiddlex.train.trainer import Trainer

    jax.config.update("jax_platforms", "cpu")  # only the CPU is measured, and libtpu would warn that it finds no TPU
    trainer = Trainer(config)
    trainer.compile()
    jax.block_until_ready(trainer.state)
    for _ in sys.stdin:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        metrics = [trainer.dispatch().metrics["loss"] for _ in range(steps)]
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        print(json.dumps([value / steps for value in seconds]), flush=True)


if __name__ == "__main__":
    work(Config.from_json(sys.argv[1]), int(sys.argv[2]))
