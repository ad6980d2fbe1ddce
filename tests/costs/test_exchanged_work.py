"""What the formulas say of products in rings and in blocks, against the products and collectives of a traced layer."""

import collections
import math
from collections.abc import Iterator

import jax
import pytest
from jax.extend import core

from fiddlex.config import Config, MeshConfig
from fiddlex.costs.work import exchanged_work, layer_work
from fiddlex.hardware.pieces import num_pieces
from fiddlex.hardware.topology import load_topology
from fiddlex.models.blocks import Blocks
from fiddlex.models.exchange import Exchange
from fiddlex.models.rings import Rings
from fiddlex.planner.cost_model import CostModel
from fiddlex.schedules.placement import place_layers
from tests.mapped_layer import mapped_layer

CASES = {  # family, tensor ranks, positions, exchange, pieces
    "one way": ("gpt", 4, 128, Rings(permutes=True), 4),
    "both ways": ("gpt", 4, 1024, Rings(permutes=True), 8),
    "two ranks": ("gpt", 2, 1024, Rings(permutes=True), 4),
    "products of a shared input": ("llama", 4, 1024, Rings(permutes=True), 8),
    "shared heads": ("llama", 8, 2048, Rings(permutes=True), 16),
    "blocks": ("gpt", 4, 1024, Blocks(), 8),
    "fewer blocks": ("llama", 2, 384, Blocks(), 3),
    "blocks, shared heads": ("llama", 8, 2048, Blocks(), 8),
}


def a_config(family: str, tensor: int, positions: int) -> Config:
    config = Config(mesh=MeshConfig(tensor=tensor, sequence_parallel=True, collective_matmul=True))
    config.model.family, config.model.num_layers, config.model.seq_len = family, 1, positions
    config.model.hidden_size, config.model.num_heads = 64, 8
    config.model.num_kv_heads = 4 if family == "llama" else 0
    config.pipeline.num_microbatches, config.data.global_batch_size = 1, 2
    return config.validate()


def equations(config: Config, exchange: Exchange) -> list[core.JaxprEqn]:
    """The equations of a layer's forward and backward pass on one device."""
    mapped, shapes = mapped_layer(config, exchange)
    return list(within(jax.make_jaxpr(mapped)(*shapes).jaxpr))


def within(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    for equation in jaxpr.eqns:
        yield equation
        for inner in core.jaxprs_in_params(equation.params):
            yield from within(getattr(inner, "jaxpr", inner))


@pytest.mark.parametrize("case", CASES)
def test_products_and_hops_of_a_layer_are_those_of_the_program(case: str) -> None:
    family, tensor, positions, exchange, pieces = CASES[case]
    config, in_blocks = a_config(family, tensor, positions), isinstance(exchange, Blocks)
    assert num_pieces(2, positions // tensor, tensor, in_blocks=in_blocks) == pieces
    found, sent = collections.Counter[tuple[int, int, int]](), 0.0
    for equation in equations(config, exchange):
        if equation.primitive.name == "dot_general":
            ((left,), (right,)), (batch, _) = equation.params["dimension_numbers"]
            if not batch:  # those of attention have a batch
                first, second = (variable.aval.shape for variable in equation.invars)
                found[first[1 - left], first[left], second[1 - right]] += 1
        elif equation.primitive.name in ("ppermute", "all_gather", "reduce_scatter"):
            (before,), (after,) = equation.invars, equation.outvars
            whole = 4 * max(math.prod(variable.aval.shape) for variable in (before, after))
            sent += whole if equation.primitive.name == "ppermute" else whole * (tensor - 1) / tensor
    work, expected = layer_work(config, in_blocks=in_blocks), collections.Counter[tuple[int, int, int]]()
    for part, in_attention in ((work.forward, 2), (work.backward_input, 4), (work.backward_weight, 0)):
        for rows, inputs, outputs, number in part.products[: len(part.products) - in_attention]:
            expected[rows, inputs, outputs] += number
    assert found == expected
    assert sent == pytest.approx(layer_bytes(config, "h100" if in_blocks else "tpu_v5e"))


def layer_bytes(config: Config, topology: str) -> float:
    """Bytes that the cost model says the layers of a config send over `tensor` for a microbatch."""
    model = CostModel(config, load_topology(topology))
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
def test_exchanges_have_all_products_with_weights(case: str) -> None:
    config, in_blocks = a_config(*CASES[case][:3]), isinstance(CASES[case][3], Blocks)
    exchanged, work = exchanged_work(config, in_blocks=in_blocks), layer_work(config, in_blocks=in_blocks)
    assert [each.gathers for each in exchanged] == [True, False, True, False]  # attention's branch and the MLP's
    assert sum((each.forward.products for each in exchanged), ()) == work.forward.products[:-2]
    assert sum((each.backward_input.products for each in exchanged), ()) == work.backward_input.products[:-4]
    assert sum(each.forward.flops for each in exchanged) == sum(
        product.flops for product in work.backward_weight.products
    )
