"""Prints how long a train step takes to trace and to compile, for more microbatches and for more layers.

    python -m experiments.benchmarks.compile_time [--microbatches=8,128 --layers=8,96 --repeats=3 …]

Tracing is everything from the config to the lowered program, including making, checking and lowering the schedule.
Times are CPU seconds of all threads of this process, which other load on the machine affects least. They are medians of
rounds in which the sizes take turns, after one warm-up round. jax's caches are cleared before each measurement.
"""

import copy
import itertools
import statistics
import time

from absl import flags

from experiments.benchmarks.sizes import base_config, with_microbatches
from fiddlex.config import Config
from fiddlex.terminal.command_line import define_changes, run

_CONFIG = define_changes(base_config())
_MICROBATCHES = flags.DEFINE_list("microbatches", ["8", "128"], "numbers of microbatches")
_LAYERS = flags.DEFINE_list("layers", ["8", "96"], "numbers of layers")
_REPEATS = flags.DEFINE_integer("repeats", 3, "rounds", lower_bound=1)


def main(argv: list[str]) -> None:
    """Prints the table."""
    base = _CONFIG.value
    cases = list(itertools.product(map(int, _LAYERS.value), map(int, _MICROBATCHES.value)))
    rounds = [[measure(_sized(base, *case)) for case in cases] for _ in range(1 + _REPEATS.value)][1:]
    by_case = zip(*rounds, strict=True)
    medians = [tuple(statistics.median(times) for times in zip(*of_case, strict=True)) for of_case in by_case]
    print(f"| {base.pipeline.schedule}, pipe={base.mesh.pipe} | trace, CPU s | | compile, CPU s | |")
    print("|---|---:|---:|---:|---:|")
    for (layers, microbatches), times in zip(cases, medians, strict=True):
        columns = [f"{time_s:.2f} | {time_s / first - 1:+.0%}" for time_s, first in zip(times, medians[0], strict=True)]
        print(f"| layers = {layers}, m = {microbatches} | {' | '.join(columns)} |")


def measure(config: Config) -> tuple[float, float]:
    """CPU seconds to trace and to compile the train step, with empty caches."""
    import jax

    from experiments.benchmarks.programs import make_program

    jax.clear_caches()
    start_s = time.process_time()
    program = make_program(config)
    lowered = program.lower()
    lowered_s = time.process_time()
    lowered.compile()
    return lowered_s - start_s, time.process_time() - lowered_s


def _sized(base: Config, num_layers: int, num_microbatches: int) -> Config:
    config = with_microbatches(copy.deepcopy(base), num_microbatches)
    config.model.num_layers = num_layers
    return config


if __name__ == "__main__":
    run(main)
