"""From `DataConfig` to two streams of tokens, one to train on and one held out.

Invariant: no token of the held-out stream is in the training stream. Several documents are split by document, and the
document's name alone decides its side, so that adding files moves no other file to the other side. Of a single text or
token file the last share is held out. If `data.eval_source` is set, or a token folder has a `val.bin`, all of that is
held out instead.

Of several processes the first alone reads and tokenizes text, and all map the tokens from a file
(`fiddlex.data.token_cache`).
"""

import contextlib
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

import fiddlex
from fiddlex.cluster import processes
from fiddlex.config import DataConfig
from fiddlex.config.values.source import is_megatron, kind_of
from fiddlex.data.array_records import read_array_records
from fiddlex.data.documents import Document, file_states, read_stdlib, read_text
from fiddlex.data.huggingface_datasets import read_dataset
from fiddlex.data.megatron.source import whole_stream
from fiddlex.data.text_rows import TextRows, evaluation_split, read_documents, training_split
from fiddlex.data.token_buffer import TokenBuffer
from fiddlex.data.token_cache import cached_streams
from fiddlex.data.token_files import open_token_file
from fiddlex.data.token_stream import TokenStream
from fiddlex.data.tokenizers import ByteTokenizer, Tokenizer, make_tokenizer, tokenizer_digest, warn_of_unknown
from fiddlex.errors import DataError
from fiddlex.files.places import absolute
from fiddlex.terminal.readable import counted

_ENCODED_AT_ONCE = 256  # documents; limits the memory of waiting texts and of ids not yet in the smallest dtype
_ROW_READERS = {"hf": read_dataset, "array_record": read_array_records}

Encode = Callable[[Iterable[Document]], TokenStream]


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """What a run trains on and is evaluated on."""

    source: str  # `data.source`
    train: TokenStream
    heldout: TokenStream  # empty when nothing is held out
    # The one that made the tokens; None for token files whose tokenizer the config does not name.
    tokenizer: Tokenizer | None

    def fingerprint(self) -> str:
        return self.train.fingerprint()

    def describe(self) -> str:
        """A line for the log: 'stdlib: 231 files, 6.77 MiB, … for training; 14 files, 391.2 KiB, … held out'."""
        heldout = f"{self.heldout.describe()} held out" if len(self.heldout) else "nothing held out"
        return f"{self.source}: {self.train.describe()} for training; {heldout}"


def load_corpus(config: DataConfig, *, vocab_size: int, seq_len: int, shared: Path | None = None) -> Corpus:
    """Reads the sources that `config` names.

    Args:
      config: the data section.
      vocab_size: `model.vocab_size`; every token must be below it.
      seq_len: `model.seq_len`; the data must have at least one training example of this length.
      shared: a folder in which several processes keep the tokens of text if `data.cache` names none; without either,
        each process tokenizes for itself.

    Raises:
      ConfigError: when a field of `config` is out of its range.
      DataError: when data is missing, unreadable, empty, too short, or outside the vocabulary.
    """
    config.validate()
    tokenizer = corpus_tokenizer(config, vocab_size)
    fraction = 0.0 if config.eval_source else config.eval_fraction
    with reading("data.source", config.source):
        train, heldout = _load(
            config.source, config, fraction=fraction, tokenizer=tokenizer, vocab_size=vocab_size, shared=shared
        )
    if config.eval_source:
        heldout = load_heldout(config, tokenizer, vocab_size=vocab_size, shared=shared)
    if tokenizer is not None and processes.is_first():
        for source, stream in ((config.source, train), (config.eval_source or config.source, heldout)):
            if stream.num_bytes is not None:  # a token file was made earlier, and may be too long to read
                warn_of_unknown(stream.tokens, tokenizer, source)
    if len(train) < seq_len + 1:
        raise DataError(
            f"data.source={config.source!r} has {counted(len(train), 'token')} for training, and one example takes "
            f"{f'model.seq_len+1={seq_len + 1}' if seq_len > 1 else 'at least 2'}. Use more data, a smaller "
            f"data.eval_fraction (now {config.eval_fraction}) or a smaller model.seq_len."
        )
    _check_heldout(config, heldout)
    return Corpus(source=config.source, train=train, heldout=heldout, tokenizer=tokenizer)


def _check_heldout(config: DataConfig, heldout: TokenStream) -> None:
    if len(heldout) < 2 and (config.eval_source or config.eval_fraction):
        raise DataError(
            f"{config.eval_source or config.source!r} has {len(heldout)} held-out tokens, and an evaluation takes at "
            f"least 2. Use more data, set data.eval_source, a larger data.eval_fraction (now {config.eval_fraction}), "
            "or data.eval_fraction=0 to hold nothing out."
        )


def split_documents(documents: Sequence[Document], *, fraction: float) -> tuple[list[Document], list[Document]]:
    """Splits documents: one is held out when the SHA-256 of its name, as a number from 0 to 1, is below `fraction`.

    Where `fraction` is above 0, two or more documents give at least one to each side, if need be the one whose hash is
    nearest to that side. Names of documents are distinct. Both sides, to train on and held out, keep the order.
    """
    heldout = held_out((document.name for document in documents), fraction=fraction)
    sides = list[Document](), list[Document]()
    for document, side in zip(documents, heldout.tolist(), strict=True):
        sides[side].append(document)
    return sides


def held_out(names: Iterable[str], *, fraction: float) -> np.ndarray:
    """Which documents `split_documents` holds out, by their distinct names: bool[documents]."""
    hashes = np.fromiter(map(_hash01, names), np.float64)
    chosen = hashes < fraction
    if len(chosen) > 1 and fraction:  # choosing the lowest hash changes nothing unless none is held out
        chosen[np.argmax(hashes) if chosen.all() else np.argmin(hashes)] = not chosen.all()
    return chosen


def encode_documents(
    documents: Iterable[Document], tokenizer: Tokenizer, progress: Callable[[int], None] = lambda made: None
) -> TokenStream:
    """Concatenates the tokens of `documents`, with the tokenizer's separator between them, in the smallest dtype.

    Some documents at a time are in memory, and tokens beyond those that `TokenBuffer` holds are in a temporary file.
    `progress` is called with the number of tokens made since its last call.
    """
    tokens, separator = TokenBuffer(np.min_scalar_type(tokenizer.vocab_size - 1)), tokenizer.separator
    num_bytes = num_documents = 0
    waiting = iter(documents)
    while some := list(itertools.islice(waiting, _ENCODED_AT_ONCE)):
        for document, ids in zip(some, tokenizer.encode_batch([each.text for each in some]), strict=True):
            if num_documents and separator is not None:
                tokens.append(np.array([separator]))
            tokens.append(ids)
            progress(len(ids))
            num_documents += 1
            num_bytes += len(document.text.encode("utf-8"))
    return TokenStream(tokens.joined(), num_bytes=num_bytes, num_documents=num_documents, separator=separator)


@contextlib.contextmanager
def reading(field: str, source: str) -> Iterator[None]:
    """Turns a DataError or OSError of its block into a DataError that begins with the config's `field`."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{field}: {error}") from error
    except OSError as error:
        raise DataError(
            f"{field}: cannot read {error.filename or source}: {error.strerror or error}. Check the path and its "
            "permissions."
        ) from error


def corpus_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer | None:
    """The tokenizer of the run, or None when the tokens come from files and their tokenizer is unknown."""
    if kind_of(config.source).tokens and config.tokenizer == "bytes" and vocab_size != ByteTokenizer.vocab_size:
        return None  # 'bytes' is the default of the config, and these tokens are not bytes
    return text_tokenizer(config, vocab_size)


def text_tokenizer(config: DataConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer for text; raises DataError when it has more tokens than the model."""
    tokenizer = make_tokenizer(config.tokenizer)
    if tokenizer.vocab_size > vocab_size:
        raise DataError(
            f"data.tokenizer={config.tokenizer!r} has {tokenizer.vocab_size} tokens, more than "
            f"model.vocab_size={vocab_size}: the model has no embedding for the rest. "
            f"Set model.vocab_size={tokenizer.vocab_size}."
        )
    return tokenizer


def load_heldout(
    config: DataConfig, tokenizer: Tokenizer | None, *, vocab_size: int, shared: Path | None = None
) -> TokenStream:
    """All of `data.eval_source`; for a token folder, its val.bin; `shared` is as in `load_corpus`."""
    with reading("data.eval_source", config.eval_source):
        heldout = _load_eval_source(config, tokenizer, vocab_size=vocab_size, shared=shared)
    _check_heldout(config, heldout)
    return heldout


def _load_eval_source(
    config: DataConfig, tokenizer: Tokenizer | None, *, vocab_size: int, shared: Path | None
) -> TokenStream:
    """As `load_heldout`; of several splits, the one to evaluate on."""
    kind, _, path = config.eval_source.partition(":")
    folder = absolute(path)
    if kind == "tokens" and folder.is_dir():
        val = open_token_file(folder / "val.bin", dtype=config.token_dtype, vocab_size=vocab_size)
        return TokenStream(val, separator=tokenizer.separator if tokenizer else None)
    if kind in _ROW_READERS:
        tokenizer = _known(tokenizer, config.eval_source, config, vocab_size)

        def read(encode: Encode) -> list[TokenStream]:
            splits = _ROW_READERS[kind](folder, config.text_column)
            return [_encode_rows(evaluation_split(splits, config.eval_source), encode)]

        return _tokenized(config.eval_source, config, {"split": "evaluation"}, tokenizer, read=read, shared=shared)[0]
    return _load(config.eval_source, config, fraction=0.0, tokenizer=tokenizer, vocab_size=vocab_size, shared=shared)[0]


def _load(
    source: str,
    config: DataConfig,
    *,
    fraction: float,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    shared: Path | None,
) -> tuple[TokenStream, TokenStream]:
    """The training and held-out streams of one source."""
    kind, _, path = source.partition(":")
    if is_megatron(source):  # of data.eval_source, of which nothing is held out
        stream = whole_stream(source, vocab_size=vocab_size)
        return stream, dataclasses.replace(stream, tokens=stream.tokens[:0], documents=None)
    if kind == "tokens":
        train, heldout = _load_tokens(absolute(path), config.token_dtype, fraction=fraction, vocab_size=vocab_size)
        separator = tokenizer.separator if tokenizer else None
        return TokenStream(train, separator=separator), TokenStream(heldout, separator=separator)
    tokenizer = _known(tokenizer, source, config, vocab_size)

    def read(encode: Encode) -> Sequence[TokenStream]:
        if kind in _ROW_READERS:
            return _load_rows(kind, absolute(path), config, fraction=fraction, encode=encode)
        documents = read_stdlib() if kind == "stdlib" else read_text(absolute(path))
        return _load_documents(documents, fraction=fraction, encode=encode)

    first, last = _tokenized(source, config, {"fraction": fraction}, tokenizer, read=read, shared=shared)
    return first, last


def _tokenized(
    source: str,
    config: DataConfig,
    part: dict[str, Any],
    tokenizer: Tokenizer,
    *,
    read: Callable[[Encode], Sequence[TokenStream]],
    shared: Path | None,
) -> Sequence[TokenStream]:
    """The streams of text that `read` returns, from the cache if the run has one.

    `part` decides which documents of the source are in which stream. `read` encodes with the function that it gets.
    """
    folder = absolute(config.cache) if config.cache else shared if processes.num_processes() > 1 else None
    if folder is None:
        return read(lambda documents: encode_documents(documents, tokenizer))
    kind, _, path = source.partition(":")

    def made_from() -> dict[str, Any]:
        return {
            "source": [kind, str(absolute(path))],
            "files": file_states(absolute(path) if path else None),
            "part": part,
            "text_column": config.text_column if kind in _ROW_READERS else "",
            "tokenizer": tokenizer_digest(config.tokenizer),
            "versions": [fiddlex.__version__, tokenizers.__version__],
        }

    return cached_streams(
        folder,
        source,
        made_from=made_from,
        read=lambda progress: read(lambda documents: encode_documents(documents, tokenizer, progress)),
    )


def _load_documents(
    documents: Sequence[Document], *, fraction: float, encode: Encode
) -> tuple[TokenStream, TokenStream]:
    """A single text cut before its held-out share; several split by document."""
    if len(documents) == 1 and fraction:
        text, num_heldout = documents[0].text, round(len(documents[0].text) * fraction)
        parts = text[: len(text) - num_heldout], text[len(text) - num_heldout :]
        streams = [encode([Document(documents[0].name, part)]) for part in parts]
        first, last = (dataclasses.replace(stream, num_documents=None) for stream in streams)
        return first, last
    train_documents, heldout_documents = split_documents(documents, fraction=fraction)
    return encode(train_documents), encode(heldout_documents)


def _load_rows(
    kind: str, path: Path, config: DataConfig, *, fraction: float, encode: Encode
) -> tuple[TokenStream, TokenStream]:
    """The split to train on and `validation`; without the latter, the former by document."""
    splits = _ROW_READERS[kind](path, config.text_column)
    parts = training_split(splits, f"{kind}:{path}")
    if fraction and len(splits) > 1 and "validation" in splits:
        return _encode_rows(parts, encode), _encode_rows(splits["validation"], encode)
    heldout = held_out((name for part in parts for name in part.names()), fraction=fraction)
    return _encode_rows(parts, encode, ~heldout), _encode_rows(parts, encode, heldout)


def _encode_rows(parts: Sequence[TextRows], encode: Encode, keep: np.ndarray | None = None) -> TokenStream:
    """The tokens of the rows for which `keep`, bool[rows of all parts], is True; of all rows without it."""
    if keep is None:
        keep = np.ones(sum(part.num_rows for part in parts), bool)
    return dataclasses.replace(encode(read_documents(parts, keep)), unit="row")


def _known(tokenizer: Tokenizer | None, source: str, config: DataConfig, vocab_size: int) -> Tokenizer:
    """The tokenizer; raises DataError when it is unknown, as that of `data.source` may be."""
    if tokenizer is None:
        raise DataError(
            f"{source!r} is text, and the tokenizer of data.source={config.source!r} is not known "
            f"(model.vocab_size={vocab_size}, not the 256 of bytes). Set data.tokenizer to the JSON file of the "
            "tokenizer that made those tokens, or give tokens:PATH for evaluation too."
        )
    return tokenizer


def _load_tokens(path: Path, dtype: str, *, fraction: float, vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """A token file cut before its held-out share; of a folder, train.bin and val.bin, or train.bin cut when alone."""
    if path.is_dir() and (path / "val.bin").is_file():
        train, val = (
            open_token_file(path / name, dtype=dtype, vocab_size=vocab_size) for name in ("train.bin", "val.bin")
        )
        return train, val
    tokens = open_token_file(path / "train.bin" if path.is_dir() else path, dtype=dtype, vocab_size=vocab_size)
    cut = len(tokens) - round(len(tokens) * fraction)
    return tokens[:cut], tokens[cut:]


def _hash01(name: str) -> float:
    return int.from_bytes(hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest()[:6]) / 2**48
