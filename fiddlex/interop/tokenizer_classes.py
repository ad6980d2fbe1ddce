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
_PLAIN = ("PreTrainedTokenizer", "TokenizersBackend")  # the classes that use `tokenizer.json` as it is
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
    """A tokenizer of a folder's vocabulary with the tokens that the folder's other files add and describe."""
    ids = {name: i for name, i in _object(folder / "added_tokens.json").items() if type(i) is int}
    described = {name: AddedToken(name, normalized=True) for name in ids}
    for i, token in _decoder(class_options(folder)).items():
        described[token.content], ids[token.content] = token, i
    for name in sorted(ids, key=lambda name: ids[name]):
        (made.add_special_tokens if described[name].special else made.add_tokens)([described[name]])
    wrong = [name for name in ids if made.token_to_id(name) != ids[name]]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is token {made.token_to_id(wrong[0])}, and by the added tokens {ids[wrong[0]]}")
    named = {token.content: token for token in _special_tokens(named_tokens(folder))}
    made.add_special_tokens([token for name, token in named.items() if name not in ids])
    return made


def with_ends(made: Tokenizer, folder: Path) -> Tokenizer:
    """What `with_tokens` made of GPT-2's or Qwen2's files, with the token that ends a text and those around a text."""
    kind = built_class(folder) or "GPT2Tokenizer"
    decoder = {token.content for token in _decoder(class_options(folder)).values()}
    described = decoder if kind == "Qwen2Tokenizer" else _added(made)  # Qwen2 takes no other description of it
    if made.token_to_id(_END_OF_TEXT) is not None and _END_OF_TEXT not in described:
        made.add_special_tokens([_END_OF_TEXT])
    begin, end = _around(named_tokens(folder), kind, made)
    if begin or end:
        template = [*begin, "$A", *end]
        known = [(text, made.token_to_id(text)) for text in {*begin, *end}]
        made.post_processor = processors.TemplateProcessing(single=template, special_tokens=known)
    return made


def differences(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Why transformers 5 may make other ids of some texts than the tokenizer of a folder: phrases for a message."""
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
    elif kind is not None and not as_it_is and kind not in _PLAIN:
        found.append(f"{kind} may put a normalizer and a pre-tokenizer of its own in place of the file's")
    added = _added(tokenizer)
    specials = {token.content for token in _special_tokens(said)}
    if new := sorted(text for text in specials if tokenizer.token_to_id(text) is None):
        found.append(f"tokenizer_config.json adds {', '.join(map(repr, new))}")
    decoder = {token.content: token for token in _decoder(said).values()}
    if other := sorted(name for name, token in decoder.items() if _matching(token) != _matching(added.get(name))):
        found.append(f"added_tokens_decoder describes {', '.join(map(repr, other))} otherwise")
    if said.get("split_special_tokens"):
        found.append("split_special_tokens=True takes special tokens in a text apart")
    return found


def named_tokens(folder: Path) -> Json:
    """What `special_tokens_map.json` and `tokenizer_config.json`, which comes first, say of a folder's tokens."""
    return _object(folder / "special_tokens_map.json") | class_options(folder)


def _special_tokens(named: Json) -> list[AddedToken]:
    """The special tokens that `tokenizer_config.json` or `special_tokens_map.json` names."""
    lists = [named.get(f"{kind}_special_tokens") for kind in ("additional", "extra")]
    tokens = [named.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")]
    tokens += [token for each in lists if isinstance(each, list) for token in each]
    return [_token(token, special=True) for token in tokens if text_of(token)]


def _decoder(said: Json) -> dict[int, AddedToken]:
    """The tokens of `added_tokens_decoder` by their ids."""
    return {int(i): _token(token) for i, token in (said.get("added_tokens_decoder") or {}).items()}


def _token(said: Any, **options: bool) -> AddedToken:
    """A token from its text, or from an object that describes it."""
    fields: Json = {"content": said} if isinstance(said, str) else {key: said[key] for key in said if key != "__type"}
    return AddedToken(**fields | options)


def _added(tokenizer: Tokenizer) -> dict[str, AddedToken]:
    return {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}


def _matching(token: AddedToken | None) -> Any:
    """What decides where a token is found in a text."""
    return token and (token.single_word, token.lstrip, token.rstrip, token.normalized)


def _around(named: Json, kind: str, made: Tokenizer) -> list[list[str]]:
    """The tokens before and after a text by `add_bos_token` and `add_eos_token`."""
    around = []
    for name in ("bos", "eos"):
        default = None if (kind, name) == ("Qwen2Tokenizer", "bos") else _END_OF_TEXT
        text = text_of(named.get(f"{name}_token", default))
        added = named.get(f"add_{name}_token") is True and text is not None and made.token_to_id(text) is not None
        around.append([text] if added and text else [])
    return around


def _comparable(step: Any) -> Any:
    """A step of `tokenizer.json` without `trim_offsets`, which changes no id."""
    if isinstance(step, dict):
        return {key: _comparable(value) for key, value in step.items() if key != "trim_offsets"}
    return [_comparable(each) for each in step] if isinstance(step, list) else step


def text_of(token: Any) -> str | None:
    """The text of a token that is named by it, or described; None: there is none."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _object(path: Path) -> Json:
    """The object in a file, empty without the file."""
    try:
        return read_object(path) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Copy it again.") from error
