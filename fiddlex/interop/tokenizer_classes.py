"""The classes of tokenizers in transformers 5, and what they make of the files of a folder.

Classes named here take the vocabulary of a folder's files, `tokenizer.json` included, and put a normalizer and a
pre-tokenizer of their own before it. All others use `tokenizer.json` as it is. (transformers 5.24.)
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

from fiddlex.errors import CheckpointError
from fiddlex.files.small_files import read_object
from fiddlex.interop.options import Json

_END_OF_TEXT = "<|endoftext|>"  # which GPT-2 and Qwen2 take for the end, if no other is named
_OF_MODELS = {  # where no file names one
    "gpt2": "GPT2Tokenizer",
    "qwen2": "Qwen2Tokenizer",
    "qwen3": "Qwen2Tokenizer",
    "bert": "BertTokenizer",
}
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def class_options(folder: Path) -> Json:
    """What `tokenizer_config.json` of a folder says; empty without it."""
    return _object(folder / "tokenizer_config.json")


def built_class(folder: Path) -> str | None:
    """The class that a folder names for its tokenizer, or that its model's class has; None: no class is known."""
    config = _object(folder / "config.json")
    named = class_options(folder).get("tokenizer_class") or config.get("tokenizer_class")
    model = config.get("model_type")
    found = named if isinstance(named, str) else _OF_MODELS.get(model) if isinstance(model, str) else None
    return None if found is None else found.removesuffix("Fast")


def pipeline(kind: str, said: Json) -> tuple[Any, Any] | None:
    """The normalizer (or None) and the pre-tokenizer of a class with its options; None: those of `tokenizer.json`."""
    space = said.get("add_prefix_space")
    match kind:
        case "GPT2Tokenizer":
            return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(space))
        case "Qwen2Tokenizer":
            words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), "isolated")
            bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=bool(space), use_regex=False)
            return normalizers.NFC(), pre_tokenizers.Sequence([words, bytes_of])
        case "LlamaTokenizer":
            scheme = "never" if space is False else "always" if said.get("legacy") else "first"
            return None, pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        case "BertTokenizer":
            normalizer = normalizers.BertNormalizer(
                lowercase=said.get("do_lower_case", True),
                strip_accents=said.get("strip_accents"),
                handle_chinese_chars=said.get("tokenize_chinese_chars", True),
            )
            return normalizer, pre_tokenizers.BertPreTokenizer()
    return None


def with_tokens(made: Tokenizer, folder: Path) -> Tokenizer:
    """A tokenizer of GPT-2's or Qwen2's files with the tokens that the folder's other files add, and with its ends."""
    said = class_options(folder)
    named = _object(folder / "special_tokens_map.json") | said
    ids = {name: i for name, i in _object(folder / "added_tokens.json").items() if type(i) is int}
    described = {name: AddedToken(name, normalized=True) for name in ids}
    for i, token in (said.get("added_tokens_decoder") or {}).items():
        described[token["content"]] = AddedToken(**{key: token[key] for key in token if key != "__type"})
        ids[token["content"]] = int(i)
    for name in sorted(ids, key=lambda name: ids[name]):
        (made.add_special_tokens if described[name].special else made.add_tokens)([described[name]])
    wrong = [name for name in ids if made.token_to_id(name) != ids[name]]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is token {made.token_to_id(wrong[0])}, and by the added tokens {ids[wrong[0]]}")
    made.add_special_tokens(_special_texts(named))
    if made.token_to_id(_END_OF_TEXT) is not None:
        made.add_special_tokens([_END_OF_TEXT])
    begin, end = _around(named, built_class(folder) or "GPT2Tokenizer", made)
    if begin or end:
        template = [*begin, "$A", *end]
        known = [(text, made.token_to_id(text)) for text in {*begin, *end}]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return made


def differences(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Why transformers 5 makes other ids of some texts than the tokenizer of a folder: phrases for a message."""
    said, kind, found = class_options(folder), built_class(folder), list[str]()
    steps = json.loads(tokenizer.to_str())
    as_it_is = _object(folder / "config.json").get("model_type") == "mistral" or (
        kind == "LlamaTokenizer" and "ByteLevel" in json.dumps([steps["pre_tokenizer"], steps["decoder"]])
    )
    if kind is not None and not as_it_is and (own := pipeline(kind, said)):
        plain = Tokenizer(models.BPE())
        plain.normalizer, plain.pre_tokenizer = own
        theirs = json.loads(plain.to_str())
        parts = [
            name for name in ("normalizer", "pre_tokenizer") if _comparable(steps[name]) != _comparable(theirs[name])
        ]
        found += [f"{kind} puts another {' and '.join(parts)} in place of the file's"] if parts else []
    if new := [text for text in _special_texts(said) if tokenizer.token_to_id(text) is None]:
        found.append(f"tokenizer_config.json adds {', '.join(map(repr, new))}")
    if said.get("split_special_tokens"):
        found.append("split_special_tokens=True takes special tokens in a text apart")
    return found


def _special_texts(named: Json) -> list[str]:
    """The special tokens that `tokenizer_config.json` or `special_tokens_map.json` names."""
    lists = [named.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
    tokens = [named.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    tokens += [token for each in lists if isinstance(each, list) for token in each]
    return [text for text in map(_text, tokens) if text]


def _around(named: Json, kind: str, made: Tokenizer) -> list[list[str]]:
    """The tokens before and after a text by `add_bos_token` and `add_eos_token`."""
    around = []
    for name in ("bos", "eos"):
        default = None if (kind, name) == ("Qwen2Tokenizer", "bos") else _END_OF_TEXT
        text = _text(named.get(f"{name}_token", default))
        added = named.get(f"add_{name}_token") is True and text is not None and made.token_to_id(text) is not None
        around.append([text] if added and text else [])
    return around


def _comparable(step: Any) -> Any:
    """A step of `tokenizer.json` without `trim_offsets`, which changes no id."""
    if isinstance(step, dict):
        return {key: _comparable(value) for key, value in step.items() if key != "trim_offsets"}
    return [_comparable(each) for each in step] if isinstance(step, list) else step


def _text(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _object(path: Path) -> Json:
    """The object in a file, empty without the file."""
    try:
        return read_object(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
