"""Trains a byte-level BPE, as GPT-2's (Radford et al. 2019, section 2.2), on the input of a preparation."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from fiddlex.data.preparation.inputs import Piece, read_piece
from fiddlex.data.tokenizers import END_OF_TEXT
from fiddlex.errors import ConfigError, DataError
from fiddlex.files.whole_files import write_whole

LEAST_TOKENS = 257  # 256 bytes and the end of text
MOST_TOKENS = 2**20
_MOST_BYTES = 2**30  # of text; each piece gives the first texts of its share


def train_tokenizer(pieces: Sequence[Piece], file: Path, *, num_tokens: int, json_key: str) -> int:
    """Trains a tokenizer and writes it to `file`, atomically.

    Returns:
      The number of tokens; less than `num_tokens` where the text has no more merges.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    seen = [0]
    tokenizer.train_from_iterator(_texts(pieces, json_key, seen), trainer)
    if not seen[0]:
        raise DataError("--train_tokenizer: the input has no text to train on.")
    write_whole(file, tokenizer.to_str(pretty=True))
    return tokenizer.get_vocab_size()


def check_size(num_tokens: int) -> None:
    if not LEAST_TOKENS <= num_tokens <= MOST_TOKENS:
        raise ConfigError(
            f"--train_tokenizer={num_tokens} must be from {LEAST_TOKENS} (256 bytes and {END_OF_TEXT}) to "
            f"{MOST_TOKENS:,}."
        )


def _texts(pieces: Sequence[Piece], json_key: str, seen: list[int]) -> Iterator[str]:
    """The texts to train on; counts them in `seen`.

    A piece's share is its part of the input's bytes. The share is counted in bytes of text, of which compressed files
    have more.
    """
    share = _MOST_BYTES / max(1, sum(piece.num_bytes for piece in pieces))
    for piece in pieces:
        left = share * piece.num_bytes
        for text in read_piece(piece, json_key):
            if left <= 0:
                break
            if text:
                seen[0] += 1
                left -= len(text.encode())
                yield text
