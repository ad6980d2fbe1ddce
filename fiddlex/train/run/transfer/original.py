"""What a workdir keeps of the folder of transformers that its weights came from: `huggingface/` in the workdir.

It has the folder's own `config.json` and the files of its tokenizer. A conversion back starts from them, so that fields
and files that fiddlex does not use are not lost: token ids of the end of text, chat templates, generation settings.
"""

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from fiddlex.config import Config
from fiddlex.data.named_tokens import check_token_ids
from fiddlex.data.tokenizers import END_OF_TEXT, ByteTokenizer, Tokenizer, make_tokenizer
from fiddlex.errors import CheckpointError, ConfigError
from fiddlex.files.places import absolute
from fiddlex.files.whole_files import write_whole
from fiddlex.interop.architectures import settings_of
from fiddlex.interop.folder import described, folder_of, read_json
from fiddlex.interop.folder_tokenizer import copy_own_file, copy_tokenizer, copy_tokenizer_files
from fiddlex.train.run.workdir import ORIGINAL, OWN_TOKENIZER, writing

KIND = ("family", "task", "qk_norm", "qkv_bias")  # fields of a model that tell its class in transformers


def keep_original(folder: Path, workdir: Path) -> Path | None:
    """Keeps `config.json` and tokenizer of a folder in a workdir; returns the path of the `tokenizer.json`, if any."""
    check_token_ids(folder)
    target = workdir / ORIGINAL
    target.mkdir()
    (target / "config.json").write_text(json.dumps(described(folder), indent=2) + "\n", encoding="utf-8")
    return copy_tokenizer(folder, target)


def inherit_original(source: str, workdir: Path) -> None:
    """Keeps in a workdir what the source of its weights, `train.init_from`, has of a folder of transformers."""
    with writing(workdir):
        shutil.rmtree(workdir / ORIGINAL, ignore_errors=True)  # of a start that was interrupted
        if folder := folder_of(source):
            keep_original(folder, workdir)
        elif (Path(source) / ORIGINAL).is_dir():
            (workdir / ORIGINAL).mkdir()
            copy_own_file("config.json", Path(source) / ORIGINAL, workdir / ORIGINAL)
            copy_tokenizer_files(Path(source) / ORIGINAL, workdir / ORIGINAL)


def original_dtype(workdir: Path) -> str | None:
    """The dtype of the tensors of the folder that a workdir's weights came from; None where it is not known."""
    if not (workdir / ORIGINAL / "config.json").exists():
        return None
    fields = read_json(workdir / ORIGINAL)
    named = fields.get("dtype", fields.get("torch_dtype"))
    return named if isinstance(named, str) else None


def copy_description(workdir: Path, config: Config, folder: Path) -> None:
    """Copies the original `config.json` to a folder, if it describes a model of the kind of `config`."""
    with contextlib.suppress(ConfigError):
        if (workdir / ORIGINAL / "config.json").exists():
            model = settings_of(read_json(workdir / ORIGINAL))["model"]
            if all(getattr(model, name) == getattr(config.model, name) for name in KIND):
                copy_own_file("config.json", workdir / ORIGINAL, folder)


def write_tokenizer(config: Config, workdir: Path, folder: Path) -> Tokenizer | None:
    """Writes the tokenizer of a run to a folder, with the other files of the original tokenizer if it is that one.

    The tokenizer of a decoder of bytes becomes a `tokenizer.json` in which byte b is token b, and token 0 ends a text.
    The result is None, and nothing is written, where the run's tokenizer is not known or has the special bytes of a
    BERT.
    """
    spec, own = config.data.tokenizer, workdir / OWN_TOKENIZER
    target = folder / "tokenizer.json"
    if spec == "bytes" and (config.model.task != "lm" or config.model.vocab_size != ByteTokenizer.vocab_size):
        return None
    if spec == "bytes":
        write_whole(target, _byte_tokenizer().to_str(pretty=True))
        return make_tokenizer(str(target))
    source = absolute(spec)
    if not source.is_file():
        raise CheckpointError(
            f"data.tokenizer={spec} of --source={workdir} is not there. Put it back, or name it with "
            "--config.data.tokenizer."
        )
    if own.is_file() and own.read_bytes() == source.read_bytes():
        copy_tokenizer(own.parent, folder)
    else:
        shutil.copyfile(source, target)
    return make_tokenizer(str(target))


def complete_description(workdir: Path, folder: Path, tokenizer: Tokenizer | None) -> None:
    """Completes `config.json` of a folder that was written, and tells transformers the special tokens.

    Where the weights came from a folder, the longest sequence stays what it was there, as rotary positions have no
    table, even if the run's sequences were shorter. Otherwise, for a decoder, the tokenizer's separator is named as the
    token that begins and ends a text; without these fields, transformers takes ids of another vocabulary for them.
    """
    path, table = folder / "config.json", folder / "tokenizer_config.json"
    fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    before = read_json(workdir / ORIGINAL) if (workdir / ORIGINAL / "config.json").exists() else None
    longest = "max_position_embeddings"
    if before is None and fields["model_type"] != "bert":
        separator = tokenizer.separator if tokenizer else None
        fields |= dict.fromkeys(("bos_token_id", "eos_token_id"), separator) | {"pad_token_id": None}
    elif (
        before is not None
        and ("rope_parameters" in fields or "rope_theta" in fields)
        and type(before.get(longest)) is int
        and before[longest] > fields[longest]
    ):
        fields[longest] = before[longest]
    path.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if tokenizer is not None and not table.exists():
        known: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if tokenizer.separator is not None:
            text = tokenizer.decode([tokenizer.separator])
            known |= {"bos_token": text, "eos_token": text}
        table.write_text(json.dumps(known, indent=2) + "\n", encoding="utf-8")


def _byte_tokenizer() -> tokenizers.Tokenizer:
    """Bytes as a tokenizer of the `tokenizers` library; no text has byte 0, which is the separator."""
    characters = _byte_characters()
    vocabulary = {END_OF_TEXT: 0} | {characters[byte]: byte for byte in range(1, 256)}
    made = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([END_OF_TEXT])
    return made


def _byte_characters() -> list[str]:
    """How byte-level tokenizers write bytes (Radford et al. 2019): printable Latin-1 as is, others from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]
