"""fiddlex's families as Flax modules: they compute what runs compute, and come from workdirs and go back."""

import copy
import functools
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fiddlex.flax
from fiddlex.config import Config, ModelConfig
from fiddlex.config.families import FAMILIES
from fiddlex.config.overrides import replaced
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.data.loader import Loader
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.flax import GPT, Bert, Llama, family
from fiddlex.flax.models import Layer
from fiddlex.train.inference.decoding import make_decoding
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.transfer.result import load_result
from fiddlex.train.run.workdir import read_config
from fiddlex.train.trainer import Trainer, load_trainer
from tests import reference, reference_bert, reference_llama
from tests.flax import modules
from tests.train.bert import of_task, random_dataset

GPTS = {
    "tied": {},
    "untied": {"model.tied_embeddings": False, "model.gelu": "erf", "model.layer_norm_epsilon": 0.3},
}
LLAMAS = {
    "shared keys": {
        "model.num_kv_heads": 2,
        "model.head_dim": 10,
        "model.qk_norm": True,
        "model.tied_embeddings": False,
        "model.rope_scaling": "llama3",
        "model.rope_factor": 2.0,
        "model.rope_base": 100.0,
        "model.rope_original_len": 16,
    },
    "biases": {
        "model.qkv_bias": True,
        "model.rope_scaling": "linear",
        "model.rope_factor": 2.0,
        "model.layer_norm_epsilon": 0.3,
    },
}


def drawn(module: Any) -> Any:
    """The module with normal numbers in all parameters, also in biases, which start at 0."""
    rng = np.random.default_rng(0)
    state = nnx.state(module, nnx.Param)
    nnx.update(module, jax.tree.map(lambda w: jnp.asarray(0.3 * rng.normal(size=w.shape), w.dtype), state))
    return module


def arrays(module: Any) -> Any:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def state(trainer: Trainer) -> Any:
    return fiddlex.flax.state_of(trainer.weights(), range(trainer.config.model.num_layers))


def on_a_pipe(config: Config) -> Config:
    fields = {"mesh.pipe": 2, "mesh.tensor": 2, "pipeline.schedule": "1f1b", "pipeline.num_microbatches": 2}
    return replaced(config, fields)


class Block(nnx.Module):
    """A layer of one of fiddlex's families, as a block of another."""

    def __init__(self, config: ModelConfig, family: str, *, rngs: nnx.Rngs):
        config = copy.copy(config)
        config.family, self.causal = family, family != "bert"
        self.layer = Layer(config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        places = jnp.arange(x.shape[1])
        return self.layer(x, places[:, None] >= (places if self.causal else 0))


def of_a_layer(config: Config) -> tuple[float, int]:
    """Flops and parameters of a layer, which are those that a further one adds."""
    further = replaced(config, {"model.num_layers": config.model.num_layers + 1})
    return model_flops(further) - model_flops(config), num_parameters(further) - num_parameters(config)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("gpt", GPTS["tied"]),
        ("llama", LLAMAS["shared keys"]),
        pytest.param("llama", LLAMAS["biases"], marks=pytest.mark.long),
        ("bert", {"model.post_norm": True}),
        pytest.param("bert", {"model.post_norm": False, "model.ffn_size": 96}, marks=pytest.mark.long),
    ],
)
def test_the_flops_of_a_traced_layer_are_those_of_its_description(
    name: str, fields: dict[str, Any], tiny_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = functools.partial(Block, family=name)
    of_flax = family(embed=modules.Embed, block=block, head=modules.Head, fields=FAMILIES[name].fields)
    monkeypatch.setitem(FAMILIES, "flax", of_flax)
    objective = {"bert": "mlm"}.get(name, "lm")
    described = replaced(tiny_config, fields | {"model.family": name, "model.objective": objective})
    traced = replaced(described, {"model.family": "flax", "model.objective": "lm"})
    assert of_a_layer(traced) == of_a_layer(described)


@pytest.mark.parametrize(
    ("made", "fields"),
    [
        pytest.param(GPT, GPTS["tied"], id="gpt"),
        pytest.param(GPT, GPTS["untied"], id="gpt-untied", marks=pytest.mark.long),
        pytest.param(Llama, LLAMAS["shared keys"], id="llama"),
        pytest.param(Llama, LLAMAS["biases"], id="llama-biases", marks=pytest.mark.long),
    ],
)
def test_decoders_compute_what_runs_compute(
    made: Any, fields: dict[str, Any], tiny_config: Config, tmp_path: pathlib.Path
) -> None:
    config = replaced(tiny_config, {"model.family": made.__name__.lower()} | fields)
    module = drawn(made(config.model, rngs=nnx.Rngs(0)))
    fiddlex.flax.save(module, tmp_path / "run")
    chex.assert_trees_all_equal(arrays(fiddlex.flax.load(tmp_path / "run")), arrays(module))

    tokens = np.random.default_rng(1).integers(0, 257, (3, 16), np.int32)
    found = called(module, tokens)
    assert found.dtype == jnp.float32
    program, state = load_result(tmp_path / "run", on_a_pipe)
    decoding = make_decoding(program)
    prompts = [row[:length].tolist() for row, length in zip(tokens, (1, 11, 16), strict=True)]
    _, logits = decoding.prefill(decoding.weights(state.weights), prompts, 1)
    close(logits[:3, :257], found[np.arange(3), [0, 10, 15]])
    if config.model.layer_norm_epsilon == 1e-5 or made is Llama:  # which `reference.norm` has
        plain = reference.unstack(load_trainer(tmp_path / "run").weights())
        logits_fn = reference.logits_fn if made is GPT else reference_llama.logits_fn
        close(found, logits_fn(plain, tokens, None, config))


called = nnx.jit(lambda module, *inputs: module(*inputs))


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    ("task", "fields"),
    [
        pytest.param("mlm_nsp", {"model.post_norm": True}, id="mlm_nsp"),
        pytest.param("classification", {"model.post_norm": False}, id="classification", marks=pytest.mark.long),
        pytest.param("mlm", {"model.post_norm": False, "model.gelu": "erf"}, id="mlm", marks=pytest.mark.long),
        pytest.param("multiple_choice", {"model.post_norm": True}, id="multiple_choice", marks=pytest.mark.long),
    ],
)
def test_bert_computes_what_runs_compute(
    task: str, fields: dict[str, Any], tiny_config: Config, tmp_path: pathlib.Path
) -> None:
    config = replaced(of_task(tiny_config, task), fields)
    like = workdir_of(config, tmp_path / "like")
    module = drawn(Bert(config.model, num_classes=len(config.data.classes), rngs=nnx.Rngs(0)))
    fiddlex.flax.save(module, tmp_path / "run", like=like)
    chex.assert_trees_all_equal(arrays(fiddlex.flax.load(tmp_path / "run")), arrays(module))

    trainer = load_trainer(tmp_path / "run", on_a_pipe, random_dataset(config))
    examples = trainer.dataset.heldout
    batch = examples.example(0, epoch=0)
    batch = {name: np.stack([examples.example(i, epoch=0)[name] for i in range(len(examples))]) for name in batch}
    rows = {name: batch[name].reshape(-1, 16) for name in ("tokens", "segments", "token_types")}
    output = called(module, rows["tokens"], rows["segments"], rows["token_types"])
    parts = []
    if output.masked_BSV is not None:
        logits = np.take_along_axis(np.asarray(output.masked_BSV), batch["masked_positions"][..., None], axis=1)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        parts.append((losses * batch["weights"]).sum(-1))
    if output.label_BC is not None:
        logits = output.label_BC.reshape(len(batch["labels"]), -1)
        parts.append(optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"]))
    close(np.stack(parts, 1), trainer.scores(examples)[..., 0])
    if config.model.gelu == "tanh":  # which the reference has
        plain = reference.unstack(trainer.weights())
        close(output.hidden_BSH, reference_bert.hidden_fn(plain, batch, None, config))


def workdir_of(config: Config, path: pathlib.Path) -> pathlib.Path:
    """A workdir that has a config alone."""
    path.mkdir()
    (path / "config.json").write_text(config.to_json())
    return path


def test_a_plain_loop_trains_as_a_run_does(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    plain = {"optimizer.schedule": "constant", "optimizer.clip_norm": 0.0, "optimizer.weight_decay": 0.0}
    config = on_a_pipe(replaced(tiny_config, plain | {"model.family": "llama", "model.num_kv_heads": 2}))
    trainer = Trainer(config)
    loader = Loader(trainer.dataset.train, global_batch_size=16, seed=config.train.seed, vocab_size=257)
    batches = [loader.batch(step) for step in range(3)]
    workdir = workdir_of(config, tmp_path / "run")
    with Checkpoints(workdir) as checkpoints:
        trainer.save(checkpoints)
        expected = [record["loss"] for record in trainer.steps(3)]
        trainer.save(checkpoints)
    module = fiddlex.flax.load(workdir, 0)
    section = config.optimizer
    rule = optax.adamw(section.learning_rate, section.beta1, section.beta2, section.epsilon, weight_decay=0.0)
    optimizer = nnx.Optimizer(module, rule, wrt=nnx.Param)

    @nnx.jit
    def step(module: Any, optimizer: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        def loss(module: Any) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(module(tokens), targets).mean()

        value, grads = nnx.value_and_grad(loss)(module)
        optimizer.update(module, grads)
        return value

    losses = [float(step(module, optimizer, batch["tokens"], batch["targets"])) for batch in batches]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    trained = fiddlex.flax.load(workdir)
    for found, wanted in zip(*(jax.tree.leaves(arrays(each)) for each in (module, trained)), strict=True):
        assert np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)
    with pytest.raises(CheckpointError, match=r"^step=7: .*/checkpoints has checkpoints of the steps \[0, 3\]"):
        fiddlex.flax.load(workdir, 7)


def test_a_run_goes_there_and_back(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches, tiny_config.pipeline.num_chunks = 2, 4, 2
    tiny_config.model.num_layers, tiny_config.model.dropout = 4, 0.1
    tiny_config.pipeline.schedule = "interleaved_1f1b"  # whose layers are not in order
    trainer, workdir = Trainer(tiny_config), workdir_of(tiny_config, tmp_path / "run")
    with Checkpoints(workdir) as checkpoints:
        trainer.save(checkpoints)
    module = fiddlex.flax.load(workdir)
    chex.assert_trees_all_equal(arrays(module), state(trainer))

    tokens = np.zeros((1, 16), np.int32)
    assert (module(tokens) == module(tokens)).all()
    module.train()
    assert (module(tokens) != module(tokens)).any()

    fiddlex.flax.save(drawn(module), tmp_path / "back", like=workdir)
    assert read_config(tmp_path / "back").data == read_config(workdir).data
    evaluated = load_trainer(tmp_path / "back")
    tiny_config.train.init_from = str(tmp_path / "back")
    started = Trainer(tiny_config)
    started.start_from(tiny_config.train.init_from)
    chex.assert_trees_all_equal(started.weights(), evaluated.weights())
    chex.assert_trees_all_equal(state(started), arrays(module))


def test_mistakes_are_told(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError, match=r"^Llama with model.family=gpt: GPT is model.family=gpt, Llama is"):
        Llama(tiny_config.model, rngs=nnx.Rngs(0))
    bert = replaced(tiny_config, {"model.family": "bert", "model.objective": "classification"})
    with pytest.raises(ConfigError, match=r"^Bert with num_classes=0 .*: give num_classes=, the number of its labels"):
        Bert(bert.model, rngs=nnx.Rngs(0))
    module = GPT(tiny_config.model, rngs=nnx.Rngs(0))
    module.tokens = nnx.Embed(250, 32, rngs=nnx.Rngs(0))
    module.more = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    del module.norm.bias
    with pytest.raises(CheckpointError) as error:
        fiddlex.flax.save(module, tmp_path / "run")
    assert str(error.value) == (
        "The arrays of the GPT are not those of the model:\n"
        "  missing: norm.bias (32,)\n"
        "  not of this model: more.kernel (2, 2)\n"
        "  of another shape: tokens.embedding is (250, 32), must be (257, 32)"
    )
    assert not (tmp_path / "run").exists()
