"""Continuation files: a language model is scored by the log-likelihood of a text that follows a context.

A line of such a JSONL file has one of these forms; in the second, the continuation is the last word, as in LAMBADA
(arXiv:1606.06031):

    {"context": "The cat sat on the", "continuation": " mat"}
    {"text": "The cat sat on the mat"}
    {"context": "The cat sat on the", "choices": [" mat", " moon"], "label": 0}

Either all lines of a file have choices or none has. A continuation directly follows its context: nothing is inserted
between them.

Invariant: exactly the tokens of a continuation are scored, each once, and a line is bad when one of its continuations
cannot be scored.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fiddlex.data.bad_lines import BadLineError, checked_choices, choice_index, text_of, value_of
from fiddlex.data.ragged import Ragged, encode_rows
from fiddlex.data.staged_examples import checked
from fiddlex.data.tables import Table, read_table
from fiddlex.data.tokenizers import Tokenizer, begun, warn_of_unknown
from fiddlex.errors import DataError
from fiddlex.terminal.readable import counted


@dataclasses.dataclass(frozen=True, slots=True)
class Continuation:
    """A line of a continuation file: a context and its possible continuations."""

    context: str  # the text before the continuation; may be empty
    choices: tuple[str, ...]  # one continuation, or two or more of which one is right
    label: int  # index of the right choice, from 0


@dataclasses.dataclass(frozen=True, eq=False)
class ContinuationRows:
    """Maps examples to lines and choices: the choices of a line are consecutive examples, in order."""

    num_bytes: np.ndarray  # int64[examples], UTF-8 bytes of the continuation
    num_tokens: np.ndarray  # int64[examples], tokens of the continuation
    first: np.ndarray  # int64[lines + 1], the first example of each line; the last entry is the number of examples
    labels: np.ndarray  # int64[lines], the right choice; 0 where a line has only one
    has_choices: bool  # whether lines have two or more choices


def read_continuations(source: str, *, skip_bad_lines: bool) -> Table[Continuation]:
    """Reads the continuation file `source`, 'jsonl:PATH'.

    Raises:
      DataError: as `read_table`, or when some lines have choices and others have none.
      OSError: when the file cannot be read.
    """
    table = read_table(source, _parse, fields={}, skip_bad_lines=skip_bad_lines)
    line, has_choices = table.lines[0], len(table.rows[0].choices) > 1

    def check(row: Continuation) -> Continuation:
        if (len(row.choices) > 1) != has_choices:
            raise BadLineError(
                "choices in some lines only",
                f"it has {'no ' * has_choices}choices, other than line {line}: accuracy means another thing with them. "
                "Put them into a file of their own.",
            )
        return row

    return table.convert(check)


class ScoredEnds:
    """One example for each sequence of tokens, of which the last ones are scored, each given all before it.

    A sequence that is too long loses its start. `sequences` has for each example its tokens, integers [tokens] of one
    dtype, and how many of the last ones are scored: at least one, fewer than all, and at most `seq_len`.

    Raises:
      DataError: when another number of tokens is to be scored.
    """

    def __init__(self, sequences: Sequence[tuple[np.ndarray, int]], *, seq_len: int):
        for ids, num_scored in sequences:
            if not 0 < num_scored <= min(seq_len, len(ids) - 1):
                raise DataError(
                    f"{num_scored} of {len(ids)} tokens are to be scored with model.seq_len={seq_len}: score at least "
                    "one, at most model.seq_len, and never the first."
                )
        self._seq_len = seq_len
        self._tokens = Ragged([ids[-seq_len - 1 :] for ids, _ in sequences])
        self._num_scored = [num_scored for _, num_scored in sequences]

    def __len__(self) -> int:
        return len(self._tokens)

    @property
    def tokens(self) -> np.ndarray:
        """All sequences concatenated, [tokens]."""
        return self._tokens.tokens

    def fingerprint(self) -> str:
        """Identifies the data by the number of examples and a hash of all tokens, and of what is scored of them."""
        digest = hashlib.sha256(self._tokens.digest().encode())
        digest.update(np.array(self._num_scored, "<i8").tobytes())
        return f"{len(self)}-{digest.hexdigest()[:16]}"

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Example `index`, the same in every epoch.

        It has `tokens` and `targets`, both int32[seq_len] and padded with token 0; `targets` are the tokens shifted by
        one. `weights`, float32[seq_len], is 1 where the target is scored, else 0.
        """
        checked(index, len(self))
        ids = self._tokens[index]
        filled = np.zeros(self._seq_len + 1, np.int32)
        filled[: len(ids)] = ids
        weights = np.zeros(self._seq_len, np.float32)
        weights[len(ids) - 1 - self._num_scored[index] : len(ids) - 1] = 1
        return {"tokens": filled[:-1], "targets": filled[1:], "weights": weights}


class ContinuationExamples:
    """One example for each choice of each line: its context and continuation, scored on the continuation alone.

    Context and continuation are encoded as one text, since a model never saw them apart. The continuation's tokens are
    those after the longest common prefix with the tokens of the context alone, so a token that spans the boundary
    belongs to the continuation. The text begins with the tokens that the tokenizer's file puts before a text, as it
    does in transformers. If no token precedes the continuation (an empty context), the tokenizer's separator is
    inserted before it. A context that is too long is cut at its start; a continuation that is too long is a bad line.
    """

    def __init__(self, table: Table[Continuation], *, tokenizer: Tokenizer, seq_len: int):
        encoded = encode_rows(map(_context_and_wholes, table.rows), tokenizer)

        def fit(row: Continuation) -> tuple[Continuation, list[tuple[np.ndarray, int]]]:
            context, *wholes = next(encoded)
            return row, [_continued(context, ids, tokenizer=tokenizer, seq_len=seq_len) for ids in wholes]

        fitted = table.convert(fit)
        self.lines = fitted.lines  # the number of each line of `rows` in the file, from 1
        examples = [example for _, of_line in fitted.rows for example in of_line]
        self._examples = ScoredEnds(examples, seq_len=seq_len)
        warn_of_unknown(self._examples.tokens, tokenizer, table.source)
        self.rows = _rows([row for row, _ in fitted.rows], np.array([scored for _, scored in examples], np.int64))
        self.num_cut = sum(len(ids) > seq_len + 1 for ids, _ in examples)  # examples whose context was cut
        self._description = (
            f"{fitted.describe()}, {len(self):,} continuations; of {self.num_cut:,} the context is cut at its start to "
            f"model.seq_len={seq_len}"
        )

    def __len__(self) -> int:
        return len(self._examples)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        return self._examples.example(index, epoch=epoch)

    def fingerprint(self) -> str:
        return self._examples.fingerprint()

    def describe(self) -> str:
        return self._description


def _parse(values: Mapping[str, Any]) -> Continuation:
    kinds = [name for name in ("text", "continuation", "choices") if name in values]
    if len(kinds) != 1:
        raise BadLineError(
            "none of the forms",
            f"it has {' and '.join(map(repr, kinds)) or 'none'} of the keys 'text', 'continuation' and 'choices', and "
            "must have one of them. The keys of texts to be continued are fixed, whatever data.text_fields and the "
            "like say: 'text'; 'context' and 'continuation'; or 'context', 'choices' and 'label'.",
        )
    if kinds == ["text"]:
        text = text_of(values, "text").strip()
        context = text.removesuffix(text.rsplit(maxsplit=1)[-1]).rstrip()
        return Continuation(context, (text[len(context) :],), 0)
    context = text_of(values, "context", may_be_empty=True)
    if kinds == ["continuation"]:
        return Continuation(context, (text_of(values, "continuation"),), 0)
    choices = checked_choices(values["choices"], "choices")
    if len(choices) < 2:
        raise BadLineError("wrong number of choices", f"'choices' has {len(choices)}, and must have at least 2.")
    return Continuation(context, choices, choice_index(value_of(values, "label"), len(choices), name="label"))


def _context_and_wholes(row: Continuation) -> list[str]:
    return [row.context, *(row.context + choice for choice in row.choices)]


def _continued(context: np.ndarray, whole: np.ndarray, *, tokenizer: Tokenizer, seq_len: int) -> tuple[np.ndarray, int]:
    """The tokens of context and continuation, and how many of the last tokens are the continuation's."""
    context, whole = (np.array(begun(ids.tolist(), tokenizer.beginning), ids.dtype) for ids in (context, whole))
    shorter = min(len(context), len(whole))
    differ = context[:shorter] != whole[:shorter]
    prefix = int(np.argmax(differ)) if differ.any() else shorter
    num_tokens = len(whole) - prefix
    if not num_tokens:
        raise BadLineError("continuation without tokens", "a continuation adds no token to its context.")
    if num_tokens > seq_len:
        raise BadLineError(
            "too long",
            f"a continuation takes {counted(num_tokens, 'token')}, more than model.seq_len={seq_len}, and only "
            "contexts are cut. Raise model.seq_len.",
        )
    if prefix:
        return whole, num_tokens
    if tokenizer.separator is None:
        raise BadLineError(
            "nothing before the continuation",
            "no token comes before a continuation, from which its first could be predicted, and data.tokenizer has no "
            "separator to put there. Give the line a context.",
        )
    return np.concatenate([np.array([tokenizer.separator], whole.dtype), whole]), num_tokens


def _rows(lines: list[Continuation], num_tokens: np.ndarray) -> ContinuationRows:
    counts = np.array([len(row.choices) for row in lines], np.int64)
    first = np.concatenate([[0], np.cumsum(counts)])
    return ContinuationRows(
        num_bytes=np.array([len(choice.encode("utf-8")) for row in lines for choice in row.choices], np.int64),
        num_tokens=num_tokens,
        first=first,
        labels=np.array([row.label for row in lines], np.int64),
        has_choices=bool((counts > 1).any()),
    )
