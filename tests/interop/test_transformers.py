"""fiddlex against transformers on random models; needs transformers and torch (docs/tests.md)."""

from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of warnings in transformers and torch

DECODERS = ["GPT-2", "GPT-2, gelu, narrow MLP", "GPT-2, untied", "Mistral"]
DECODERS += ["Qwen2", "Qwen2, tied, one head of keys", "Qwen3, tied", "Qwen3, untied"]
DECODERS += ["Llama, rope_type llama3", "Llama, one head of keys", "Llama, tied, five layers"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = "original_max_position_embeddings"
FORMS: dict[str, tuple[str, tuple[str, ...], dict[str, Any]]] = {  # model, options to remove, options to set
    "base beside": ("Llama, tied, five layers", (), {"rope_parameters": {"rope_type": "default"}, "rope_theta": 500.0}),
    "both rotary options": (
        "Llama, tied, five layers",
        (),
        {"rope_parameters": {"rope_theta": 7.0}, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    ),
    "two lengths": (
        "Llama, tied, five layers",
        ("rope_parameters",),
        {"rope_scaling": LLAMA3 | {LENGTH: 16}, LENGTH: 8, "rope_theta": 500.0},
    ),
    "length beside": ("Llama, tied, five layers", (), {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}, LENGTH: 8}),
    "no length": ("Llama, tied, five layers", (), {"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}),
    "no epsilon, no base": ("Llama, one head of keys", ("rms_norm_eps", "rope_parameters", "head_dim"), {}),
    "null heads of keys": ("Qwen3, untied", (), {"num_key_value_heads": None}),
    "no window": ("Mistral", ("sliding_window",), {}),
    "null window": ("Mistral", (), {"sliding_window": None}),
    "other names": (
        "GPT-2, gelu, narrow MLP",
        ("n_head", "n_layer", "n_embd", "n_positions", "layer_norm_epsilon"),
        {"num_attention_heads": 2, "num_hidden_layers": 5, "hidden_size": 32, "max_position_embeddings": 32},
    ),
    "swish": ("Llama, one head of keys", (), {"hidden_act": "swish"}),
    "no class": ("Qwen2", ("architectures",), {}),
    "windows of no layer": (
        "Qwen2",
        ("layer_types",),
        {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 4},
    ),
    "windows but for the kinds": (
        "Qwen3, untied",
        (),
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 0,
            "layer_types": ["full_attention"] * 4,
        },
    ),
    "no defaults of BERT": ("BERT, pretraining", ("layer_norm_eps", "hidden_act", "type_vocab_size"), {}),
}
BERTS = ["BERT, pretraining", "BERT, masked LM", "BERT, classification"]


@pytest.fixture
def comparison() -> Any:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from third_party.huggingface import comparison

    return comparison


@pytest.mark.parametrize("layout", ["1 × 1 × 1", "2 × 2 × 2"])
@pytest.mark.parametrize("name", [*DECODERS, *BERTS])
def test_logits_and_losses_are_those_of_transformers(name: str, layout: str, comparison: Any) -> None:
    """Also takes the weights there and back: the same bytes, and transformers loads them."""
    found = comparison.compare(comparison.random_model(name), comparison.LAYOUTS[layout])
    assert found.logits < 1e-4
    assert found.loss < 1e-4


@pytest.mark.parametrize("form", FORMS)
def test_options_mean_what_they_mean_in_transformers(form: str, comparison: Any) -> None:
    name, removed, added = FORMS[form]

    def edit(fields: dict[str, Any]) -> dict[str, Any]:
        return {option: value for option, value in fields.items() if option not in removed} | added

    found = comparison.compare(comparison.random_model(name), {}, edit=edit)
    assert max(found) < 1e-4


def test_a_folder_in_several_files_is_read(comparison: Any) -> None:
    model = comparison.random_model("Llama, rope_type llama3")
    found = comparison.compare(model, comparison.LAYOUTS["2 × 2 × 2"], shard="20KB")
    assert max(found) < 1e-4


def test_every_model_is_compared(comparison: Any) -> None:
    assert {*DECODERS, *BERTS} == set(comparison.MODELS)
