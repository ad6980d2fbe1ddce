"""What the formulas say of products in rings, against the products and permutes of a traced layer."""

import collections
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import pytest
from jax import P
from jax.extend import core

from fiddlex.cluster.mesh import make_mesh
from fiddlex.cluster.topology import load_topology
from fiddlex.config import Config, MeshConfig
from fiddlex.costs.work import layer_work, ring_ways, ring_work
from fiddlex.models.context import Context
from fiddlex.models.registry import make_model
from fiddlex.models.ring_products import Rings
from fiddlex.parallel.collectives import as_varying
from fiddlex.planner.cost_model import CostModel
from fiddlex.schedules.placement import place_layers
from fiddlex.train.step.state import make_layout

CASES = {  # family, tensor ranks, positions, directions
    "one way": ("gpt", 4, 128, 1),
    "both ways": ("gpt", 4, 1024, 2),
    "two ranks": ("gpt", 2, 1024, 1),
    "products of a shared input": ("llama", 4, 1024, 2),
    "shared heads": ("llama", 8, 2048, 2),
}


def a_config(family: str, tensor: int, positions: int) -> Config:
    config = Config(mesh=MeshConfig(tensor=tensor, sequence_parallel=True, collective_matmul=True))
    config.model.family, config.model.num_layers, config.model.seq_len = family, 1, positions
    config.model.hidden_size, config.model.num_heads = 64, 8
    config.model.num_kv_heads = 4 if family == "llama" else 0
    config.pipeline.num_microbatches, config.data.global_batch_size = 1, 2
    return config.validate()


def equations(config: Config) -> list[core.JaxprEqn]:
    """The equations of a layer's forward and backward pass on one device."""
    model = make_model(config)
    layout = make_layout(model, config)
    context = Context(sequence_parallel=True, rings=Rings(permutes=True))
    varying = jax.tree.map(lambda _: frozenset({"data", "pipe", "tensor"}), layout.shapes["layers"])

    def passes(weights: dict, x: jax.Array) -> tuple:
        weights = jax.tree.map(lambda w: w[0], as_varying(weights, layout.compute["layers"], varying))
        x = jax.lax.pcast(x, ("data", "pipe"), to="varying")
        y, pull = jax.vjp(lambda weights, x: model.apply_layer(weights, x, jnp.int32(0), context), weights, x)
        dweights, dx = pull(y)
        return jax.tree.map(lambda w: w[None], dweights), dx

    everywhere = P(("data", "pipe", "tensor"))
    mapped = jax.shard_map(
        passes,
        mesh=make_mesh(config.mesh),
        in_specs=(layout.compute["layers"], P(None, "tensor")),
        out_specs=(jax.tree.map(lambda _: everywhere, layout.compute["layers"]), P(("data", "pipe"), "tensor")),
    )
    x = jax.ShapeDtypeStruct((2, config.model.seq_len, config.model.hidden_size), jnp.float32)
    return list(within(jax.make_jaxpr(mapped)(layout.shapes["layers"], x).jaxpr))


def within(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from within(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("case", CASES)
def test_products_and_hops_of_a_layer_are_those_of_the_program(case: str) -> None:
    family, tensor, positions, ways = CASES[case]
    config = a_config(family, tensor, positions)
    assert ring_ways(config) == ways
    found, sent = collections.Counter[tuple[int, int, int]](), 0
    for equation in equations(config):
        if equation.primitive.name == "dot_general":
            ((left,), (right,)), (batch, _) = equation.params["dimension_numbers"]
            if not batch:  # those of attention have a batch
                first, second = (variable.aval.shape for variable in equation.invars)
                found[first[1 - left], first[left], second[1 - right]] += 1
        elif equation.primitive.name == "ppermute":
            sent += sum(math.prod(variable.aval.shape) * 4 for variable in equation.outvars)
    work, expected = layer_work(config), collections.Counter[tuple[int, int, int]]()
    for part, in_attention in ((work.forward, 2), (work.backward_input, 4), (work.backward_weight, 0)):
        for rows, inputs, outputs, number in part.products[: len(part.products) - in_attention]:
            expected[rows, inputs, outputs] += number
    assert found == expected
    assert sent == layer_bytes(config)


def layer_bytes(config: Config) -> float:
    """Bytes that the cost model says the layers of a config send over `tensor` for a microbatch."""
    model = CostModel(config, load_topology("tpu_v5e"))
    (tensor,) = model.traffic(
        config.mesh,
        placement=place_layers((0,), config.model.num_layers),
        num_microbatches=1,
        recompute="none",
        num_parameters=1,
    )
    whole = 2 * config.model.seq_len * config.model.hidden_size * 4
    return tensor.bytes - 4 * whole * (config.mesh.tensor - 1) / config.mesh.tensor  # those of embedding and head


@pytest.mark.parametrize("case", CASES)
def test_rings_have_all_products_with_weights(case: str) -> None:
    config = a_config(*CASES[case][:3])
    rings, work = ring_work(config), layer_work(config)
    assert [ring.gathers for ring in rings] == [True, False, True, False]  # attention's branch and the MLP's
    assert sum((ring.forward.products for ring in rings), ()) == work.forward.products[:-2]
    assert sum((ring.backward_input.products for ring in rings), ()) == work.backward_input.products[:-4]
    assert sum(ring.forward.flops for ring in rings) == sum(product.flops for product in work.backward_weight.products)
