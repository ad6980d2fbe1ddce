"""The values of `data.source` and `data.eval_source`, `KIND:PATH`, and what is known of each kind.

`fiddlex.data.corpus` and `fiddlex.data.dataset` read the sources. Datasets of Megatron-LM may be blends, and have
splits. A blend, `megatron:0.7:a,0.3:b`, gives each prefix a weight; only the ratios of the weights count. A split,
`969,30,1`, gives the shares of the documents to train on, to evaluate on and to leave out.
"""

import math
import os
import re
from collections.abc import Iterable
from fractions import Fraction
from typing import NamedTuple

from fiddlex.errors import ConfigError
from fiddlex.files.places import absolute


class SourceKind(NamedTuple):
    """What is known of a kind of data source."""

    place: str = "PATH"  # what follows the kind and a colon; empty: nothing does
    labelled: bool = False  # whether its lines are labelled texts
    tokens: bool = False  # whether it holds tokens, whose tokenizer the config need not name
    columns: bool = False  # whether it holds rows, of which `data.text_column` is read
    split: bool = False  # whether `data.split` says what is held out, in place of `data.eval_fraction`
    endings: tuple[str, ...] = ()  # of file names that only this kind has


KINDS = {
    "stdlib": SourceKind(place=""),
    "text": SourceKind(),
    "hf": SourceKind(columns=True),
    "array_record": SourceKind(columns=True, endings=(".array_record", ".arrayrecord")),
    "tokens": SourceKind(tokens=True),
    "megatron": SourceKind("PREFIX", tokens=True, split=True),
    "tsv": SourceKind(labelled=True, endings=(".tsv",)),
    "jsonl": SourceKind(labelled=True, endings=(".jsonl",)),
}
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_WEIGHTED = re.compile(f"({_NUMBER}):(.+)")
_SPLITS = 3


def kind_of(source: str) -> SourceKind:
    return KINDS[source.partition(":")[0]]


def forms(kinds: Iterable[str]) -> tuple[str, ...]:
    """How sources of these kinds are written, as in `text:PATH`."""
    return tuple(f"{kind}:{KINDS[kind].place}".rstrip(":") for kind in kinds)


def is_megatron(source: str) -> bool:
    return source.startswith("megatron:")


def parse_source(field: str, value: str) -> list[tuple[Fraction, str]]:
    """The weights and prefixes of megatron:PREFIX or megatron:WEIGHT:PREFIX,WEIGHT:PREFIX,…; messages name `field`."""
    _, _, rest = value.partition(":")
    parts = rest.split(",")
    matches = [_WEIGHTED.fullmatch(part) for part in parts]
    if not any(matches):  # commas and colons may be letters of a path
        return [(Fraction(1), rest)]
    found = []
    for part, match in zip(parts, matches, strict=True):
        weight = float(match[1]) if match else 0.0
        if match is None or not 0 < weight < math.inf:
            raise ConfigError(
                f"{field}={value!r}: {part!r} is not WEIGHT:PREFIX with a weight above 0. A blend is written "
                "megatron:0.7:PREFIX,0.3:PREFIX; each prefix has a weight and no comma."
            )
        found.append((Fraction(match[1]), match[2]))
    places = [str(absolute(prefix)) for _, prefix in found]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ConfigError(
            f"{field}={value!r} names {twice} twice, whose examples would come in the same order from both. "
            "Name it once, with the sum of the weights."
        )
    return found


def parse_split(field: str, value: str) -> tuple[float, float, float]:
    """The shares to train on, to evaluate on and to leave out; they sum to 1."""
    parts = [part.strip() for part in value.split(",")]
    numbers = [float(part) for part in parts] if all(re.fullmatch(_NUMBER, part) for part in parts) else []
    total = sum(numbers)
    if not 1 <= len(numbers) <= _SPLITS or not min(numbers) >= 0 or not 0 < total < math.inf or not numbers[0]:
        raise ConfigError(
            f"{field}={value!r} must be the shares to train on, to evaluate on and to leave out (train, valid and test "
            "of Megatron): up to three numbers of at least 0, of which the first is above 0, as in 969,30,1 or 99,1."
        )
    train, valid, test = (number / total for number in [*numbers, 0.0, 0.0][:_SPLITS])
    return train, valid, test


def lies_in(source: str, other: str) -> bool:
    """Whether a source names the data of another one, or a part of them, however their paths are written."""
    (kind, _, path), (other_kind, _, other_path) = source.partition(":"), other.partition(":")
    inner, outer = (os.path.realpath(os.path.expanduser(each)) for each in (path, other_path))
    return kind == other_kind and (inner == outer or inner.startswith(outer.rstrip(os.sep) + os.sep))
