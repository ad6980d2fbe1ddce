"""The work of a device, summed up, against the model's operations."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.config.families import FAMILIES
from fiddlex.costs.backend import CPU
from fiddlex.costs.layer_memory import LayerMemory
from fiddlex.costs.sizes import hardware_flops, model_flops
from fiddlex.costs.work import MatrixProduct, Work, edge_work, exchanged_work, layer_work, update_work
from fiddlex.hardware.chips import Chip
from fiddlex.models.descriptions import gpt
from fiddlex.models.device_arrays import DeviceArrays, Saved
from fiddlex.models.spec import Operation, Product

CHIP = Chip("c", 1.0, 1e9, {"float32": 1e12, "bfloat16": 2e12}, "s")


def a_config(recompute="none", tensor=1, microbatches=2):
    config = Config(model=ModelConfig(num_layers=3, hidden_size=64, num_heads=4, vocab_size=96, seq_len=16))
    config.mesh = MeshConfig(tensor=tensor)
    config.data.global_batch_size, config.pipeline.num_microbatches = 8, microbatches
    config.pipeline.recompute = recompute
    return config


@pytest.mark.parametrize("tensor", [1, 2, 4])
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_all_devices_are_the_models_operations(recompute, microbatches, tensor):
    config = a_config(recompute, tensor, microbatches)
    layer, edges = layer_work(config), edge_work(config, shards=tensor)
    flops = config.model.num_layers * sum(getattr(layer, field.name).flops for field in dataclasses.fields(layer))
    flops += sum(work.flops for work in edges)
    expected = (hardware_flops if recompute == "full" else model_flops)(config)
    assert flops * tensor * microbatches == pytest.approx(expected)


def test_a_transform_is_done_whole_where_the_vocabulary_is_cut():
    config = a_config()
    config.model.family = "bert"
    one, two = (edge_work(config, shards=shards).head.products for shards in (1, 2))
    assert {(each.inputs, each.outputs) for each in one[:2]} == {(64, 64), (64, 96)}
    assert {(each.inputs, each.outputs) for each in two[:2]} == {(64, 64), (64, 48)}


def test_traffic_of_a_layer_is_its_closed_form():
    config = a_config(tensor=2)  # four examples of 16 positions, hidden 64, MLP 256, on two tensor ranks
    tokens, scores = 4 * 16, 4 * 2 * 16**2
    elements = 2 * 2 * tokens * 64 + 2 * 3 * tokens * 64 + 2 * tokens * 128 + 2 * tokens * 3 * 32
    assert layer_work(config).forward.traffic == 4 * elements + scores * (4 + 4)


class Convolution(Operation):
    """An operation that fiddlex does not know: over neighbouring positions, of each channel for itself."""

    def moved(self, arrays: DeviceArrays) -> int:
        return 2 * arrays.residual

    def saved(self, arrays: DeviceArrays, before: Operation) -> list[Saved]:
        return [Saved(arrays.residual, arrays.hidden, arrays.itemsize)]


def test_an_operation_of_ones_own_is_counted(monkeypatch):
    def network(config):
        described = gpt(config)
        first, second = described.branches
        return dataclasses.replace(described, branches=(first, (Convolution(), *second)))

    config, with_convolution = a_config(), a_config()
    monkeypatch.setitem(FAMILIES, "with_convolution", dataclasses.replace(FAMILIES["gpt"], network=network))
    with_convolution.model.family = "with_convolution"
    elements = 4 * 16 * 64  # positions of a microbatch, and channels
    before, after = (LayerMemory.of(each, CPU).stash() for each in (config, with_convolution))
    assert after - before == 4 * elements
    before, after = (layer_work(each).forward.traffic for each in (config, with_convolution))
    assert after - before == 4 * 2 * elements


def test_a_product_that_tensor_ranks_do_not_divide_has_no_exchange(monkeypatch):
    """Each of two ranks has it at its part of the positions, and I saves for W the gradient and the input."""

    def network(config):
        described = gpt(config)
        _, (normed, *_, added) = described.branches
        return dataclasses.replace(described, branches=(*described.branches, (normed, Product(64, 64), added)))

    config = a_config(recompute="full", tensor=2)
    config.mesh.sequence_parallel = config.mesh.collective_matmul = True
    before, without = exchanged_work(config, in_blocks=False), LayerMemory.of(config, CPU).weight_stash()
    monkeypatch.setitem(FAMILIES, "with_product", dataclasses.replace(FAMILIES["gpt"], network=network))
    config.model.family = "with_product"
    assert exchanged_work(config, in_blocks=False) == before
    elements = 4 * 16 * 64 // 2
    assert LayerMemory.of(config, CPU).weight_stash() - without >= 4 * 2 * elements


GELU, NORMS, MASKS = 2 * 64 * 128, 2 * 2 * 64 * 64, 2 * 2 * 64 * 64  # elements; two norms, and words of two sites
SCORES = 4 * 2 * 16**2


@pytest.mark.parametrize(
    ("recompute", "elementwise", "in_attention"),
    [
        ("none", 0, 0),
        ("gelu", GELU, 0),
        ("norms", NORMS, 0),
        ("masks", MASKS, 2 * SCORES),
        ("gelu,norms,masks", GELU + NORMS + MASKS, 2 * SCORES),
        ("attention", 0, 6 * SCORES),  # also scores, probabilities, and those after dropout read and written
        ("attention,masks", MASKS, 6 * SCORES),
    ],
)
def test_traffic_of_what_is_made_again_is_its_closed_form(recompute, elementwise, in_attention):
    config = a_config(recompute, tensor=2)
    config.model.dropout = 0.1
    assert layer_work(config).again.traffic == 4 * (elementwise + in_attention)
    assert layer_work(config, flash=True).again.traffic == 4 * elementwise


def test_traffic_of_an_encoded_stash_is_its_closed_form():
    # On each of two ranks: results of both norms, of attention and of GELU, which products read; the rest.
    tokens, scores = 4 * 16, 4 * 2 * 16**2
    products, others = tokens * (2 * 64 + 32 + 128), tokens * (3 * 32 + 64 + 128)
    for recompute, flash, of_products, of_others in [
        ("none", False, products, others + scores),
        ("none", True, products, others),
        ("attention", False, products, others),
        ("gelu,norms", False, tokens * 32, others + scores),
        ("full", False, 0, 0),
    ]:
        same, encoded = a_config(recompute, tensor=2), a_config(recompute, tensor=2)
        encoded.pipeline.stash_dtype = "int8"
        added = {
            name: getattr(layer_work(encoded, flash=flash), name).traffic
            - getattr(layer_work(same, flash=flash), name).traffic
            for name in ("forward", "backward_input", "backward_weight")
        }
        # Values of four bytes are read and a byte is written, or the other way round.
        assert added == {
            "forward": 5 * (of_products + of_others),
            "backward_input": 5 * of_others,
            "backward_weight": 5 * of_products,
        }


def test_berts_products_are_the_models_operations():
    config = a_config()
    config.model.family = "bert"
    layer, edges = layer_work(config), edge_work(config, shards=1)
    flops = 3 * sum(getattr(layer, field.name).flops for field in dataclasses.fields(layer))
    flops += sum(work.flops for work in edges)
    assert flops * 2 == pytest.approx(model_flops(config))


def test_selective_recomputation_repeats_the_scores_alone_and_the_flash_kernel_repeats_nothing_more():
    none, selective = (layer_work(a_config(mode)) for mode in ("none", "selective"))
    assert selective.again.flops == 4 * 4 * 2 * 16 * 16 * 16  # examples, heads, 2·S·S·D
    assert none.again.flops == layer_work(a_config("selective"), flash=True).again.flops == 0
    assert selective.forward == none.forward


@given(st.integers(1, 512), st.integers(1, 512), st.integers(1, 512), st.floats(0.1, 1))
def test_a_product_takes_the_longer_of_computing_and_of_reading(rows, inputs, outputs, efficiency):
    product = MatrixProduct(rows, inputs, outputs)
    seconds = Work((product,)).seconds(CHIP, "float32", efficiency)
    computing, reading = product.flops / (1e12 * efficiency), product.elements * 4 / 1e9
    assert seconds == pytest.approx(max(computing, reading))
    assert Work((product,), 1e9).seconds(CHIP, "float32", efficiency) == pytest.approx(seconds + 1)
    assert {each.flops for each in product.gradients} == {product.flops}


def test_half_precision_halves_what_is_read_and_keeps_float32_sums():
    single = a_config()
    half = dataclasses.replace(single, model=dataclasses.replace(single.model, dtype="bfloat16"))
    assert layer_work(half).forward.traffic < layer_work(single).forward.traffic
    weights = 12 * 64 * 64
    assert layer_work(half).backward_weight.traffic == weights * (8 + 2)


@pytest.mark.parametrize(("data", "tensor", "zero1", "share"), [(1, 1, True, 1), (4, 3, True, 12), (4, 3, False, 3)])
def test_muon_iterates_on_its_part_of_the_matrices_of_its_rank(data, tensor, zero1, share):
    """Twelve layers on two ranks: each rank has six of each matrix, and eighteen of queries, keys and values."""
    config = Config()
    config.model.num_layers, config.model.hidden_size, config.model.num_heads = 12, 48, 3
    config.mesh.pipe, config.mesh.data, config.mesh.tensor = 2, data, tensor
    config.optimizer.name, config.optimizer.zero1 = "muon", zero1
    square, wide = 6 * 48**3, 18 * 48**3  # operations of an iteration: 2r²c + 2r³ + 2r²c, with c = r or 4r
    expected = 5 * (square * sum(math.ceil(n / share) for n in (18, 6)) + 2 * wide * math.ceil(6 / share))
    assert update_work(config).flops == expected
    config.optimizer.name = "adamw"
    assert update_work(config).flops == 0
