"""The tokenizer of a folder of transformers: made of the files of GPT-2 and Qwen2, and held against transformers'."""

import json
import pathlib
import resource
from typing import Any

import pytest
import tokenizers

from fiddlex.errors import CheckpointError
from fiddlex.interop.folder_tokenizer import copy_tokenizer, read_tokenizer


def write_gpt2s_vocabulary(folder: pathlib.Path, **said: Any) -> tokenizers.ByteLevelBPETokenizer:
    """Writes `vocab.json` and `merges.txt` of a new tokenizer, and `tokenizer_config.json`; returns the tokenizer."""
    folder.mkdir()
    trained = tokenizers.ByteLevelBPETokenizer()
    texts = ["import os", "def f(): return 1234"] * 3
    trained.train_from_iterator(texts, vocab_size=290, special_tokens=["<|endoftext|>"])
    trained.save_model(str(folder))
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    return trained


def test_gpt2s_vocabulary_becomes_a_tokenizer(tmp_path: pathlib.Path) -> None:
    trained = write_gpt2s_vocabulary(tmp_path / "hf")
    (tmp_path / "run").mkdir()
    path = copy_tokenizer(tmp_path / "hf", tmp_path / "run")
    made = tokenizers.Tokenizer.from_file(str(path))
    for text in ("import os", " naïve\n\n"):
        assert made.encode(text).ids == trained.encode(text).ids
        assert made.decode(made.encode(text).ids) == text
    path.unlink()
    limits, most = resource.getrlimit(resource.RLIMIT_FSIZE), (tmp_path / "hf" / "vocab.json").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, limits[1]))  # as a full disk, it ends the write of a larger file
    try:
        with pytest.raises(OSError, match=rf"File too large: '{path}'"):
            copy_tokenizer(tmp_path / "hf", tmp_path / "run")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    vocabulary = json.loads((tmp_path / "hf" / "vocab.json").read_text())
    for given, message in (
        ({**vocabulary, "b": vocabulary["a"]}, "gives the id 65 to several tokens"),
        ({}, "has no to"),
        ({**vocabulary, "b": 2**32 + vocabulary["b"]}, "has ids that are no numbers of tokens"),
        (json.dumps(vocabulary).replace('"b":', '"a":'), r"and merges\.txt are no .*\(it gives the key 'a' twice\)"),
    ):
        (tmp_path / "hf" / "vocab.json").write_text(given if isinstance(given, str) else json.dumps(given))
        with pytest.raises(CheckpointError, match=rf"vocab\.json {message}"):
            copy_tokenizer(tmp_path / "hf", tmp_path / "run")
    (tmp_path / "hf" / "merges.txt").write_text("no merge at all here\n")
    with pytest.raises(CheckpointError, match="are no byte-pair encoding"):
        copy_tokenizer(tmp_path / "hf", tmp_path / "run")


def test_options_of_gpt2s_vocabulary(tmp_path: pathlib.Path) -> None:
    """The ids are those of transformers 5.24, where all these folders were read too."""
    trained = write_gpt2s_vocabulary(tmp_path / "hf", add_prefix_space=True, add_bos_token=True, pad_token="<X>")
    made = read_tokenizer(tmp_path / "hf")
    assert made is not None
    assert made.encode("import os<X>").ids == [0, *trained.encode(" import os").ids, trained.get_vocab_size()]
    number = trained.get_vocab_size()
    token = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    for name, described in (
        ("added_tokens.json", {"<X>": number, "<Y>": number + 1}),
        ("tokenizer_config.json", {"added_tokens_decoder": {str(number + 1): token | {"content": "<Y>"}}}),
    ):
        (tmp_path / "hf" / "tokenizer_config.json").write_text("{}")
        (tmp_path / "hf" / name).write_text(json.dumps(described))
        assert (made := read_tokenizer(tmp_path / "hf")) is not None
        assert made.encode("1<Y>").ids == [*trained.encode("1").ids, number + 1]
    (tmp_path / "hf" / "added_tokens.json").write_text(json.dumps({"<Y>": number + 7}))
    with pytest.raises(CheckpointError, match=rf"'<Y>' is token {number}, and by the added tokens {number + 1}"):
        read_tokenizer(tmp_path / "hf")


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_qwen2s_vocabulary_has_other_words_than_gpt2s(model: str, tmp_path: pathlib.Path) -> None:
    trained = write_gpt2s_vocabulary(tmp_path / "hf")
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": model}))
    assert (made := read_tokenizer(tmp_path / "hf")) is not None
    assert made.encode("1234").ids == [trained.token_to_id(digit) for digit in "1234"]  # a digit is a word
    assert made.encode("e\u0301").ids == trained.encode("\u00e9").ids


@pytest.mark.parametrize(("kind", "rest"), [("GPT2Tokenizer", "1"), ("Qwen2Tokenizer", " 1")])
@pytest.mark.parametrize("file", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_special_token_takes_the_space_that_its_description_gives_it(
    kind: str, rest: str, file: str, tmp_path: pathlib.Path
) -> None:
    """As in transformers 5.24, where Qwen2 does not heed what describes the end of a text."""
    trained = write_gpt2s_vocabulary(folder := tmp_path / "hf")
    (folder / "config.json").write_text(json.dumps({"tokenizer_class": kind}))
    (folder / file).write_text(json.dumps({"eos_token": {"content": "<|endoftext|>", "rstrip": True}}))
    assert (made := read_tokenizer(folder)) is not None
    assert made.encode("1<|endoftext|> 1").ids == [*trained.encode("1").ids, 0, *trained.encode(rest).ids]


WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "na", "##ive", "[new]", "<c>", "<u>"]
PLAIN = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}


@pytest.mark.parametrize(
    ("files", "ids"),
    [
        ({}, [2, 5, 1, 1, 1, 5, 1, 3]),
        ({"added_tokens.json": {"[new]": 7}}, [2, 5, 7, 5, 1, 3]),
        ({"tokenizer_config.json": {"additional_special_tokens": ["[new]"]}}, [2, 5, 7, 5, 1, 3]),
        (
            {"tokenizer_config.json": {"added_tokens_decoder": {"7": PLAIN | {"content": "[new]"}}}},
            [2, 5, 7, 5, 1, 3],
        ),
        (
            {"tokenizer_config.json": {"cls_token": "<c>"}, "special_tokens_map.json": {"unk_token": "<u>"}},
            [8, 5, 9, 9, 9, 5, 9, 3],
        ),
    ],
)
def test_berts_vocabulary_has_the_tokens_that_other_files_name(
    files: dict[str, Any], ids: list[int], tmp_path: pathlib.Path
) -> None:
    """The ids are those of transformers 5.24."""
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    for name, said in files.items():
        (tmp_path / name).write_text(json.dumps(said))
    assert (made := read_tokenizer(tmp_path)) is not None
    assert made.encode("na[new]na x").ids == ids


@pytest.mark.parametrize("words", [False, True])
@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (
            "tokenizer_config.json",
            '{"tokenizer_class": "RobertaTokenizer"}',
            "hf has no tokenizer.json, and tokenizer_class='RobertaTokenizer': fiddlex makes one from vocab.json and "
            "merges.txt for GPT2Tokenizer and Qwen2Tokenizer alone. Save tokenizer.json with transformers' save_pret",
        ),
        ("tokenizer_config.json", "[]", "hf/tokenizer_config.json cannot be read: it is not a JSON object. Copy it ag"),
        ("tokenizer_config.json", '{"a": ', "hf/tokenizer_config.json cannot be read: Expecting value"),
        ("added_tokens.json", '{"a": ', "hf/added_tokens.json cannot be read: Expecting value"),
        (
            "tokenizer_config.json",
            '{"do_lower_case": "x", "added_tokens_decoder": {"x": {"content": "<Y>"}}}',
            "hf: tokenizer_config.json, special_tokens_map.json or added_tokens.json does not fit its vocabulary (",
        ),
    ],
)
def test_the_file_that_spoils_a_tokenizer_is_told(
    name: str, text: str, message: str, words: bool, tmp_path: pathlib.Path
) -> None:
    write_gpt2s_vocabulary(tmp_path / "hf")
    if words:  # BERT's file, for which fiddlex does not read the class
        (tmp_path / "hf" / "merges.txt").unlink()
        (tmp_path / "hf" / "vocab.txt").write_text("[UNK]\n[SEP]\n[CLS]\na\n")
    (tmp_path / "hf" / name).write_text(text)
    if words and "class" in text:
        assert read_tokenizer(tmp_path / "hf") is not None
        return
    with pytest.raises(CheckpointError) as error:
        read_tokenizer(tmp_path / "hf")
    assert message in str(error.value)


GPT2, QWEN2 = "GPT2Tokenizer", "Qwen2Tokenizer"


@pytest.mark.parametrize(
    ("model", "said", "lower", "found"),
    [
        ("gpt2", {"tokenizer_class": GPT2}, False, []),
        ("gpt2", {}, True, [f"{GPT2} puts another normalizer in place of the file's"]),
        ("llama", {"tokenizer_class": f"{GPT2}Fast"}, True, [f"{GPT2} puts another normalizer in place of the file's"]),
        ("llama", {}, True, []),
        ("llama", {"tokenizer_class": "LlamaTokenizer"}, True, []),  # bytes: transformers 5 takes the file as it is
        ("mistral", {"tokenizer_class": GPT2}, True, []),
        ("gpt2", {"tokenizer_class": "PreTrainedTokenizerFast"}, True, []),
        ("gpt2", {"tokenizer_class": "GemmaTokenizer"}, False, ["GemmaTokenizer may put a normalizer and a pre-tok"]),
        (
            "gpt2",
            {"added_tokens_decoder": {"0": {"content": "<|endoftext|>", "special": True, "rstrip": True}}},
            False,
            ["added_tokens_decoder describes '<|endoftext|>' otherwise"],
        ),
        ("qwen2", {}, False, [f"{QWEN2} puts another normalizer and pre_tokenizer in place of the file's"]),
        ("qwen3", {}, False, [f"{QWEN2} puts another normalizer and pre_tokenizer in place of the file's"]),
        ("gpt2", {"add_prefix_space": True}, False, [f"{GPT2} puts another pre_tokenizer in place of the file's"]),
        ("gpt2", {"add_bos_token": True, "bos_token": "<|endoftext|>"}, False, []),
        ("gpt2", {"pad_token": {"content": "<X>"}}, False, ["tokenizer_config.json adds '<X>'"]),
        ("gpt2", {"split_special_tokens": True}, False, ["split_special_tokens=True takes special tokens in a text"]),
        ("gpt2", {"tokenizer_class": "BertTokenizer", "do_lower_case": "x"}, False, ["what else its files say cannot"]),
    ],
)
def test_other_ids_than_those_of_transformers_are_told(
    model: str,
    said: dict[str, Any],
    lower: bool,
    found: list[str],
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In the cases with differences, transformers 5.24 made other ids of a text."""
    write_gpt2s_vocabulary(tmp_path / "hf", **said)
    (tmp_path / "hf" / "config.json").write_text(json.dumps({"model_type": model}))
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE.from_file(str(tmp_path / "hf" / "vocab.json"), str(tmp_path / "hf" / "merges.txt"))
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.normalizer = tokenizers.normalizers.Lowercase() if lower else None
    made.add_special_tokens(["<|endoftext|>"])
    made.save(str(tmp_path / "hf" / "tokenizer.json"))
    (tmp_path / "run").mkdir()
    copy_tokenizer(tmp_path / "hf", tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.json").read_bytes() == (tmp_path / "hf" / "tokenizer.json").read_bytes()
    assert [record.getMessage().split("as it is: ")[1][: len(found[0])] for record in caplog.records] == found
