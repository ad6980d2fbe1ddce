"""The forward and backward pass of one layer in a `shard_map` over the devices of a mesh, as stages run it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.models.context import Context
from fiddlex.models.exchange import Exchange
from fiddlex.models.registry import make_model
from fiddlex.parallel.collectives import as_varying
from fiddlex.train.step.state import make_layout


def mapped_layer(config: Config, exchange: Exchange | None) -> tuple[Callable[..., tuple], tuple]:
    """A function that returns the gradients of a layer's weights and input, and the shapes of its two arguments.

    The arguments are the weights of a model of one layer and a microbatch of two sequences. The layer's output serves
    as its own gradient. The gradients of weights are those of each device, unreduced.
    """
    model = make_model(config)
    layout = make_layout(model, config)
    sharded = config.mesh.sequence_parallel
    context = Context(sequence_parallel=sharded, exchange=exchange)
    axes = frozenset({"data", "pipe", "tensor"} if sharded else {"data", "pipe"})
    varying = jax.tree.map(lambda _: axes, layout.shapes["layers"])

    def passes(weights: dict, x: jax.Array) -> tuple:
        weights = jax.tree.map(lambda w: w[0], as_varying(weights, layout.compute["layers"], varying))
        x = jax.lax.pcast(x, ("data", "pipe"), to="varying")
        y, pull = jax.vjp(lambda weights, x: model.apply_layer(weights, x, jnp.int32(0), context), weights, x)
        dweights, dx = pull(y)
        return jax.tree.map(lambda w: w[None], dweights), dx

    positions = "tensor" if sharded else None
    everywhere = P(("data", "pipe", "tensor"))
    mapped = jax.shard_map(
        passes,
        mesh=make_mesh(config.mesh),
        in_specs=(layout.compute["layers"], P(None, positions)),
        out_specs=(jax.tree.map(lambda _: everywhere, layout.compute["layers"]), P(("data", "pipe"), positions)),
    )
    x = jax.ShapeDtypeStruct((2, config.model.seq_len, config.model.hidden_size), jnp.float32)
    return mapped, (layout.shapes["layers"], x)
