"""What share of a step's time its matrix products would take by themselves, on one device.

    python -m experiments.benchmarks.product_rate --config=gpt_tiny [--rounds=7 --config.model.hidden_size=256 …]

The products are those of `fiddlex.costs.work`, so attention of a causal model counts half of its scores. Each shape
runs in a program of its own, as `x @ w`, as often as fits into `--least_s` seconds; products that a layer computes for
each head run as one batch. Products and steps take turns, so that other load on the machine affects both; times are
medians of turns. Prints a Markdown table.
"""

import collections
import statistics
import time
from collections.abc import Callable

import jax
from absl import flags

from experiments.benchmarks.products import Shape, made_product, products_of_step, table
from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.terminal.command_line import define_config, run
from fiddlex.train.trainer import Trainer

_CONFIG = define_config()
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of each product and of the step", lower_bound=1)
_LEAST_S = flags.DEFINE_float("least_s", 0.05, "seconds that a turn takes at least", lower_bound=0.0)


def main(argv: list[str]) -> None:
    """Prints the table."""
    config = _CONFIG.value
    if config.mesh.num_devices > 1:
        raise ConfigError(f"mesh has {config.mesh.num_devices} devices: measure one (mesh.data=1, pipe=1, tensor=1)")
    counts = products_of_step(config)
    steps, turns = made_step(config), {shape: made_product(shape, config.model.dtype) for shape in counts}
    times: dict[Shape | None, list[float]] = collections.defaultdict(list)
    for _ in range(_ROUNDS.value):
        times[None].append(_seconds(steps))
        for shape, product in turns.items():
            times[shape].append(_seconds(product))
    medians = {shape: statistics.median(values) for shape, values in times.items()}
    print("\n".join(table(counts, medians)))


def made_step(config: Config) -> Callable[[], object]:
    """A call that trains a step and waits for it."""
    trainer = Trainer(config)
    trainer.compile()
    return lambda: jax.block_until_ready(trainer.dispatch().metrics["loss"])


def _seconds(call: Callable[[], object]) -> float:
    """The seconds of one call, the mean over a turn."""
    call()  # compiles at the first turn, and fills the caches of the processor at the others
    start_s, calls, spent_s = time.perf_counter(), 0, 0.0
    while not calls or spent_s < _LEAST_S.value:
        call()
        calls, spent_s = calls + 1, time.perf_counter() - start_s
    return spent_s / calls


if __name__ == "__main__":
    run(main)
