"""Compares the tokens per second of a pipeline of two devices on two cores with those of one device on one core.

    python -m experiments.benchmarks.throughput [--rounds=5 --steps=4 --microbatches=8 --config.model.num_layers=8 …]

Each system trains the same model on the same global batch in its own process, which is bound to its cores before jax
starts, so that jax starts as many threads as the process has cores. The systems take turns: one waits for a line of
input while the other works, so that other load on the machine affects both. Times are medians of rounds. The third row
runs one device on each core at the same time, independently; it shows how much of twice the speed the machine itself
allows. The pipeline can reach m/(m + 1) of that; the rest is its bubble. CPU seconds, summed over all threads of a
process, show the work that the pipeline adds, even when other load on the machine distorts the times.
"""

import copy

from absl import flags

from experiments.benchmarks.sizes import base_config, with_microbatches
from experiments.benchmarks.systems import medians, started_fiddlex, turn, two_cores
from fiddlex.config import Config
from fiddlex.terminal.command_line import define_changes, run

_CONFIG = define_changes(base_config(pipe=1))
_MICROBATCHES = flags.DEFINE_integer("microbatches", 8, "microbatches in a batch", lower_bound=1)
_MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", 1, "examples in a microbatch", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns that each system gets", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 4, "steps in a turn", lower_bound=1)
_CORES = flags.DEFINE_list("cores", [], "the two cores; by default the first two that this process may use")


def main(argv: list[str]) -> None:
    """Prints the table."""
    config = with_microbatches(_CONFIG.value, _MICROBATCHES.value, microbatch_size=_MICROBATCH_SIZE.value)
    cores, steps = two_cores(_CORES.value), _STEPS.value
    piped = copy.deepcopy(config)
    piped.mesh.pipe = 2
    with (
        started_fiddlex(config, cores[:1]) as first,
        started_fiddlex(config, cores[1:]) as second,
        started_fiddlex(piped, cores) as both,
    ):
        turns = (
            lambda: turn(first, steps=steps),
            lambda: turn(both, steps=steps),
            lambda: turn(first, second, steps=steps),
        )
        times = medians(turns, rounds=_ROUNDS.value)
    print(f"| {_describe(config)} | step, s | CPU s | tokens/s |")
    print("|---|---:|---:|---:|")
    speeds = []
    for name, copies, (step_s, cpu_s) in zip(("one device", "pipe=2", "two apart"), (1, 1, 2), times, strict=True):
        speeds.append(copies * config.tokens_per_step / step_s)
        print(f"| {name} | {step_s:.3f} | {cpu_s:.3f} | {speeds[-1]:,.0f} |")
    one, two, apart = speeds
    bound = _MICROBATCHES.value / (_MICROBATCHES.value + 1)
    print(
        f"\npipe=2 is {two / one:.2f} times as fast as one device: {two / (2 * one * bound):.0%} of 2m/(m + 1), "
        f"and {two / (apart * bound):.0%} of m/(m + 1) of the two apart."
    )


def _describe(config: Config) -> str:
    model = config.model
    sizes = f"layers={model.num_layers}, hidden={model.hidden_size}, seq={model.seq_len}, {model.dtype}"
    return f"{config.pipeline.schedule}, m={config.pipeline.num_microbatches}, {sizes}"


if __name__ == "__main__":
    run(main)
