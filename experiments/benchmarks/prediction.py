"""Compares the time of a step under 2bw with each prediction of the delayed weights.

    python -m experiments.benchmarks.prediction [--rounds=5 --steps=8 --microbatches=4 --optimizer=muon …]

All systems have pipe=2, two devices on two cores, and those of an optimizer take turns; times are medians of rounds.
The fewer tokens a step has for each weight, the more a prediction takes of it; `--microbatch_size` sets them.
"""

import contextlib
import copy

from absl import flags

from experiments.benchmarks.sizes import base_config, with_microbatches
from experiments.benchmarks.systems import medians, started_fiddlex, turn, two_cores
from fiddlex.config.sections import OPTIMIZERS
from fiddlex.terminal.command_line import define_changes, run

PREDICTIONS = (("none", 1), ("extrapolate", 1), ("extrapolate", 2), ("momentum", 1), ("momentum", 2))

_CONFIG = define_changes(base_config(pipe=2))
_OPTIMIZERS = flags.DEFINE_multi_enum("optimizer", ["adamw", "muon"], list(OPTIMIZERS), "optimizers, one row for each")
_MICROBATCHES = flags.DEFINE_integer("microbatches", 4, "microbatches in a batch", lower_bound=2)
_MICROBATCH_SIZE = flags.DEFINE_integer("microbatch_size", 4, "examples in a microbatch", lower_bound=1)
_ROUNDS = flags.DEFINE_integer("rounds", 5, "turns that each system gets", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 8, "steps in a turn", lower_bound=1)
_CORES = flags.DEFINE_list("cores", [], "the two cores; by default the first two that this process may use")


def main(argv: list[str]) -> None:
    """Prints the table."""
    cores, steps = two_cores(_CORES.value), _STEPS.value
    names = [kind if kind == "none" else f"{kind}, order {order}" for kind, order in PREDICTIONS]
    print(f"| optimizer | {names[0]}, s | {' | '.join(names[1:])} |\n|---|{'---:|' * len(names)}")
    for optimizer in _OPTIMIZERS.value:
        base = with_microbatches(_CONFIG.value, _MICROBATCHES.value, microbatch_size=_MICROBATCH_SIZE.value)
        base.train.num_steps = 2 * steps * (2 + _ROUNDS.value)  # excludes the end, where the pipeline drains
        base.pipeline.semantics, base.optimizer.name = "2bw", optimizer
        with contextlib.ExitStack() as stack:
            turns = []
            for kind, order in PREDICTIONS:
                config = copy.deepcopy(base)
                config.pipeline.prediction, config.pipeline.prediction_order = kind, order
                system = stack.enter_context(started_fiddlex(config, cores))
                turns.append(lambda system=system: turn(system, steps=steps))
            first, *others = (seconds for seconds, _ in medians(turns, rounds=_ROUNDS.value))
        changes = " | ".join(f"{seconds / first - 1:+.1%}" for seconds in others)
        print(f"| {optimizer} | {first:.3f} | {changes} |", flush=True)


if __name__ == "__main__":
    run(main)
