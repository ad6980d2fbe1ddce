import dataclasses
import math
import operator

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig
from fiddlex.costs.sizes import hardware_flops, model_flops, num_parameters, paper_num_parameters
from fiddlex.models.context import Context
from fiddlex.models.registry import make_model
from fiddlex.models.task_sizes import example_fields

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
    assert num_parameters(run) == sum(leaf.size for leaf in jax.tree.leaves(weights)) - padding


@pytest.mark.parametrize("config", [ModelConfig(), GPT3])
def test_the_papers_count_lacks_only_the_final_layer_norm(config):
    assert num_parameters(Config(model=config)) - paper_num_parameters(config) == 2 * config.hidden_size


def test_paper_count_is_its_formula():
    h, l, s, v = 12288, 96, 2048, 51200  # noqa: E741
    closed_form = 12 * l * h**2 * (1 + 13 / (12 * h) + (v + s) / (12 * l * h))
    assert paper_num_parameters(GPT3) == pytest.approx(closed_form, rel=1e-12)
    assert paper_num_parameters(GPT3) == pytest.approx(174.6e9, rel=1e-3)  # GPT-3


@pytest.mark.parametrize("config", [ODD, GPT3])
def test_flops_are_those_of_the_matrix_products(config):
    layers, head = matmul_flops(config, batch_size=5)
    run = Config(model=config, data=DataConfig(global_batch_size=5))
    assert model_flops(run) == pytest.approx(3 * layers + 3 * head, rel=1e-14)
    assert hardware_flops(run) == pytest.approx(4 * layers + 3 * head, rel=1e-14)


@pytest.mark.parametrize("config", [ModelConfig(), GPT3])
def test_flops_are_the_papers_when_the_mlp_is_four_times_as_wide(config):
    b, s, l, h, v = 6, config.seq_len, config.num_layers, config.hidden_size, config.vocab_size  # noqa: E741
    model = 72 * b * s * l * h**2 * (1 + s / (6 * h) + v / (12 * l * h))
    hardware = 96 * b * s * l * h**2 * (1 + s / (6 * h) + v / (16 * l * h))
    run = Config(model=config, data=DataConfig(global_batch_size=b))
    assert model_flops(run) == pytest.approx(model, rel=1e-12)
    assert hardware_flops(run) == pytest.approx(hardware, rel=1e-12)


BERT_TASKS = {
    "mlm": {},
    "mlm_nsp": {"post_norm": True},
    "mlm_sop": {},
    "classification": {"labels": "a,b,c"},
    "multiple_choice": {"num_choices": 3, "post_norm": True},
}


def bert(task, *, post_norm=False, **data):
    model = dataclasses.replace(ODD, family="bert", objective=task, seq_len=20, post_norm=post_norm)
    source = "text:x" if task.startswith("mlm") else "tsv:x"
    config = Config(model=model, data=DataConfig(source=source, global_batch_size=2, mask_fraction=0.2, **data))
    return config.without_unused().validate()


def traced_flops(config):
    """Operations of the matrix products in one microbatch's loss, and in the layers, as our model is traced."""
    model, mesh = make_model(config), make_mesh(config.mesh)
    weights = jax.eval_shape(lambda key: model.init(key, range(config.model.num_layers)), jax.random.key(0))
    size = config.data.global_batch_size
    fields = example_fields(config)
    batch = {name: jax.ShapeDtypeStruct((size, *field.shape), field.dtype) for name, field in fields.items()}

    def layers(weights, batch):
        segments = batch["segments"].reshape(-1, config.model.seq_len) if "segments" in batch else None
        context = Context(sequence_parallel=False, causal=model.causal, segments_BS=segments)
        x = model.embed(weights, batch, context)
        for number in range(config.model.num_layers):
            layer = jax.tree.map(operator.itemgetter(number), weights["layers"])
            x = model.apply_layer(layer, x, jnp.int32(number), context)
        return x, context

    def whole(weights, batch):
        x, context = layers(weights, batch)
        return model.loss(weights, x, batch, context)

    def count(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=jax.P(), out_specs=jax.P())
        return product_flops(jax.make_jaxpr(mapped)(weights, batch).jaxpr)

    return count(whole), count(lambda weights, batch: layers(weights, batch)[0])


def product_flops(jaxpr):
    """Two for each multiply-add of the products in a jaxpr and in those within it."""
    total = 0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[axis] for axis in contracted)
        total += sum(product_flops(inner) for inner in jaxprs_in_params(equation.params))
    return total


LLAMA = dataclasses.replace(ODD, family="llama", num_kv_heads=2, head_dim=10, qk_norm=True, tied_embeddings=False)
RUNS = [*(bert(task, **rest) for task, rest in BERT_TASKS.items()), Config(model=ODD), Config(model=LLAMA)]


@pytest.mark.parametrize("config", RUNS)
def test_flops_are_those_of_the_traced_model(config):
    whole, layers = traced_flops(config)
    assert model_flops(config) == 3 * whole
    assert hardware_flops(config) == 3 * whole + layers
