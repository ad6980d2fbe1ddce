"""Measures a pipeline of two devices on two cores against one device on one core, in tokens per second.

    python -m experiments.benchmarks.throughput [--rounds=5 --steps=4 --microbatches=8 --config.model.num_layers=8 …]

Each side trains the same model on the same global batch in a process of its own, bound to its cores before jax starts,
which then makes as many threads as it has cores. The sides take turns, the one waiting for a line of input while the
other works, so that what else the machine does falls on both; medians of rounds. The third row is one device on each
core at once, apart: what the machine itself leaves of twice the speed. Of that the pipeline can have m/(m + 1), the
rest being its bubble. CPU seconds, of all threads of a process together, tell what the pipeline adds in work, also
where other work on the machine spoils the times.
"""

import contextlib
import copy
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from absl import flags

from experiments.benchmarks.sizes import with_microbatches
from fiddlex.config import Config
from fiddlex.errors import FiddlexError
from fiddlex.flags import define_changes, run


def base_config() -> Config:
    """A model in whose step products of matrices outweigh all else."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 8, 256, 4
    config.model.seq_len, config.model.vocab_size = 256, 1024
    return config


_CONFIG = define_changes(base_config())
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "microbatches in a batch", lower_bound=1)
_MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", 1, "examples in a microbatch", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns that each side gets", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 4, "steps in a turn", lower_bound=1)
_WORKER = flags.DEFINE_string("worker", None, "for this program's own use: the config of one side, as JSON")
_CORES = flags.DEFINE_list("cores", [], "the two cores; by default the first two that this process may use")


def main(argv: list[str]) -> None:
    """Prints the table."""
    if _WORKER.value:
        work(Config.from_json(_WORKER.value))
        return
    config = with_microbatches(_CONFIG.value, _MICROBATCHES.value, microbatch_size=_MICROBATCH_SIZE.value)
    cores = [int(core) for core in _CORES.value] or sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise FiddlexError(f"this process may use {len(cores)} core; the comparison needs two.")
    piped = copy.deepcopy(config)
    piped.mesh.pipe = 2
    with side(config, cores[:1]) as first, side(config, cores[1:2]) as second, side(piped, cores) as both:
        rounds = [(turn(first), turn(both), turn(first, second)) for _ in range(1 + _ROUNDS.value)][
            1:
        ]  # the first warms up
    medians = [
        [statistics.median(values) for values in zip(*turns, strict=True)] for turns in zip(*rounds, strict=True)
    ]
    print(f"| {_describe(config)} | step, s | CPU s | tokens/s |")
    print("|---|---:|---:|---:|")
    speeds = []
    for name, copies, (step_s, cpu_s) in zip(("one device", "pipe=2", "two apart"), (1, 1, 2), medians, strict=True):
        speeds.append(copies * config.tokens_per_step / step_s)
        print(f"| {name} | {step_s:.3f} | {cpu_s:.3f} | {speeds[-1]:,.0f} |")
    one, two, apart = speeds
    bound = _MICROBATCHES.value / (_MICROBATCHES.value + 1)
    print(
        f"\npipe=2 is {two / one:.2f} times as fast as one device: {two / (2 * one * bound):.0%} of 2m/(m + 1), "
        f"and {two / (apart * bound):.0%} of m/(m + 1) of the two apart."
    )


def work(config: Config) -> None:
    """One side: trains a turn for each line of input and answers with a step's seconds and CPU seconds."""
    import jax

    from fiddlex.train.trainer import Trainer

    jax.config.update("jax_platforms", "cpu")  # no other is measured, and libtpu would complain that it finds no TPU
    trainer = Trainer(config)
    trainer.compile()
    jax.block_until_ready(trainer.state)
    for _ in sys.stdin:
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        metrics = [trainer.dispatch().metrics["loss"] for _ in range(_STEPS.value)]
        jax.block_until_ready(metrics)
        seconds = time.perf_counter() - start_s, time.process_time() - start_cpu_s
        print(json.dumps([value / _STEPS.value for value in seconds]), flush=True)


Side = subprocess.Popen[str]


@contextlib.contextmanager
def side(config: Config, cores: list[int]) -> Iterator[Side]:
    """A process that runs `work` on `cores`."""
    command = [sys.executable, "-m", "experiments.benchmarks.throughput", f"--worker={config.to_json()}"]
    with subprocess.Popen(
        [*command, f"--steps={_STEPS.value}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: os.sched_setaffinity(0, cores),
    ) as process:
        yield process


def turn(*sides: Side) -> list[float]:
    """Seconds and CPU seconds of a step, means over a turn of one side, or of several at once and over them.

    Raises:
      FiddlexError: when a process has ended.
    """
    for process in sides:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    answers = []
    for process in sides:
        assert process.stdout is not None
        answer = process.stdout.readline()
        if not answer:
            raise FiddlexError(f"a side ended with status {process.wait()}; what it said stands above.")
        answers.append(json.loads(answer))
    return [statistics.fmean(values) for values in zip(*answers, strict=True)]


def _describe(config: Config) -> str:
    model = config.model
    sizes = f"layers={model.num_layers}, hidden={model.hidden_size}, seq={model.seq_len}, {model.dtype}"
    return f"{config.pipeline.schedule}, m={config.pipeline.num_microbatches}, {sizes}"


if __name__ == "__main__":
    run(main)
