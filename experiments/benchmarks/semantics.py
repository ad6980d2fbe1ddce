"""Compares the tokens per second of a pipeline that is not flushed between batches (2bw) with those of a flushed one.

    python -m experiments.benchmarks.semantics [--rounds=5 --steps=8 --microbatches=2 --config.model.num_layers=8 …]

Both systems have pipe=2, two devices on two cores, and take turns; times are medians of rounds. A step takes m + p − 1
ticks with a flush and m ticks without one, so 2bw can be 1.5 times as fast at m = 2; further rows have more
microbatches.
"""

import copy

from absl import flags

from experiments.benchmarks.sizes import base_config, with_microbatches
from experiments.benchmarks.systems import medians, started_fiddlex, turn, two_cores
from fiddlex.terminal.command_line import define_changes, run

_CONFIG = define_changes(base_config(pipe=2))
_MICROBATCHES = flags.DEFINE_multi_integer("microbatches", [2, 4, 8], "microbatches in a batch", lower_bound=2)
_MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", 4, "examples in a microbatch", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns that each system gets", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 8, "steps in a turn", lower_bound=1)
_CORES = flags.DEFINE_list("cores", [], "the two cores; by default the first two that this process may use")


def main(argv: list[str]) -> None:
    """Prints the table."""
    cores, steps = two_cores(_CORES.value), _STEPS.value
    print("| microbatches | flush, s | 2bw, s | flush, tokens/s | 2bw, tokens/s | 2bw over flush | ideal |")
    print("|---:|---:|---:|---:|---:|---:|---:|")
    for microbatches in _MICROBATCHES.value:
        flushed = with_microbatches(_CONFIG.value, microbatches, microbatch_size=_MICROBATCH_SIZE.value)
        flushed.train.num_steps = 2 * steps * (2 + _ROUNDS.value)  # excludes the end, where a pipeline drains
        going_on = copy.deepcopy(flushed)
        going_on.pipeline.semantics = "2bw"
        with started_fiddlex(flushed, cores) as sync, started_fiddlex(going_on, cores) as bw:
            turns = (lambda sync=sync: turn(sync, steps=steps), lambda bw=bw: turn(bw, steps=steps))
            (sync_s, _), (bw_s, _) = medians(turns, rounds=_ROUNDS.value)
        speeds = [flushed.tokens_per_step / seconds for seconds in (sync_s, bw_s)]
        ideal = (microbatches + flushed.mesh.pipe - 1) / microbatches
        print(
            f"| {microbatches} | {sync_s:.3f} | {bw_s:.3f} | {speeds[0]:,.0f} | {speeds[1]:,.0f} | "
            f"{sync_s / bw_s:.2f} | {ideal:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    run(main)
