"""Random models of transformers, and how far fiddlex's logits and losses are from theirs.

`compare` saves a model with `save_pretrained`, reads it with transformers and with fiddlex in a layout, compares logits
and losses, writes a folder, and checks that every tensor has the same bytes and that transformers loads the folder with
the same logits and without a missing or an unexpected key. `compare_logits.py` prints the differences, and
tests/interop/test_transformers.py bounds them.
"""

import json
import os
import pathlib
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import jax
import jax.numpy as jnp
import numpy as np
import safetensors.numpy
import torch
import transformers

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.config.config import LABELLED
from fiddlex.config.overrides import replaced
from fiddlex.interop.folder import read_settings
from fiddlex.interop.huggingface import FolderWeights, write_weights
from fiddlex.interop.options import Json
from fiddlex.models.bert import BERT
from fiddlex.models.task_sizes import max_masked
from fiddlex.parallel.sharding import named
from fiddlex.train.inference.decoding import Decoding, make_decoding
from fiddlex.train.inference.forward import make_eval_step
from fiddlex.train.inference.generation import generate
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.step.program import Program

VOCABULARY, LENGTH, ROWS = 257, 32, 32
LAYOUTS: dict[str, dict[str, Any]] = {
    "1 × 1 × 1": {},
    "2 × 2 × 2": {
        "mesh.data": 2,
        "mesh.pipe": 2,
        "mesh.tensor": 2,
        "pipeline.schedule": "interleaved_1f1b",
        "pipeline.num_chunks": 2,
        "pipeline.num_microbatches": 2,
    },
}
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": LENGTH,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def _gpt2(**fields: Any) -> transformers.PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": VOCABULARY, "n_positions": LENGTH}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | fields))


def _decoder(name: str, **fields: Any) -> transformers.PreTrainedModel:
    described = getattr(transformers, f"{name}Config")(**SIZES | {"num_key_value_heads": 2} | fields)
    return getattr(transformers, f"{name}ForCausalLM")(described)


def _bert(kind: str, **fields: Any) -> transformers.PreTrainedModel:
    return getattr(transformers, f"BertFor{kind}")(transformers.BertConfig(**SIZES | fields))


MODELS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "GPT-2": _gpt2,
    "GPT-2, gelu, narrow MLP": lambda: _gpt2(activation_function="gelu", n_inner=40, n_layer=5, n_head=2),
    "GPT-2, untied": lambda: _gpt2(tie_word_embeddings=False),
    "Llama, rope_type llama3": lambda: _decoder("Llama", rope_parameters=LLAMA3),
    "Llama, one head of keys": lambda: _decoder("Llama", num_key_value_heads=1),
    "Llama, tied, five layers": lambda: _decoder("Llama", tie_word_embeddings=True, num_hidden_layers=5),
    "Mistral": lambda: _decoder("Mistral"),
    "Qwen2": lambda: _decoder("Qwen2"),
    "Qwen2, tied, one head of keys": lambda: _decoder("Qwen2", num_key_value_heads=1, tie_word_embeddings=True),
    "Qwen3, tied": lambda: _decoder("Qwen3", head_dim=10, tie_word_embeddings=True),
    "Qwen3, untied": lambda: _decoder("Qwen3", head_dim=8, num_key_value_heads=4),
    "BERT, pretraining": lambda: _bert("PreTraining"),
    "BERT, masked LM": lambda: _bert("MaskedLM", hidden_act="gelu_new", num_hidden_layers=5),
    "BERT, classification": lambda: _bert("SequenceClassification", num_labels=3),
}


class Differences(NamedTuple):
    """How far two programs are apart.

    Attributes:
      logits: the largest difference of the logits, relative to the largest logit.
      loss: the difference of the losses, relative to the loss.
    """

    logits: float
    loss: float


def random_model(name: str) -> transformers.PreTrainedModel:
    """A model of `MODELS` whose weights, biases and scales too, are all random."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def compare(
    model: transformers.PreTrainedModel,
    changes: dict[str, Any],
    *,
    shard: str = "1GB",
    edit: Callable[[Json], Json] = lambda fields: fields,
) -> Differences:
    """Compares logits and losses in a layout, and checks the way back.

    Args:
      model: the model.
      changes: fields of the config that determine the layout.
      shard: the largest size of one file of the folder, as transformers writes it.
      edit: maps the `config.json` that transformers writes to the one that both read.

    Raises:
      AssertionError: when a tensor comes back with other bytes, or transformers does not load what fiddlex writes.
    """
    with tempfile.TemporaryDirectory() as parent:
        folder, back = pathlib.Path(parent) / "hf", pathlib.Path(parent) / "back"
        model.save_pretrained(folder, max_shard_size=shard)
        fields = edit(json.loads((folder / "config.json").read_text(encoding="utf-8")))
        (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        model = type(model).from_pretrained(folder).eval()
        config = replaced(Config(), read_settings(folder) | changes | {"data.global_batch_size": ROWS})
        if config.model.task in LABELLED:
            config.data.source = "tsv:none.tsv"
        program = Program(config.validate(), make_mesh(config.mesh))
        layout = program.layout
        shardings = named(program.mesh, layout.master)
        weights = FolderWeights(folder, program.model).read(layout.shapes, shardings, layout.placement.layers)
        found = (_compare_bert if isinstance(program.model, BERT) else _compare_decoder)(model, program, weights)

        back.mkdir()
        (back / "config.json").write_bytes((folder / "config.json").read_bytes())
        write_weights(back, config, program.model, weights, layout.placement.rows, "float32")
        assert _contents(folder) == _contents(back)
        _check_loads(model, back)
        return found


def _contents(folder: pathlib.Path) -> dict[str, tuple[Any, ...]]:
    tensors = [item for file in folder.glob("*.safetensors") for item in safetensors.numpy.load_file(file).items()]
    return {name: (x.dtype, x.shape, x.tobytes()) for name, x in tensors}


def _check_loads(model: transformers.PreTrainedModel, folder: pathlib.Path) -> None:
    kinds = {
        "BertForPreTraining": "PreTraining",
        "BertForMaskedLM": "MaskedLM",
        "BertForSequenceClassification": "SequenceClassification",
    }
    auto = getattr(transformers, f"AutoModelFor{kinds.get(type(model).__name__, 'CausalLM')}")
    loaded, told = auto.from_pretrained(folder, output_loading_info=True)
    assert type(loaded) is type(model)
    assert not any(told.values()), told
    tokens = torch.arange(LENGTH)[None]
    with torch.no_grad():
        np.testing.assert_array_equal(loaded.eval()(tokens)[0].numpy(), model(tokens)[0].numpy())


def _relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def _scores(program: Program, weights: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    step = make_eval_step(
        program.model, program.config, head=program.model.scores, mesh=program.mesh, layout=program.layout
    )
    return np.asarray(step(weights, batch), np.float64).sum(axis=0)  # [part, 3]


@torch.no_grad()
def _compare_decoder(model: transformers.PreTrainedModel, program: Program, weights: Any) -> Differences:
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    positions = np.arange(ROWS, dtype=np.int32) % LENGTH  # another position of each row
    decoding = make_decoding(program)
    compute = decoding.weights(weights)
    prompts = [row[: position + 1].tolist() for row, position in zip(tokens, positions, strict=True)]
    ours = np.asarray(decoding.prefill(compute, prompts)[1])[:, :VOCABULARY]
    _compare_greedy(model, decoding, compute, tokens[:, : LENGTH // 2])
    long = torch.tensor(tokens).long()
    theirs = model(long, labels=long)
    targets, weight = np.roll(tokens, -1, axis=1), np.ones((ROWS, LENGTH), np.float32)
    weight[:, -1] = 0  # transformers has no target for the last position
    loss, total, _ = _scores(program, weights, {"tokens": tokens, "targets": targets, "weights": weight})[0]
    at = theirs.logits.numpy()[np.arange(ROWS), positions]
    return Differences(_relative(ours, at), abs(loss / total / theirs.loss.item() - 1))


@torch.no_grad()
def _compare_greedy(model: transformers.PreTrainedModel, decoding: Decoding, weights: Any, prompts: np.ndarray) -> None:
    """Raises AssertionError when a prompt is continued by other tokens than transformers draws."""
    number, sampling = LENGTH - prompts.shape[1], SamplingConfig(temperature=0)
    drawn = generate(decoding, weights, prompts.tolist(), number, vocab_size=VOCABULARY, config=sampling)
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = None, 0
    inputs = torch.tensor(prompts).long()
    theirs = model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=number, do_sample=False)
    np.testing.assert_array_equal(np.stack(list(drawn), axis=1), theirs.numpy()[:, prompts.shape[1] :])


def _bert_batch(task: str, num_classes: int) -> dict[str, np.ndarray]:
    """Texts of several lengths, of two sentences each, with padding after them."""
    rng, count = np.random.default_rng(0), max_masked(LENGTH, Config().data.mask_fraction)
    used = rng.integers(12, LENGTH + 1, (ROWS, 1))
    places = np.arange(LENGTH)[None]
    batch = {
        "tokens": rng.integers(0, VOCABULARY, (ROWS, LENGTH)),
        "segments": places < used,
        "token_types": (places > 6) & (places < used),
    }
    if task in ("mlm", "mlm_nsp"):
        batch["masked_positions"] = np.stack([rng.choice(n, count, replace=False) for n in used[:, 0]])
        batch["targets"] = rng.integers(0, VOCABULARY, (ROWS, count))
    batch = {name: x.astype(np.int32) for name, x in batch.items()}
    if "targets" in batch:
        batch["weights"] = np.ones((ROWS, count), np.float32)
    if task != "mlm":
        batch["labels"] = rng.integers(0, num_classes, ROWS).astype(np.int32)
        batch["label_weights"] = np.ones(ROWS, np.float32)
    return batch


@torch.no_grad()
def _compare_bert(model: transformers.PreTrainedModel, program: Program, weights: Any) -> Differences:
    """Compares log-probabilities in place of logits: fiddlex has no function that returns these of a BERT."""
    config, task = program.config, program.config.model.task
    batch = _bert_batch(task, max(len(config.data.classes), 2))
    long = {name: torch.tensor(x).long() for name, x in batch.items()}
    inputs = {
        "input_ids": long["tokens"],
        "attention_mask": long["segments"],
        "token_type_ids": long["token_types"],
    }
    rows = np.arange(ROWS)[:, None]
    if "targets" in batch:
        labels = np.full((ROWS, LENGTH), -100)  # which transformers does not score
        labels[rows, batch["masked_positions"]] = batch["targets"]
        inputs["labels"] = torch.tensor(labels)
    if task == "mlm_nsp":
        inputs["next_sentence_label"] = 1 - long["labels"]  # its class 0: the second text follows the first
    if task == "classification":
        inputs["labels"] = long["labels"]
    theirs = model(**inputs)
    pairs = []
    if "targets" in batch:
        logits = theirs.prediction_logits if task == "mlm_nsp" else theirs.logits
        pairs.append(
            (_masked(program, weights, batch), logits.log_softmax(-1).numpy()[rows, batch["masked_positions"]])
        )
    if "labels" in batch:
        logits = theirs.seq_relationship_logits.flip(-1) if task == "mlm_nsp" else theirs.logits
        assert isinstance(program.model, BERT)
        head = program.model.log_probabilities
        step = make_eval_step(program.model, config, head=head, mesh=program.mesh, layout=program.layout)
        pairs.append((np.asarray(step(weights, batch)), logits.log_softmax(-1).numpy()))
    loss = sum(total / weight for total, weight, _ in _scores(program, weights, batch))
    return Differences(max(_relative(*pair) for pair in pairs), abs(loss / theirs.loss.item() - 1))


def _masked(program: Program, weights: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The log-probability of every token at every masked position, float32 [row, position, vocabulary]."""

    def every_loss(weights: Any, x_BTH: jax.Array, batch: dict[str, jax.Array], context: Any) -> jax.Array:
        def loss(token: jax.Array, position: jax.Array) -> jax.Array:
            targets = jnp.full_like(batch["targets"], 0) + token
            weight = jnp.zeros_like(batch["weights"]).at[:, position].set(1.0)
            asked = batch | {"targets": targets, "weights": weight}
            return program.model.scores(weights, x_BTH, asked, context)[:, 0, 0]

        of_positions = jax.vmap(loss, (None, 0), 1)
        positions = jnp.arange(batch["targets"].shape[1])
        return jax.vmap(of_positions, (0, None), 2)(jnp.arange(VOCABULARY, dtype=jnp.int32), positions)

    step = make_eval_step(program.model, program.config, head=every_loss, mesh=program.mesh, layout=program.layout)
    return -np.asarray(step(weights, batch))
