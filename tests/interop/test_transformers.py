"""fiddlex against transformers on random models; needs transformers and torch (docs/tests.md)."""

from typing import Any

import pytest

pytestmark = [pytest.mark.long, pytest.mark.filterwarnings("ignore")]  # of warnings in transformers and torch

DECODERS = ["GPT-2", "GPT-2, gelu, narrow MLP", "Mistral", "Qwen3, tied", "Qwen3, untied"]
DECODERS += ["Llama, rope_type llama3", "Llama, one head of keys", "Llama, tied, five layers"]
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


def test_a_folder_in_several_files_is_read(comparison: Any) -> None:
    model = comparison.random_model("Llama, rope_type llama3")
    found = comparison.compare(model, comparison.LAYOUTS["2 × 2 × 2"], shard="20KB")
    assert max(found) < 1e-4


def test_every_model_is_compared(comparison: Any) -> None:
    assert {*DECODERS, *BERTS} == set(comparison.MODELS)
