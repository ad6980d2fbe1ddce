"""Tensor parallelism costs what Megatron-LM says: one reduction for each product pair and direction.

In rings, all of them are permutes; in blocks there is one for each block.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import P

from fiddlex.cluster import pieces
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, MeshConfig
from fiddlex.models.blocks import Blocks
from fiddlex.models.context import Context
from fiddlex.models.exchange import Exchange
from fiddlex.models.registry import make_model
from fiddlex.models.rings import Rings
from fiddlex.parallel.collectives import as_varying
from fiddlex.train.step.state import make_layout


@pytest.mark.parametrize(
    ("sequence_parallel", "exchange"),
    [(False, None), (True, None), (True, Rings(permutes=True)), (True, Blocks())],
)
def test_a_layer_has_two_reductions_each_way(
    sequence_parallel: bool, exchange: Exchange | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pieces, "LEAST_ROWS", 1)
    config = Config(mesh=MeshConfig(tensor=2, sequence_parallel=sequence_parallel))
    config.model.num_layers, config.model.hidden_size, config.model.seq_len = 1, 32, 16
    model = make_model(config)
    layout = make_layout(model, config)
    context = Context(sequence_parallel=sequence_parallel, exchange=exchange)
    axes = frozenset({"data", "pipe", "tensor"} if sequence_parallel else {"data", "pipe"})
    varying = jax.tree.map(lambda _: axes, layout.shapes["layers"])

    def layer_and_gradients(weights: dict, x: jax.Array) -> tuple:
        weights = jax.tree.map(lambda w: w[0], as_varying(weights, layout.compute["layers"], varying))
        x = jax.lax.pcast(x, ("data", "pipe"), to="varying")
        y, pull = jax.vjp(lambda weights, x: model.apply_layer(weights, x, jnp.int32(0), context), weights, x)
        dweights, dx = pull(y)
        return jax.tree.map(lambda w: w[None], dweights), dx

    sequence = P(None, "tensor") if sequence_parallel else P()
    mapped = jax.shard_map(
        layer_and_gradients,
        mesh=make_mesh(config.mesh),
        in_specs=(layout.compute["layers"], sequence),
        out_specs=(
            jax.tree.map(lambda spec: P(("data", "pipe", "tensor")), layout.compute["layers"]),
            P(("data", "pipe"), sequence[1] if sequence_parallel else None),
        ),
    )
    x = jax.ShapeDtypeStruct((2, 16, 32), jnp.float32)
    text = jax.jit(mapped).lower(layout.shapes["layers"], x).as_text()
    counts = {
        kind: len(re.findall(rf"stablehlo\.{kind}\b", text))
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "collective_permute")
    }
    found = {kind: count for kind, count in counts.items() if count}
    if isinstance(exchange, Rings):  # two halves each, and two for each input that is gathered again
        assert found == {"collective_permute": 2 * (4 + 4 + 2)}
    elif exchange:  # 8 blocks for each; an input is gathered again as a whole
        assert found == {"all_gather": 4 * 8 + 2, "reduce_scatter": 4 * 8}
    elif sequence_parallel:
        assert found == {"all_gather": 4, "reduce_scatter": 4}
    else:
        assert found == {"all_reduce": 4}
