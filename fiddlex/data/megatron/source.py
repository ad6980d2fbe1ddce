"""From `data.source=megatron:…` to what is trained on and what is held out.

Invariant: what `data.split` holds out or leaves out of a dataset is in no training example. For lm the split is by
sequence, as that of Megatron's GPTDataset, and for BERT's objectives by document, as that of its BERTDataset; files
that preprocess_data.py writes without --split-sentences have one sequence for each document.
"""

import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from fiddlex.config import DataConfig
from fiddlex.config.values.source import parse_source, parse_split
from fiddlex.data.megatron.index_file import IndexedTokens, open_indexed
from fiddlex.data.token_stream import TokenStream
from fiddlex.errors import DataError
from fiddlex.files.places import absolute
from fiddlex.terminal.readable import counted


@dataclasses.dataclass(frozen=True, eq=False)
class MegatronPart:
    """A dataset of a blend, and its split."""

    weight: Fraction  # in the blend
    data: IndexedTokens
    # Where the documents to train on, to hold out and to leave out begin; the last entry is the number of documents.
    edges: tuple[int, ...]
    by_sequence: bool  # whether the edges count sequences of the index in place of its documents

    @functools.cached_property
    def train(self) -> TokenStream:
        return self._stream(*self.edges[:2])

    @functools.cached_property
    def heldout(self) -> TokenStream:
        return self._stream(*self.edges[1:3])

    def describe(self) -> str:
        """'/data/a: 969 documents, 12,345 tokens for training; 30 documents, 345 tokens held out'."""
        train, heldout, unit = self.train, self.heldout, self.unit
        first, last, left = self.edges[1:]
        text = f"{self.data.prefix}: {counted(first, unit)}, {counted(len(train), 'token')} for training; "
        held = f"{counted(last - first, unit)}, {counted(len(heldout), 'token')} held out"
        text += held if len(heldout) else "nothing held out"
        return text + (f"; {counted(left - last, unit)} left out" if left > last else "")

    @property
    def unit(self) -> str:
        """What the edges count: a document, or where documents have several sequences or none, a sequence."""
        return "sequence" if self.by_sequence and len(self.data.lengths) != len(self.data.documents) - 1 else "document"

    def _stream(self, first: int, last: int) -> TokenStream:
        data = self.data
        sequences = (first, last) if self.by_sequence else data.documents[[first, last]].tolist()
        start, stop = (data.first_token(sequence) for sequence in sequences)
        bounds = None if self.by_sequence else data.bounds(first, last) - start
        return TokenStream(data.tokens[start:stop], documents=bounds)


@dataclasses.dataclass(frozen=True, eq=False)
class MegatronCorpus:
    """The datasets that a run trains on and is evaluated on."""

    source: str  # `data.source`
    parts: tuple[MegatronPart, ...]  # several in a blend

    @functools.cached_property
    def weights(self) -> list[Fraction]:
        total = sum(part.weight for part in self.parts)
        return [part.weight / total for part in self.parts]

    def fingerprint(self) -> str:
        """Identifies the tokens to train on, by samples of them, all boundaries of documents, and the weights."""
        facts = [
            f"{weight} {part.train.fingerprint()} {part.data.digest} {part.edges} {part.by_sequence}"
            for weight, part in zip(self.weights, self.parts, strict=True)
        ]
        tokens = sum(len(part.train) for part in self.parts)
        return f"{tokens}-{hashlib.sha256(chr(10).join(facts).encode()).hexdigest()[:16]}"

    def describe(self) -> str:
        if len(self.parts) == 1:
            return f"megatron:{self.parts[0].describe()}"
        lines = [f"  {float(w):.4g} of {part.describe()}" for w, part in zip(self.weights, self.parts, strict=True)]
        return "\n".join(["megatron, a blend:", *lines])


def load_megatron(config: DataConfig, *, vocab_size: int, seq_len: int, by_sequence: bool) -> MegatronCorpus:
    """Opens and splits the datasets that `data.source` names; with `data.eval_source` all documents are trained on.

    Samples of the tokens are checked here to be below `vocab_size`, and later each batch. Each dataset must have at
    least one training example of `seq_len`.
    """
    shares = (1.0, 0.0, 0.0) if config.eval_source else parse_split("data.split", config.split)
    parts = []
    for weight, prefix in parse_source("data.source", config.source):
        data = open_megatron(prefix, vocab_size=vocab_size)
        edges = split_edges(shares, len(data.lengths) if by_sequence else len(data.documents) - 1)
        part = MegatronPart(weight, data, tuple(edges), by_sequence)
        if len(part.train) < seq_len + 1:
            raise DataError(
                f"megatron:{prefix} has {len(part.train):,} tokens for training in {counted(edges[1], part.unit)}, "
                f"and one example takes {f'model.seq_len+1={seq_len + 1}' if seq_len > 1 else 'at least 2'}. Use more "
                f"data, another data.split (now {config.split}) or a smaller model.seq_len. To evaluate on all of it, "
                "name it as data.eval_source."
            )
        parts.append(part)
    if shares[1] and not any(len(part.heldout) > 1 for part in parts):
        raise DataError(
            f"data.split={config.split} of {config.source} holds out "
            f"{sum(part.edges[2] - part.edges[1] for part in parts)} of "
            f"{counted(sum(part.edges[-1] for part in parts), parts[0].unit)}, and an evaluation takes at least 2 "
            "tokens. Use a larger second share, set data.eval_source (megatron:PREFIX evaluates on all of a dataset), "
            "or train without an evaluation: data.split=1,0,0 and train.eval_every=0."
        )
    return MegatronCorpus(config.source, tuple(parts))


def split_edges(shares: Sequence[float], count: int) -> list[int]:
    """The first document of each part, and `count` at the end; `shares` sum to 1, and the edges never fall.

    They are those of megatron.core.datasets.blended_megatron_dataset_builder: cumulative shares times the number of
    documents, rounded to even.
    """
    return [round(edge * float(count)) for edge in itertools.accumulate(shares, initial=0.0)]


def open_megatron(prefix: str, *, vocab_size: int) -> IndexedTokens:
    """Opens the dataset `prefix` and checks that samples of its tokens are below `vocab_size`."""
    data = open_indexed(absolute(prefix))
    for start, piece in TokenStream(data.tokens).pieces():
        wrong = (piece >= vocab_size) | (piece < 0)
        if wrong.any():
            place = int(np.argmax(wrong))
            raise DataError(
                f"megatron:{prefix}: token {start + place} is {piece[place]}, outside the vocabulary of "
                f"model.vocab_size={vocab_size}. Set model.vocab_size to that of the tokenizer which made the file."
            )
    return data


def whole_stream(source: str, *, vocab_size: int) -> TokenStream:
    """All of the dataset `megatron:PREFIX`, in the order of the file."""
    data = open_megatron(source.partition(":")[2], vocab_size=vocab_size)
    return TokenStream(data.tokens, documents=data.bounds(0, len(data.documents) - 1))
