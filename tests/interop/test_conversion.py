"""Folders of transformers become workdirs and folders again, byte for byte, on any layout.

`third_party/huggingface/` holds the logits against those of transformers.
"""

import functools
import json
import pathlib
from typing import Any

import jax
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.data import JsonTokenizer
from fiddlex.errors import CheckpointError, ConfigError, DataError
from fiddlex.interop.architectures import config_json, model_of, settings_of, sliding_window
from fiddlex.interop.starting import starting_config
from fiddlex.train import loop
from fiddlex.train.run.transfer.conversion import export_workdir, import_folder
from fiddlex.train.run.transfer.result import load_generator
from fiddlex.train.run.workdir import read_config
from fiddlex.train.trainer import Trainer, load_trainer
from tests.interop.folders import CONFIGS, LLAMA, make_folder, on_eight


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        *(pytest.param(name, {}, id=name) for name in CONFIGS),
        pytest.param("GPT2LMHeadModel", {"tie_word_embeddings": False}, id="untied"),
    ],
)
def test_a_folder_comes_back_byte_for_byte(name: str, fields: dict[str, Any], tmp_path: pathlib.Path) -> None:
    tensors = make_folder(tmp_path / "hf", name, **fields)
    import_folder(tmp_path / "hf", tmp_path / "run", on_eight)
    export_workdir(tmp_path / "run", tmp_path / "back", "")
    found = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert found[key].dtype == tensor.dtype
        assert found[key].tobytes() == tensor.tobytes(), key
    before, after = (json.loads((tmp_path / each / "config.json").read_text()) for each in ("hf", "back"))
    assert settings_of(after) == settings_of(before)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "run", "back"}


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


def test_a_converted_run_evaluates_and_trains_on_any_data(
    tmp_path: pathlib.Path, text_file: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM")
    import_folder(tmp_path / "hf", tmp_path / "run")
    assert f"{tmp_path / 'hf'} has no tokenizer" in caplog.text
    refused_today(tmp_path / "run")
    # Rotary positions are in no weight, so that texts may be longer.
    longer = functools.partial(replaced, values={"model.seq_len": 2 * read_config(tmp_path / "run").model.seq_len})
    generator, _ = load_generator(tmp_path / "run", longer)
    assert len(generator.complete(["a" * 40], 4)[0].text) > 0
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


def refused_today(workdir: pathlib.Path) -> None:
    """Gives the `config.json` that a workdir keeps options that earlier versions of fiddlex ignored."""
    path = workdir / "huggingface" / "config.json"
    described = json.loads(path.read_text()) | {"attention_dropout": 0.1, "transformers_weights": "a.safetensors"}
    path.write_text(json.dumps(described))


def imported(parent: pathlib.Path, folder: pathlib.Path) -> Any:
    import_folder(folder, parent / "imported")
    return load_trainer(parent / "imported").weights()


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("LlamaForCausalLM", {"attention_bias": True}, "LlamaForCausalLM with attention_bias=True: fiddlex computes"),
        ("LlamaForCausalLM", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ("LlamaForCausalLM", {"architectures": ["FalconForCausalLM"]}, "architectures=['FalconForCausalLM']: fiddlex"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.type='yarn'"),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}, "use_sliding_window=True"),
        ("GPT2LMHeadModel", {"activation_function": "relu"}, "activation_function='relu'"),
        ("GPT2LMHeadModel", {"n_head": 5}, "model.hidden_size=32 is not a multiple of model.num_heads=5"),
        ("GPT2LMHeadModel", {"n_layer": 3}, "not of this model: transformer.h.3.attn.c_attn.bias"),
        ("GPT2LMHeadModel", {"n_layer": 5}, "missing: transformer.h.4.ln_1.weight"),
        ("GPT2LMHeadModel", {"vocab_size": 256}, "transformer.wte.weight is (257, 32), must be (256, 32)"),
        ("GPT2LMHeadModel", {"n_embd": "32"}, "n_embd='32' must be a whole number from 1"),
        ("GPT2LMHeadModel", {"attn_pdrop": 0.2}, "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.2: fiddlex has one"),
        ("BertForPreTraining", {"position_embedding_type": "relative_key"}, "position_embedding_type='relative_key'"),
        ("BertForPreTraining", {"type_vocab_size": 16}, "type_vocab_size=16"),
        ("BertForMaskedLM", {"hidden_act": "relu"}, "hidden_act='relu'"),
        ("BertForMaskedLM", {"is_decoder": True}, "is_decoder=True"),
        ("BertForMaskedLM", {"hidden_dropout_prob": 0.1}, "attention_probs_dropout_prob=0: fiddlex has one rate"),
        ("BertForSequenceClassification", {"classifier_dropout": 0.3}, "classifier_dropout=0.3: fiddlex has one rate"),
        ("BertForSequenceClassification", {"problem_type": "regression"}, "problem_type='regression'"),
        ("BertForSequenceClassification", {"id2label": {"0": "one"}}, "2 to 100000 classes, numbered from 0"),
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b, c"}}, "have no comma"),
        ("BertForSequenceClassification", {"id2label": {"1": "a", "2": "b"}}, "numbered from 0"),
        ("BertForSequenceClassification", {"id2label": {"0": "a", "1": "b"}}, "classifier.bias is (3,), must be (2,)"),
        ("BertForMaskedLM", {"num_hidden_layers": 3}, "not of this model: bert.encoder.layer.3.attention.output.Layer"),
        ("BertForMaskedLM", {"num_hidden_layers": 5}, "missing: bert.encoder.layer.4.attention.self.query.weight"),
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


def test_a_sequence_is_not_longer_than_the_sliding_window(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "MistralForCausalLM", sliding_window=8)
    for seq_len in (8, 9):
        change = functools.partial(replaced, values={"model.seq_len": seq_len})
        if seq_len == 8:
            import_folder(tmp_path / "hf", tmp_path / "run", change)
        else:
            with pytest.raises(CheckpointError, match=r"model\.seq_len=9 is above the 8 positions .* or less"):
                import_folder(tmp_path / "hf", tmp_path / "no", change)
    # What reads the workdir, under another config, and what starts from it.
    message = r"model\.seq_len=9 is above the 8 positions that attention spans in .*huggingface"
    refused_today(tmp_path / "run")
    for read in (load_generator, load_trainer):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "run", change)
    with pytest.raises(CheckpointError, match=message):
        export_workdir(tmp_path / "run", tmp_path / "back", "", change)
    longer = change(read_config(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=message):
        loop.train(longer, tmp_path / "run")
    with pytest.raises(CheckpointError, match=message):
        Trainer(longer).start_from(str(tmp_path / "run"))


def test_a_model_of_another_size_is_not_started_from(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM")
    config = replaced(Config(), {"model.family": "llama", "train.init_from": f"hf:{tmp_path / 'hf'}"})
    with pytest.raises(CheckpointError) as error:
        Trainer(config).start_from(config.train.init_from)
    assert "model.hidden_size is 128, was 32" in str(error.value)


def test_a_window_bounds_the_sequence() -> None:
    described = {"architectures": ["MistralForCausalLM"], **LLAMA, "sliding_window": 16}
    assert model_of(described).seq_len == 16


@pytest.mark.parametrize(
    ("described", "window"),
    [
        ({"architectures": ["MistralForCausalLM"]}, 4096),  # transformers' default
        ({"model_type": "mistral", "sliding_window": 2**20}, 2**20),
        ({"model_type": "mistral", "sliding_window": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8}, None),
        ({"architectures": ["BertForMaskedLM"]}, None),
        ({}, None),
    ],
)
def test_the_window_is_that_of_a_mistral(described: dict[str, Any], window: int | None) -> None:
    assert sliding_window(described) == window


def test_a_run_without_a_folder_gets_a_config_of_its_own() -> None:
    config = Config()
    assert config_json(config)["architectures"] == ["GPT2LMHeadModel"]
    config.model.family, config.model.qk_norm = "llama", True
    described = config_json(config)
    assert described["architectures"] == ["Qwen3ForCausalLM"]
    assert model_of(described).qk_norm
    sizes = {"model.family": "llama", "model.hidden_size": 36, "model.num_heads": 5, "model.head_dim": 8}
    with pytest.raises(
        ConfigError, match=r"hidden_size=36 is not a multiple of model\.num_heads=5: transformers takes"
    ):
        config_json(replaced(Config(), sizes))
    assert config_json(replaced(Config(), sizes | {"model.qk_norm": True}))["head_dim"] == 8
    config = replaced(Config(), {"model.family": "bert", "model.post_norm": True, "model.objective": "mlm_sop"})
    assert config_json(config)["architectures"] == ["BertForPreTraining"]
    with pytest.raises(ConfigError, match=r"model\.post_norm=False: the classes of BERT"):
        config_json(replaced(config, {"model.post_norm": False}))
    with pytest.raises(ConfigError, match="no architecture of transformers is known"):
        config_json(replaced(config, {"model.objective": "multiple_choice"}))


def test_the_tokenizer_moves_with_the_workdir_and_comes_back(tmp_path: pathlib.Path) -> None:
    make_folder(tmp_path / "hf", "GPT2LMHeadModel")
    save_tokenizer(tmp_path / "hf" / "tokenizer.json", "ours")
    (tmp_path / "hf" / "additional_chat_templates").mkdir()
    others = ["tokenizer_config.json", "added_tokens.json", "chat_template.jinja", "additional_chat_templates/x.jinja"]
    for name in others:
        (tmp_path / "hf" / name).write_text("{}")
    import_folder(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    tokenizer = tmp_path / "moved" / "huggingface" / "tokenizer.json"
    assert read_config(tmp_path / "moved").data.tokenizer == str(tokenizer)
    export_workdir(tmp_path / "moved", tmp_path / "back", "")
    assert all((tmp_path / "back" / name).read_text() == "{}" for name in others)
    assert (tmp_path / "back" / "tokenizer.json").read_bytes() == tokenizer.read_bytes()
    # Another tokenizer of the run takes the place of the folder's own; bytes have no file.
    save_tokenizer(tmp_path / "other.json", "theirs")
    for number, (named, expected) in enumerate(((str(tmp_path / "other.json"), True), ("bytes", False))):
        other = tmp_path / f"other-{number}"
        export_workdir(tmp_path / "moved", other, "", lambda config, to=named: replaced(config, {"data.tokenizer": to}))
        assert (other / "tokenizer.json").exists() == expected
        assert not expected or b"theirs" in (other / "tokenizer.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"data\.tokenizer=/none of --source=.*is not there"):
        export_workdir(
            tmp_path / "moved", tmp_path / "no", "", lambda config: replaced(config, {"data.tokenizer": "/none"})
        )


def test_a_run_that_starts_from_a_folder_keeps_what_the_folder_says(
    tmp_path: pathlib.Path, text_file: pathlib.Path
) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM", eos_token_id=5, dtype="bfloat16")
    (tmp_path / "hf" / "generation_config.json").write_text('{"eos_token_id": 5}')
    save_tokenizer(tmp_path / "hf" / "tokenizer.json", "ours")
    fields = {"data.source": f"text:{text_file}", "train.num_steps": 1, "train.checkpoint_every": 1}
    fields |= {"model.seq_len": 8, "data.global_batch_size": 2, "data.eval_fraction": 0.0}
    first = replaced(starting_config(str(tmp_path / "hf")), fields)
    loop.train(first, tmp_path / "first")
    second = replaced(first, {"train.init_from": str(tmp_path / "first")})
    loop.train(second, tmp_path / "second")
    before = json.loads((tmp_path / "hf" / "config.json").read_text())
    for name in ("first", "second"):
        export_workdir(tmp_path / name, tmp_path / f"{name}-back", "")
        after = json.loads((tmp_path / f"{name}-back" / "config.json").read_text())
        assert after["eos_token_id"] == 5
        assert after["dtype"] == "bfloat16"
        assert after["max_position_embeddings"] == before["max_position_embeddings"] > 8
        assert (tmp_path / f"{name}-back" / "generation_config.json").exists()


@pytest.mark.parametrize("option", ["bos_token_id", "eos_token_id"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_folder_that_names_no_tokens_as_first_and_last_is_refused(
    name: str, option: str, tmp_path: pathlib.Path
) -> None:
    make_folder(tmp_path / "hf", "LlamaForCausalLM", bos_token_id=None, eos_token_id=[3, 10**6])  # as some models have
    import_folder(tmp_path / "hf", tmp_path / "run")
    path = tmp_path / "hf" / name
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(before | {option: "x"}))
    with pytest.raises(DataError, match=rf"{path}: {option}='x' must be the number of a token"):
        import_folder(tmp_path / "hf", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_run_of_bytes_becomes_a_folder_with_a_tokenizer(tiny_config: Config, tmp_path: pathlib.Path) -> None:
    config = replaced(tiny_config, {"model.vocab_size": 256, "train.num_steps": 1, "train.checkpoint_every": 1})
    loop.train(config, tmp_path / "run")
    export_workdir(tmp_path / "run", tmp_path / "back", "")
    tokenizer = JsonTokenizer(tmp_path / "back" / "tokenizer.json")
    text = "def f():\n\treturn 'é三🙂'  # \x7f"
    assert tokenizer.encode(text).tolist() == list(text.encode())
    assert tokenizer.decode(list(text.encode())) == text
    assert (tokenizer.vocab_size, tokenizer.separator) == (256, 0)
    described = json.loads((tmp_path / "back" / "config.json").read_text())
    assert (described["bos_token_id"], described["eos_token_id"]) == (0, 0)
    assert json.loads((tmp_path / "back" / "tokenizer_config.json").read_text())["eos_token"] == "<|endoftext|>"
    with pytest.raises(CheckpointError, match=r"is a folder of transformers\. Convert it to a workdir first"):
        read_config(tmp_path / "back")


def save_tokenizer(path: pathlib.Path, word: str) -> None:
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: 0}, unk_token=word))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(path))
