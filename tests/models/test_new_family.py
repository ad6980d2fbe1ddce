"""A family in one file: RMSNorm, gated MLP, no biases, untied embeddings; all else follows from its description.

The description and the forward pass come first, then a reference for one device that shares nothing with them, then
what is asked of every family: sizes, memory, plans, training, evaluation, samples, checkpoints.
"""

import copy
import dataclasses
import functools
import pathlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.benchmarks.programs import make_program, temporary_bytes
from fiddlex.config import Config
from fiddlex.config.families import FAMILIES, Family
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.data import Loader
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import load_topology
from fiddlex.models import spec
from fiddlex.models.attention import attend
from fiddlex.models.decoder import Decoder
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE
from fiddlex.models.layers import dropped, linear, row_parallel
from fiddlex.models.products import given
from fiddlex.models.spec import Activation, Attention, Network, Norm, Product, Residual
from fiddlex.models.task_sizes import task_of
from fiddlex.parallel.collectives import enter_tensor_parallel
from fiddlex.planner.layouts import Problem, layouts
from fiddlex.planner.search import search
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.trainer import Trainer
from tests import reference
from tests.costs.test_device_memory import predicted, temporaries


def describe(config: Config) -> Network:
    model, hidden, units = config.model, config.model.hidden_size, config.model.mlp_size
    heads, size = model.num_heads, model.head_size
    matrix = functools.partial(spec.linear, std=model.init_std, bias=False)
    rms_norm = spec.norm(hidden, bias=False)
    layer = {
        "attention_norm": rms_norm,
        "attention": {
            "qkv": matrix((hidden, 3, heads, size), ("hidden", None, "heads", None), num_inputs=1),
            "out": matrix((heads, size, hidden), ("heads", None, "hidden"), num_inputs=2),
        },
        "mlp_norm": rms_norm,
        "mlp": {
            "up": matrix((hidden, 2, units), ("hidden", None, "mlp"), num_inputs=1),
            "down": matrix((units, hidden), ("mlp", "hidden"), num_inputs=1),
        },
    }
    attention = Attention(heads, size, causal=True)
    into, out = Product(hidden, 3 * hidden, "outputs"), Product(hidden, hidden, "inputs")
    up, down = Product(hidden, 2 * units, "outputs"), Product(units, hidden, "inputs")
    table = spec.table(model.vocab_size, hidden, "vocab", std=model.init_std)
    positions = spec.table(model.seq_len, hidden, "positions", std=model.init_std)
    return Network(
        task=task_of(config),
        embedding={"tokens": table, "positions": positions},
        layer=layer,
        head={"norm": rms_norm, "output": {"kernel": table}},
        num_layers=model.num_layers,
        hidden=hidden,
        branches=(
            (Norm(), into, attention, out, Residual()),
            (Norm(), up, Activation(units, num_inputs=2), down, Residual()),
        ),
        scoring=(Product(hidden, model.vocab_size, "vocab", "scored"),),
    )


@functools.partial(jax.checkpoint, prevent_cse=False)  # keeps its input alone, as the description says
def rms_norm(x, scale):
    x_float32 = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(x_float32).mean(-1, keepdims=True) + 1e-6)
    return (x_float32 * inverse * scale.astype(jnp.float32)).astype(x.dtype)


@functools.partial(jax.checkpoint, prevent_cse=False)
def gated(y_BS2F):
    return jax.nn.silu(y_BS2F[:, :, 0]) * y_BS2F[:, :, 1]


class GatedDecoder(Decoder):
    def layer(self, weights, x_BTH, context):
        enter = functools.partial(enter_tensor_parallel, sequence_parallel=context.sequence_parallel)
        x_BSH = enter(rms_norm(x_BTH, weights["attention_norm"]["scale"]))
        q_BSND, k_BSND, v_BSND = jnp.moveaxis(linear(weights["attention"]["qkv"], x_BSH), 2, 0)
        y_BTH = row_parallel(weights["attention"]["out"], given(attend(q_BSND, k_BSND, v_BSND, context)), context)
        x_BTH += dropped(y_BTH, ATTENTION_OUTPUT_SITE, context)
        x_BSH = enter(rms_norm(x_BTH, weights["mlp_norm"]["scale"]))
        y_BTH = row_parallel(weights["mlp"]["down"], given(gated(linear(weights["mlp"]["up"], x_BSH))), context)
        return x_BTH + dropped(y_BTH, MLP_OUTPUT_SITE, context)

    def last_norm(self, weights, x_BTH):
        return rms_norm(x_BTH, weights["head"]["norm"]["scale"])

    def table(self, weights):
        return weights["head"]["output"]["kernel"]


GATED = Family(("lm",), describe, GatedDecoder, sequence_parallel=True, dropout=True)


def reference_loss(weights, batch, number, config, outputs=None):
    x = weights["embedding"]["tokens"][batch["tokens"]] + weights["embedding"]["positions"]

    def normed(w, x):
        return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * w["scale"]

    for w in weights["layers"]:
        q, k, v = jnp.einsum("bsh,hcnd->cbnsd", normed(w["attention_norm"], x), w["attention"]["qkv"]["kernel"])
        scores = jnp.where(np.tri(x.shape[1], dtype=bool), q @ k.swapaxes(-1, -2) / np.sqrt(q.shape[-1]), -np.inf)
        x = x + jnp.einsum("bnsd,ndh->bsh", jax.nn.softmax(scores) @ v, w["attention"]["out"]["kernel"])
        gate, value = jnp.einsum("bsh,hcf->cbsf", normed(w["mlp_norm"], x), w["mlp"]["up"]["kernel"])
        x = x + (gate / (1 + jnp.exp(-gate)) * value) @ w["mlp"]["down"]["kernel"]
        if outputs is not None:
            outputs.append(x)
    logits = normed(weights["head"]["norm"], x) @ weights["head"]["output"]["kernel"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], axis=-1).mean()


@pytest.fixture
def config(tiny_config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    """On data=2 × pipe=2 × tensor=2 with two chunks and sequence parallelism."""
    monkeypatch.setitem(FAMILIES, "gated", GATED)
    tiny_config.model.family, tiny_config.model.num_layers, tiny_config.model.ffn_size = "gated", 4, 96
    tiny_config.mesh.data = tiny_config.mesh.pipe = tiny_config.mesh.tensor = 2
    tiny_config.mesh.sequence_parallel = True
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_chunks = "interleaved_1f1b", 2
    tiny_config.pipeline.num_microbatches = 4
    tiny_config.optimizer.schedule, tiny_config.optimizer.epsilon = "constant", 1e-5
    tiny_config.optimizer.weight_decay, tiny_config.optimizer.clip_norm = 0.1, 0.5
    return tiny_config


def test_it_trains_as_the_reference_does_is_evaluated_sampled_and_restored_elsewhere(
    config: Config, tmp_path: pathlib.Path
) -> None:
    trainer = Trainer(config)
    initial = trainer.weights()
    assert num_parameters(config) == sum(leaf.size for leaf in jax.tree.leaves(initial))
    loader = Loader(trainer.dataset.train, global_batch_size=16, seed=0, vocab_size=257)
    expected = reference.train(config, initial, [loader.batch(step) for step in range(5)], loss_fn=reference_loss)
    records = list(trainer.steps(5))
    np.testing.assert_allclose([record["loss"] for record in records], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose([record["grad_norm"] for record in records], expected["norms"], rtol=1e-5)
    weights = reference.unstack(trainer.weights())
    wanted = jax.tree.leaves(jax.tree.map(np.asarray, expected["weights"]))
    for found, exact in zip(jax.tree.leaves(weights), wanted, strict=True):
        assert np.linalg.norm(found - exact) / np.linalg.norm(exact) < 1e-5

    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
    other = copy.deepcopy(config)
    other.mesh.data, other.mesh.pipe, other.mesh.tensor, other.mesh.sequence_parallel = 1, 4, 1, False
    other.pipeline.schedule, other.pipeline.num_chunks = "zb_h1", 1
    restored = Trainer(other)
    with Checkpoints(tmp_path) as checkpoints:
        assert restored.restore(checkpoints)
    chex.assert_trees_all_equal(restored.weights(), trainer.weights())
    assert restored.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    assert "".join(restored.generate("def ", 4)) == "".join(trainer.generate("def ", 4))


def test_its_memory_is_predicted(config: Config) -> None:
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 128, 256, 512
    config.model.ffn_size, config.mesh.data = 384, 1
    program = make_program(config)
    assert temporaries(predicted(program.config)) == pytest.approx(temporary_bytes(program, program.step), rel=0.1)


def test_it_is_planned(config: Config) -> None:
    config.model.dtype, config.data.global_batch_size = "bfloat16", 64
    problem = Problem(config, load_topology("a100_80"), 8)
    assert search(problem, keep=2)
    assert {layout.recompute for layout in layouts(problem)} == {"none", "full"}  # no product says `made_by`
    tokens, hidden, units = config.data.global_batch_size * 16, 32, 96
    layers = 4 * (4 * hidden**2 + 3 * hidden * units + 2 * 16 * hidden)
    assert model_flops(config) == 6 * tokens * (layers + hidden * 257)


class Penalised(GatedDecoder):
    """Each layer adds the mean square of its output, of which tensor ranks have parts of the sequence."""

    adds_losses = True

    def layer(self, weights, x_BTH, context):
        y_BTH = super().layer(weights, x_BTH, context)
        return y_BTH, self.loss_of(jnp.mean(y_BTH**2))

    def loss_of(self, loss):
        return 0.1 * jax.lax.pmean(loss, "tensor")


def penalised_loss(weights, batch, number, config):
    outputs = []
    loss = reference_loss(weights, batch, number, config, outputs)
    return loss + 0.1 * sum(jnp.mean(x**2) for x in outputs)


@pytest.mark.parametrize("semantics", ["sync", "2bw"])
def test_losses_of_layers_are_added(semantics: str, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gated", dataclasses.replace(GATED, model=Penalised))
    config.pipeline.semantics = semantics
    trainer = Trainer(config)
    loader = Loader(trainer.dataset.train, global_batch_size=16, seed=0, vocab_size=257)
    batches = [loader.batch(step) for step in range(3)]
    delays = None if semantics == "sync" else lambda step: reference.Delays(1, (1, 1, 1, 1), 1)
    expected = reference.train(config, trainer.weights(), batches, delays, loss_fn=penalised_loss)
    records = list(trainer.steps(3))
    np.testing.assert_allclose([record["loss"] for record in records], expected["losses"], rtol=1e-5)
    np.testing.assert_allclose([record["grad_norm"] for record in records], expected["norms"], rtol=1e-5)


class Silent(GatedDecoder):
    adds_losses = True


class Undeclared(Penalised):
    adds_losses = False


class Several(Penalised):
    def loss_of(self, loss):
        return jnp.zeros(2)


class Parted(Penalised):
    def loss_of(self, loss):
        return loss


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (Silent, "adds_losses=True: a layer returns x and no loss. With"),
        (Undeclared, r"adds_losses=False: a layer returns x and float32\[\]\. With"),
        (Several, r"adds_losses=True: a layer returns x and float32\[2\]\. .*one scalar"),
        (Parted, r"each tensor rank has another loss of a layer\. .*lax\.pmean"),
    ],
)
def test_a_loss_of_a_layer_is_one_scalar_for_all_tensor_ranks(
    model: type, message: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gated", dataclasses.replace(GATED, model=model))
    with pytest.raises(ConfigError, match=message):
        Trainer(config).compile()


class WholeSequences(GatedDecoder):
    """Its layers take whole sequences alone, drop nothing, and attend without a cache."""

    def layer(self, weights, x_BSH, context):
        q_BSND, k_BSND, v_BSND = jnp.moveaxis(linear(weights["attention"]["qkv"], x_BSH), 2, 0)
        plain = dataclasses.replace(context, cache=None)
        return x_BSH + row_parallel(weights["attention"]["out"], given(attend(q_BSND, k_BSND, v_BSND, plain)), plain)


class Wider(GatedDecoder):
    def layer(self, weights, x_BSH, context):
        return jnp.concatenate([x_BSH, x_BSH], axis=-1)


class Narrow(GatedDecoder):
    def embed(self, weights, batch, context):
        return super().embed(weights, batch, context)[..., :8]


class Forgetful(GatedDecoder):
    def layer(self, weights, x_BSH, context):
        super().layer(weights, x_BSH, context)


class Failing(GatedDecoder):
    def last_norm(self, weights, x_BTH):
        return weights["norm"]


def test_code_of_a_family_that_fails_is_named_by_its_line(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gated", dataclasses.replace(GATED, model=Failing))
    with pytest.raises(ConfigError, match=r"test_new_family\.py, line \d+: KeyError: 'norm'"):
        Trainer(config).compile()


def test_the_embedding_makes_activations_of_the_hidden_size(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "gated", dataclasses.replace(GATED, model=Narrow))
    told = r"the embedding makes float32\[2, 8, 8\] of int32\[2, 16\] tokens. It must return float32\[2, 8, 32\]"
    with pytest.raises(ConfigError, match=told):
        Trainer(config).compile()


@pytest.mark.parametrize(
    ("model", "made"), [(Wider, r"float32\[2, 8, 64\]"), (Forgetful, "NoneType")], ids=["wider", "nothing"]
)
def test_a_layer_gives_back_the_residual_stream(
    model: type, made: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "gated", dataclasses.replace(GATED, model=model))
    with pytest.raises(
        ConfigError, match=rf"a layer makes {made} of the residual stream, float32\[.*same shape and dty"
    ):
        Trainer(config).compile()


@pytest.fixture
def whole_sequences(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(FAMILIES, "gated", Family(("lm",), describe, WholeSequences))
    return config


def test_what_its_layers_do_not_say_that_they_do_is_refused_and_not_planned(whole_sequences: Config) -> None:
    config = whole_sequences
    with pytest.raises(ConfigError, match=r"^mesh.sequence_parallel=True with model.family=gated: .*=False, or reg"):
        config.validate()
    config.mesh.sequence_parallel, config.model.dropout = False, 0.1
    with pytest.raises(ConfigError, match=r"^model.dropout=0.1 with model.family=gated: .* Use model.dropout=0.0, or"):
        config.validate()
    config.model.dropout, config.data.global_batch_size = 0.0, 64
    problem = Problem(config, load_topology("a100_80"), 8)
    assert {layout.mesh.sequence_parallel for layout in layouts(problem)} == {False}
    assert not any(plan.config.mesh.sequence_parallel for plan in search(problem, keep=9).plans)


def test_text_is_refused_where_its_layers_keep_no_keys(whole_sequences: Config) -> None:
    config = whole_sequences
    config.mesh.sequence_parallel, config.mesh.data = False, 1
    with pytest.raises(ConfigError, match=r"attend without Context.cache"):
        "".join(Trainer(config).generate("def ", 4))
