"""A `config.json` is read as transformers reads it, or refused with a message that names the option."""

import json
from typing import Any

import pytest

from fiddlex.config import Config, ModelConfig
from fiddlex.config.overrides import replaced
from fiddlex.errors import ConfigError
from fiddlex.interop.architectures import ARCHITECTURES, config_json, model_of, settings_of
from tests.interop.folders import CONFIGS, LLAMA, LLAMA3

ODD = [None, "", [], {}, 0, -1, True, "x", json.loads("1e400"), float("nan"), 10**400, [["x"]], {"x": {}}, 0.5]
ROPE = ("rope_type", "type", "rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor")
LENGTH = "original_max_position_embeddings"


def described(name: str, **fields: Any) -> dict[str, Any]:
    return {"architectures": [name], "model_type": ARCHITECTURES[name].model_type, **CONFIGS[name], **fields}


def llama(**fields: Any) -> ModelConfig:
    return model_of({"architectures": ["LlamaForCausalLM"], **LLAMA, **fields})


def options(name: str) -> list[str]:
    found = ARCHITECTURES[name]
    more = [
        "architectures",
        "model_type",
        "n_inner",
        "head_dim",
        "num_key_value_heads",
        "sliding_window",
        "layer_types",
    ]
    more += ["rope_scaling", "rope_parameters", "partial_rotary_factor", LENGTH]
    more += ["classifier_dropout", "id2label", "num_labels"]
    return list(dict.fromkeys([*found.defaults, *found.fixed, *found.aliases, *CONFIGS[name], *more]))


def refusal(fields: dict[str, Any]) -> str:
    """The message of the error for a `config.json`; empty if it is read. Other errors pass through."""
    try:
        assert isinstance(model_of(fields), ModelConfig)
        assert isinstance(settings_of(fields)["model"], ModelConfig)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", CONFIGS)
def test_an_odd_value_is_read_or_refused(name: str) -> None:
    refused = set()
    for option in options(name):
        for value in ODD:
            if message := refusal(described(name, **{option: value})):
                assert len(message) < 700, option
                refused.add(option)
    unread = {"rope_theta"} if "rope_parameters" in CONFIGS[name] else set()  # which has one of its own
    assert {*ARCHITECTURES[name].defaults, *ARCHITECTURES[name].fixed} - unread <= refused


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("kind", ["default", "linear", "llama3"])
def test_an_odd_value_of_rotary_positions_is_read_or_refused(place: str, kind: str) -> None:
    refused, base = set(), {"rope_theta": 500.0} | LLAMA3 | {LENGTH: 16, "rope_type": kind}
    for option in (*ROPE, LENGTH):
        for value in ODD:
            fields = {"architectures": ["LlamaForCausalLM"], **LLAMA, place: base | {option: value}}
            if message := refusal(fields):
                assert f"{place}.{option}=" in message or "model.rope_" in message
                refused.add(option)
    read = {
        "default": {"rope_type", "rope_theta", "partial_rotary_factor"},
        "linear": {"rope_type", "rope_theta", "partial_rotary_factor", "factor"},
        "llama3": {*ROPE, LENGTH} - {"type"},
    }
    assert read[kind] <= refused


@pytest.mark.parametrize("value", ["", [], {}, 0, False])
@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("LlamaForCausalLM", "num_key_value_heads"),
        ("LlamaForCausalLM", "head_dim"),
        ("LlamaForCausalLM", "intermediate_size"),
        ("MistralForCausalLM", "sliding_window"),
        ("GPT2LMHeadModel", "n_inner"),
        ("BertForSequenceClassification", "id2label"),
    ],
)
def test_only_null_is_missing(name: str, option: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"{option}="):
        settings_of(described(name, **{option: value}))


@pytest.mark.parametrize("value", ["", [], 0, False])
def test_only_null_or_an_empty_object_has_no_rotary_positions(value: Any) -> None:
    for option in ("rope_scaling", "rope_parameters"):
        with pytest.raises(ConfigError, match=f"{option}=.* must be an object or null"):
            llama(**{option: value})
    for none in ({}, None):
        scaled = llama(rope_scaling=none, rope_parameters={"rope_type": "linear", "factor": 2.0})
        assert (scaled.rope_scaling, scaled.rope_factor) == ("linear", 2.0)


def test_rotary_positions_are_those_that_transformers_takes() -> None:
    """As `modeling_rope_utils.py` of transformers 5.23 has them; test_transformers.py compares the logits."""
    linear, own = {"rope_type": "linear", "factor": 4.0}, LLAMA3 | {LENGTH: 16}
    assert llama(rope_parameters={"rope_type": "default"}, rope_theta=500.0).rope_base == 500
    assert llama(rope_parameters={"rope_theta": 7.0}, rope_theta=500.0).rope_base == 7
    assert llama(rope_parameters={"rope_type": "default"}).rope_base == 10000
    both = llama(rope_parameters={"rope_type": "default", "rope_theta": 7.0}, rope_scaling=linear)
    assert (both.rope_scaling, both.rope_factor, both.rope_base) == ("linear", 4.0, 10000.0)
    assert llama(rope_scaling=linear | {"type": "yarn"}).rope_scaling == "linear"
    assert llama(rope_scaling=own).rope_original_len == 16
    assert llama(rope_scaling=own, **{LENGTH: 24}).rope_original_len == 24
    assert llama(rope_parameters=LLAMA3, **{LENGTH: 24}).rope_original_len == 24
    assert llama(rope_parameters=LLAMA3).rope_original_len == LLAMA["max_position_embeddings"]
    for lacking in ("factor", "low_freq_factor", "high_freq_factor"):
        with pytest.raises(ConfigError, match=rf"rope_scaling\.{lacking} is missing, which the model needs"):
            llama(rope_scaling={name: value for name, value in own.items() if name != lacking})
    with pytest.raises(ConfigError, match="fiddlex has the same rotary positions in every layer"):
        llama(rope_parameters={"full_attention": linear})


def test_what_is_missing_has_the_default_of_its_class() -> None:
    def bare(name: str, **fields: Any) -> ModelConfig:
        return model_of({"architectures": [name], **fields})

    assert bare("LlamaForCausalLM").layer_norm_epsilon == 1e-6
    assert bare("LlamaForCausalLM").kv_heads == 32
    mistral = bare("MistralForCausalLM")
    assert (mistral.kv_heads, mistral.seq_len) == (8, 4096)
    assert bare("MistralForCausalLM", sliding_window=None).seq_len == 131072
    qwen = bare("Qwen3ForCausalLM", num_attention_heads=64)
    assert (qwen.kv_heads, qwen.head_size) == (32, 128)
    assert bare("GPT2LMHeadModel").num_heads == 12
    assert bare("BertForMaskedLM").vocab_size == 30522


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("LlamaForCausalLM", "granite"),
        ("LlamaForCausalLM", "mistral"),
        ("MistralForCausalLM", "llama"),
        ("GPT2LMHeadModel", "gpt_neo"),
        ("BertForMaskedLM", "roberta"),
        ("BertForMaskedLM", ["bert"]),
    ],
)
def test_a_class_of_another_type_of_model_is_refused(name: str, kind: Any) -> None:
    with pytest.raises(ConfigError) as error:
        model_of(described(name, model_type=kind))
    assert f"model_type={kind!r}: a {name} has model_type={ARCHITECTURES[name].model_type!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("LlamaForCausalLM", {"is_causal": False}),
        ("LlamaForCausalLM", {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
        ("BertForMaskedLM", {"quantization_config": {"load_in_8bit": True}}),
        ("LlamaForCausalLM", {"per_layer_config": {"0": {"num_attention_heads": 2}}}),
        ("LlamaForCausalLM", {"partial_rotary_factor": 0.5}),
        ("LlamaForCausalLM", {"transformers_weights": "other.safetensors"}),
        ("LlamaForCausalLM", {"attention_dropout": 0.1}),
        ("MistralForCausalLM", {"attention_dropout": 0.1}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 3}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 3}),
        ("BertForSequenceClassification", {"num_labels": 2}),
    ],
)
def test_an_option_that_is_not_computed_is_refused(name: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(fields))}="):
        settings_of(described(name, **fields))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 4}),
        ("Qwen3ForCausalLM", {"layer_types": ["full_attention"] * 4, "use_sliding_window": True, "sliding_window": 8}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 4}),
        ("Qwen3ForCausalLM", {"use_sliding_window": True, "sliding_window": None, "max_window_layers": 0}),
        ("LlamaForCausalLM", {"hidden_act": "swish", "attention_dropout": 0}),
        *((name, {"architectures": None}) for name in CONFIGS if not name.startswith("Bert")),
    ],
)
def test_another_way_to_say_the_same_is_read(name: str, fields: dict[str, Any]) -> None:
    assert model_of(described(name, **fields)) == model_of(described(name))


def test_a_class_that_its_type_does_not_tell_must_be_named() -> None:
    with pytest.raises(ConfigError, match="architectures=None: fiddlex has GPT2LMHeadModel, "):
        model_of(described("BertForMaskedLM", architectures=None))


@pytest.mark.parametrize(
    ("alias", "option"),
    [
        ("hidden_size", "n_embd"),
        ("num_attention_heads", "n_head"),
        ("num_hidden_layers", "n_layer"),
        ("max_position_embeddings", "n_positions"),
    ],
)
def test_other_names_of_gpt2s_options_must_agree(alias: str, option: str) -> None:
    json = described("GPT2LMHeadModel")
    value = json[option]
    with pytest.raises(ConfigError, match=f"{alias}={2 * value} and {option}={value}: both are the same option"):
        model_of(json | {alias: 2 * value})
    assert model_of(json | {alias: value}) == model_of(json)
    del json[option]
    assert model_of(json | {alias: value}) == model_of(described("GPT2LMHeadModel"))


def test_what_is_written_has_one_place_for_each_option() -> None:
    gpt = described("GPT2LMHeadModel", max_position_embeddings=32, num_hidden_layers=4)
    config = replaced(Config(), {"model": model_of(gpt), "model.seq_len": 16})
    assert model_of(config_json(config, gpt)) == config.model
    base = {"architectures": ["LlamaForCausalLM"], **LLAMA, "rope_scaling": LLAMA3, LENGTH: 24}
    config = replaced(Config(), {"model": model_of(base), "model.rope_original_len": 20})
    assert model_of(config_json(config, base)) == config.model
