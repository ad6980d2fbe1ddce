import json
import re

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors

from fiddlex.data import make_tokenizer
from fiddlex.errors import ConfigError, DataError
from fiddlex.tools.harness_tokens import HarnessTokenizer

WORDS = {"<s>": 0, "</s>": 1, "a": 2, "b": 3, " ": 4, "<x>": 5}


@pytest.fixture
def spec(tmp_path):
    """A tokenizer of characters that begins a text with <s>, as Llama's, and its config, as transformers write it."""
    tokenizer = tokenizers.Tokenizer(models.WordLevel(WORDS, unk_token="<x>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(3)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    named = {"bos_token": {"content": "<s>", "special": True}, "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(named))
    return str(tmp_path / "tokenizer.json")


def harness(spec, **options) -> HarnessTokenizer:
    return HarnessTokenizer(make_tokenizer(spec), spec, **options)


def test_a_beginning_is_added_once(spec):
    tokens = harness(spec)
    assert tokens.encode("ab ab") == [0, 2, 3, 4, 2, 3]
    assert tokens.encode("<s>ab") == [0, 2, 3]
    assert tokens.encode("ab", add_special_tokens=False) == [2, 3]
    assert tokens.encode("<s>ab", add_special_tokens=True) == [0, 0, 2, 3]
    assert harness(spec, add_bos_token=False).encode("ab") == [2, 3]
    assert tokens.decode([0, 2, 3, 1]) == "ab"


def test_tokens_that_begin_and_end_a_text(spec, tmp_path):
    tokens = harness(spec)
    assert (tokens.prefix, tokens.end, tokens.end_text) == (0, 1, "</s>")
    assert harness(spec, prefix_token_id=3).prefix == 3
    for damaged in ("", "[]", '{"bos_token": 3, "eos_token": {}}', "{"):
        (tmp_path / "tokenizer_config.json").write_text(damaged)
        tokens = harness(spec)  # the vocabulary's separator does both
        assert (tokens.prefix, tokens.end) == (1, 1)
    (tmp_path / "tokenizer_config.json").unlink()
    assert harness(spec).prefix == 1


@pytest.mark.parametrize(
    ("generation", "config", "ends"),
    [
        (None, None, {1}),
        (None, {"eos_token_id": 3}, {1, 3}),
        (None, {"eos_token_id": [2, 5]}, {1, 2, 5}),
        ({"eos_token_id": [4]}, {"eos_token_id": 3}, {1, 4}),
        ({}, {"eos_token_id": 3}, {1, 3}),
        ({"eos_token_id": [77]}, {"eos_token_id": 3}, {1}),  # which this vocabulary has not
        ({"eos_token_id": None}, {"eos_token_id": []}, {1}),
    ],
)
def test_tokens_that_end_a_generated_text(spec, tmp_path, generation, config, ends):
    for name, described in (("generation_config.json", generation), ("config.json", config)):
        if described is not None:
            (tmp_path / name).write_text(json.dumps(described))
    assert make_tokenizer(spec).ends == ends
    assert harness(spec).ends & set(range(6)) == ends
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "b"}))
    assert make_tokenizer(spec).ends == ends | {3}
    assert harness(spec).ends & set(range(6)) == ends - {1} | {3}  # as in transformers, not at the separator


@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("value", ["x", -1, [1, None], True, 1.0, {}])
def test_ends_that_are_no_numbers_of_tokens(spec, tmp_path, name, value):
    (tmp_path / name).write_text(json.dumps({"eos_token_id": value}))
    rule = rf"{name}: eos_token_id={re.escape(repr(value))} must be the number of a token .*, or null\. Correct it in"
    with pytest.raises(DataError, match=rule):
        make_tokenizer(spec)


def test_tokens_that_are_not_there(spec, tmp_path):
    with pytest.raises(
        ConfigError, match=r"prefix_token_id=6: data\.tokenizer=.* has 6 tokens and a token that begins"
    ):
        harness(spec, prefix_token_id=6)
    plain = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    plain.save(str(tmp_path / "plain.json"))
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"prefix_token_id=None: .* has 1 token and no token that begins"):
        harness(str(tmp_path / "plain.json"))


def test_bytes():
    tokens = harness("bytes")
    assert (tokens.prefix, tokens.end, tokens.end_text) == (0, 0, "\0")
    assert tokens.encode("aé") == [97, 195, 169]
    assert tokens.encode("aé", add_special_tokens=True) == [97, 195, 169]
    assert tokens.decode([97, 195, 169]) == "aé"
