"""What share of a step's time its matrix products would take by themselves, on one device.

    python -m experiments.benchmarks.product_rate --config=gpt_tiny [--rounds=7 --config.model.hidden_size=256 …]

The products are those of `fiddlex.costs.work`, so attention of a causal model counts half of its scores. Each shape
runs in a program of its own, as `x @ w`, as often as fits into `--least_s` seconds; products that a layer computes for
each head run as one batch. Products and steps take turns, so that other load on the machine affects both; times are
medians of turns. Prints a Markdown table.
"""

import collections
import math
import statistics
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from absl import flags

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.command_line import define_config, run
from fiddlex.costs.work import MatrixProduct, edge_work, layer_work
from fiddlex.errors import ConfigError
from fiddlex.models.flash import kernel_on
from fiddlex.train.trainer import Trainer

_CONFIG = define_config()
_ROUNDS = flags.DEFINE_integer("rounds", 7, "turns of each product and of the step", lower_bound=1)
_LEAST_S = flags.DEFINE_float("least_s", 0.05, "seconds that a turn takes at least", lower_bound=0.0)

Shape = tuple[int, int, int, int]  # products in a batch, rows, inputs, outputs


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


def products_of_step(config: Config) -> dict[Shape, float]:
    """How often a step on one device computes each shape of product."""
    flash = bool(kernel_on(make_mesh(config.mesh), config, dropout=config.model.dropout > 0).name)
    layer, edges = layer_work(config, flash=flash), edge_work(config, shards=1)
    counts: dict[Shape, float] = collections.defaultdict(float)

    def count(products: tuple[MatrixProduct, ...], times: int) -> None:
        for rows, inputs, outputs, number in products:
            batch = max(round(number), 1)
            counts[batch, rows, inputs, outputs] += number / batch * times * config.pipeline.num_microbatches

    for work in (layer.forward, layer.again, layer.backward_input, layer.backward_weight):
        count(work.products, config.model.num_layers)
    count(edges.head.products, 1)
    return counts


def made_step(config: Config) -> Callable[[], object]:
    """A call that trains a step and waits for it."""
    trainer = Trainer(config)
    trainer.compile()
    return lambda: jax.block_until_ready(trainer.dispatch().metrics["loss"])


def made_product(shape: Shape, dtype: str) -> Callable[[], jax.Array]:
    """A call that computes a product and waits for it."""
    batch, rows, inputs, outputs = shape
    x, w = jnp.ones((batch, rows, inputs), dtype), jnp.ones((batch, inputs, outputs), dtype)
    if batch == 1:
        x, w = x[0], w[0]
    product = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(product(x, w))


def _seconds(call: Callable[[], object]) -> float:
    """The seconds of one call, the mean over a turn."""
    call()  # compiles at the first turn, and fills the caches of the processor at the others
    start_s, calls, spent_s = time.perf_counter(), 0, 0.0
    while not calls or spent_s < _LEAST_S.value:
        call()
        calls, spent_s = calls + 1, time.perf_counter() - start_s
    return spent_s / calls


def table(counts: dict[Shape, float], times: dict[Shape | None, float]) -> Iterator[str]:
    """The lines of the Markdown table.

    Args:
      counts: how often a step computes each shape of product.
      times: seconds of each product, and of the step (`None`).
    """
    yield "| product, rows × inputs × outputs | in a step | Gflop/s | s of a step |"
    yield "|---|---:|---:|---:|"
    flops = total_s = 0.0
    for shape, number in sorted(counts.items(), key=lambda item: -math.prod(item[0]) * item[1]):
        batch, *sizes = shape
        product_flops = 2 * math.prod(shape)
        flops, total_s = flops + number * product_flops, total_s + number * times[shape]
        name = f"{batch} of " * (batch > 1) + " × ".join(f"{size:,}" for size in sizes)
        yield f"| {name} | {number:,.0f} | {product_flops / times[shape] / 1e9:.0f} | {number * times[shape]:.3f} |"
    yield f"| all products | | {flops / total_s / 1e9:.0f} | {total_s:.3f} |"
    step_s = times[None]
    yield f"| the step | | {flops / step_s / 1e9:.0f} | {step_s:.3f} |"
    yield ""
    yield f"The step reaches {total_s / step_s:.0%} of the rate of its products."


if __name__ == "__main__":
    run(main)
