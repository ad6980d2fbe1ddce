"""Folders of transformers become workdirs and folders again, byte for byte, on any layout.

`third_party/huggingface/` holds the logits against those of transformers.
"""

import json
import pathlib
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.interop.architectures import ARCHITECTURES, config_json, model_of
from fiddlex.interop.folder import copy_tokenizer
from fiddlex.train import loop
from fiddlex.train.run.conversion import export_workdir, import_folder
from fiddlex.train.run.workdir import read_config
from fiddlex.train.trainer import Trainer, load_trainer

LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 257,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2LMHeadModel": {
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "vocab_size": 257,
        "n_positions": 32,
        "dtype": "float32",
    },
    "LlamaForCausalLM": LLAMA
    | {
        "rope_theta": 500.0,
        "rope_scaling": LLAMA3 | {"original_max_position_embeddings": 16},
        "torch_dtype": "bfloat16",
    },
    "MistralForCausalLM": LLAMA | {"sliding_window": 4096, "eos_token_id": 2},
    "Qwen3ForCausalLM": LLAMA | {"head_dim": 10, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}},
}


def shapes(json: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a folder, from transformers' classes."""
    if "n_embd" in json:
        h, f = json["n_embd"], 4 * json["n_embd"]
        layer = {"ln_1": (h,), "attn.c_attn": (h, 3 * h), "attn.c_proj": (h, h), "ln_2": (h,)}
        layer |= {"mlp.c_fc": (h, f), "mlp.c_proj": (f, h)}
        found = {"transformer.wte.weight": (json["vocab_size"], h), "transformer.wpe.weight": (json["n_positions"], h)}
        for name, shape in [(f"h.{i}.{name}", s) for i in range(4) for name, s in layer.items()] + [("ln_f", (h,))]:
            found |= {f"transformer.{name}.weight": shape, f"transformer.{name}.bias": shape[-1:]}
        return found
    h, f = json["hidden_size"], json["intermediate_size"]
    size = json.get("head_dim", h // 4)
    layer = {"input_layernorm": (h,), "post_attention_layernorm": (h,), "self_attn.o_proj": (h, 4 * size)}
    layer |= {"self_attn.q_proj": (4 * size, h), "self_attn.k_proj": (2 * size, h), "self_attn.v_proj": (2 * size, h)}
    layer |= {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    if "head_dim" in json:
        layer |= {"self_attn.q_norm": (size,), "self_attn.k_norm": (size,)}
    found = {f"model.layers.{i}.{name}.weight": shape for i in range(4) for name, shape in layer.items()}
    found |= {"model.embed_tokens.weight": (257, h), "model.norm.weight": (h,)}
    return found if json.get("tie_word_embeddings") else found | {"lm_head.weight": (257, h)}


def make_folder(folder: pathlib.Path, name: str, **fields: Any) -> dict[str, np.ndarray]:
    """Writes a folder with random tensors; returns the tensors."""
    folder.mkdir(parents=True)
    described = {"architectures": [name], "model_type": ARCHITECTURES[name].model_type, **CONFIGS[name], **fields}
    (folder / "config.json").write_text(json.dumps(described))
    rng = np.random.default_rng(0)
    dtype = ml_dtypes.bfloat16 if described.get("torch_dtype") == "bfloat16" else np.float32
    tensors = {key: rng.normal(0, 0.1, shape).astype(dtype) for key, shape in shapes(described).items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def on_eight(config: Config) -> Config:
    """On data=2 × pipe=2 × tensor=2 with two chunks."""
    mesh = {"mesh.data": 2, "mesh.pipe": 2, "mesh.tensor": 2}
    pipeline = {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": 2, "pipeline.num_microbatches": 2}
    return replaced(config, mesh | pipeline)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_folder_comes_back_byte_for_byte(name: str, tmp_path: pathlib.Path) -> None:
    tensors = make_folder(tmp_path / "hf", name)
    import_folder(tmp_path / "hf", tmp_path / "run", on_eight)
    export_workdir(tmp_path / "run", tmp_path / "back", "")
    found = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].tobytes() == tensor.tobytes(), key
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "back"))
    assert model_of(after) == model_of(before)
    assert not list(tmp_path.glob("*.tmp"))


def test_every_element_goes_to_its_place(tmp_path: pathlib.Path) -> None:
    """Against the definition of each class: x @ weight in GPT-2, weight @ x in Llama, heads one after another."""
    gpt, llama = (make_folder(tmp_path / name, name) for name in ("GPT2LMHeadModel", "LlamaForCausalLM"))
    import_folder(tmp_path / "GPT2LMHeadModel", tmp_path / "gpt", on_eight)
    weights = load_trainer(tmp_path / "gpt").weights()
    kernel = weights["layers"]["attention"]["qkv"]["kernel"][2]  # [hidden, 3, heads, head size]
    x = np.random.default_rng(1).normal(size=32).astype(np.float32)
    q, k, v = np.split(x @ gpt["transformer.h.2.attn.c_attn.weight"], 3)
    for i, expected in enumerate((q, k, v)):
        np.testing.assert_allclose(np.einsum("h,hnd->nd", x, kernel[:, i]).reshape(-1), expected, rtol=1e-5, atol=1e-6)
    bias = weights["layers"]["attention"]["qkv"]["bias"][2]
    np.testing.assert_array_equal(bias.reshape(-1), gpt["transformer.h.2.attn.c_attn.bias"])
    import_folder(tmp_path / "LlamaForCausalLM", tmp_path / "llama")
    layer = jax.tree.map(lambda w: w[3], load_trainer(tmp_path / "llama").weights()["layers"])
    for ours, theirs in (("k", "k_proj"), ("q", "q_proj")):
        tensor = llama[f"model.layers.3.self_attn.{theirs}.weight"].astype(np.float32)
        found = np.einsum("h,hnd->nd", x, layer["attention"][ours]["kernel"]).reshape(-1)
        np.testing.assert_allclose(found, tensor @ x, rtol=1e-5, atol=1e-6)
    heads = np.random.default_rng(2).normal(size=(4, 8)).astype(np.float32)
    tensor = llama["model.layers.3.self_attn.o_proj.weight"].astype(np.float32)
    found = np.einsum("nd,ndh->h", heads, layer["attention"]["out"]["kernel"])
    np.testing.assert_allclose(found, tensor @ heads.reshape(-1), rtol=1e-5, atol=1e-6)


def test_a_converted_run_evaluates_and_trains_on_any_data(tmp_path: pathlib.Path, text_file: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM")
    import_folder(tmp_path / "hf", tmp_path / "run")
    config = replaced(
        on_eight(read_config(tmp_path / "run")),
        {
            "data.source": f"text:{text_file}",
            "train.num_steps": 2,
            "train.checkpoint_every": 2,
            "optimizer.name": "lion",
        },
    )
    assert load_trainer(tmp_path / "run", lambda _: config).evaluate()["eval_loss"] > 0
    assert loop.train(config, tmp_path / "run").step == 2
    other = replaced(config, {"train.init_from": f"hf:{tmp_path / 'hf'}", "model.seq_len": 16})
    trainer = Trainer(other)
    trainer.start_from(other.train.init_from)
    for found, expected in zip(
        jax.tree.leaves(trainer.weights()), jax.tree.leaves(imported(tmp_path, tmp_path / "hf")), strict=True
    ):
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(CheckpointError, match=r"optimizer\.name is 'adamw', was 'lion'"):
        loop.train(replaced(config, {"optimizer.name": "adamw"}), tmp_path / "run")


def imported(parent: pathlib.Path, folder: pathlib.Path) -> Any:
    import_folder(folder, parent / "imported")
    return load_trainer(parent / "imported").weights()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "LlamaForCausalLM with attention_bias=True: fiddlex computes"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("LlamaForCausalLM", {"architectures": ["FalconForCausalLM"]}, "architectures=['FalconForCausalLM']: fiddlex"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type='yarn'"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True}, "use_sliding_window=True"),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, "its activation is 'relu'"),
        ("GPT2LMHeadModel", {"n_head": 5}, "model.hidden_size=32 is not a multiple of model.num_heads=5"),
        ("GPT2LMHeadModel", {"n_layer": 3}, "not of this model: transformer.h.3.attn.c_attn.bias"),
        ("GPT2LMHeadModel", {"n_layer": 5}, "missing: transformer.h.4.ln_1.weight"),
        ("GPT2LMHeadModel", {"vocab_size": 256}, "transformer.wte.weight is (257, 32), must be (256, 32)"),
        ("GPT2LMHeadModel", {"n_embd": "32"}, "must be of type int"),
    ],
)
def test_what_cannot_be_converted_is_told(
    name: str, fields: dict[str, Any], message: str, tmp_path: pathlib.Path
) -> None:
    make_folder(tmp_path / "hf", name)
    described = json.loads((tmp_path / "hf" / "config.json").read_text()) | fields
    (tmp_path / "hf" / "config.json").write_text(json.dumps(described))
    with pytest.raises((CheckpointError, ConfigError)) as error:
        import_folder(tmp_path / "hf", tmp_path / "run")
    assert message in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_model_of_another_size_is_not_started_from(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM")
    config = replaced(Config(), {"model.family": "llama", "train.init_from": f"hf:{tmp_path / 'hf'}"})
    with pytest.raises(CheckpointError) as error:
        Trainer(config).start_from(config.train.init_from)
    assert "model.hidden_size is 128, was 32" in str(error.value)


def test_a_window_bounds_the_sequence() -> None:
    described = {"architectures": ["MistralForCausalLM"], **LLAMA, "sliding_window": 16}
    assert model_of(described).seq_len == 16


def test_a_run_without_a_folder_gets_a_config_of_its_own() -> None:
    config = Config()
    assert config_json(config)["architectures"] == ["GPT2LMHeadModel"]
    config.model.family, config.model.qk_norm = "llama", True
    described = config_json(config)
    assert described["architectures"] == ["Qwen3ForCausalLM"]
    assert model_of(described).qk_norm
    config.model = replaced(Config(), {"model.family": "bert"}).model
    with pytest.raises(ConfigError, match="no architecture of transformers is known"):
        config_json(config)


def test_gpt2s_vocabulary_becomes_a_tokenizer(tmp_path: pathlib.Path) -> None:
    import tokenizers

    (tmp_path / "hf").mkdir()
    trained = tokenizers.ByteLevelBPETokenizer()
    trained.train_from_iterator(["import os", "def f(): return 1"] * 3, vocab_size=270)
    trained.save_model(str(tmp_path / "hf"))
    (tmp_path / "run").mkdir()
    path = copy_tokenizer(tmp_path / "hf", tmp_path / "run")
    made = tokenizers.Tokenizer.from_file(str(path))
    for text in ("import os", " naïve\n\n"):
        assert made.encode(text).ids == trained.encode(text).ids
        assert made.decode(made.encode(text).ids) == text
    (tmp_path / "hf" / "merges.txt").write_text("no merge at all here\n")
    (tmp_path / "run" / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="are no byte-pair encoding"):
        copy_tokenizer(tmp_path / "hf", tmp_path / "run")
