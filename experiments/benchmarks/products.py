"""The matrix products of a step on one device, each by itself, for `experiments.benchmarks.product_rate`."""

import collections
import math
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.costs.work import MatrixProduct, edge_work, layer_work
from fiddlex.models.flash import kernel_on

Shape = tuple[int, int, int, int]  # products in a batch, rows, inputs, outputs


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


def made_product(shape: Shape, dtype: str) -> Callable[[], jax.Array]:
    """A call that computes a product and waits for it."""
    batch, rows, inputs, outputs = shape
    x, w = jnp.ones((batch, rows, inputs), dtype), jnp.ones((batch, inputs, outputs), dtype)
    if batch == 1:
        x, w = x[0], w[0]
    product = jax.jit(jnp.matmul)
    return lambda: jax.block_until_ready(product(x, w))


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
