import math

import jax
import pytest

from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.models import make_model
from fiddlex.sizes import hardware_flops, model_flops, num_parameters, paper_num_parameters

GPT3 = ModelConfig(num_layers=96, hidden_size=12288, num_heads=96, vocab_size=51200, seq_len=2048)
ODD = ModelConfig(num_layers=3, hidden_size=24, num_heads=4, ffn_size=40, vocab_size=101, seq_len=7)


def matmul_flops(config: ModelConfig, batch_size: int) -> tuple[int, int]:
    """Forward operations of all layers and of the head, product by product: (rows, inner, columns), how many."""
    tokens, h, f, s = batch_size * config.seq_len, config.hidden_size, config.mlp_size, config.seq_len
    heads, d = config.num_heads * batch_size, config.head_size
    layer = [
        ((tokens, h, h), 3),  # query, key, value
        ((s, d, s), heads),  # scores
        ((s, s, d), heads),  # values
        ((tokens, h, h), 1),  # output
        ((tokens, h, f), 1),
        ((tokens, f, h), 1),
    ]
    head = 2 * math.prod((tokens, h, config.vocab_size))
    return config.num_layers * sum(2 * math.prod(shape) * count for shape, count in layer), head


@pytest.mark.parametrize(
    "config", [ODD, ModelConfig(num_layers=2, hidden_size=16, num_heads=2, vocab_size=50, seq_len=9, vocab_multiple=64)]
)
def test_counts_the_weights_of_our_model_without_its_padding(config):
    run = Config(model=config, mesh=MeshConfig(tensor=2))
    weights = jax.eval_shape(lambda key: make_model(run).init(key, range(config.num_layers)), jax.random.key(0))
    padding = (run.padded_vocab_size - config.vocab_size) * config.hidden_size
    assert padding > 0
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(weights)) - padding


@pytest.mark.parametrize("config", [ModelConfig(), GPT3])
def test_the_papers_count_lacks_only_the_final_layer_norm(config):
    assert num_parameters(config) - paper_num_parameters(config) == 2 * config.hidden_size


def test_paper_count_is_its_formula():
    h, l, s, v = 12288, 96, 2048, 51200  # noqa: E741
    closed_form = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert paper_num_parameters(GPT3) == pytest.approx(closed_form, rel=1e-12)
    assert paper_num_parameters(GPT3) == pytest.approx(174.6e9, rel=1e-3)  # GPT-3


@pytest.mark.parametrize("config", [ODD, GPT3])
def test_flops_are_those_of_the_matrix_products(config):
    layers, head = matmul_flops(config, batch_size=5)
    assert model_flops(config, 5) == pytest.approx(3 * layers + 3 * head, rel=1e-14)
    assert hardware_flops(config, 5) == pytest.approx(4 * layers + 3 * head, rel=1e-14)


@pytest.mark.parametrize("config", [ModelConfig(), GPT3])
def test_flops_are_the_papers_when_the_mlp_is_four_times_as_wide(config):
    b, s, l, h, v = 6, config.seq_len, config.num_layers, config.hidden_size, config.vocab_size  # noqa: E741
    model = 72 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    hardware = 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    assert model_flops(config, b) == pytest.approx(model, rel=1e-12)
    assert hardware_flops(config, b) == pytest.approx(hardware, rel=1e-12)
