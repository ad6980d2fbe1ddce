"""The texts that name datasets of Megatron-LM: `megatron:PREFIX`, blends and splits.

A blend, `megatron:0.7:a,0.3:b`, gives each prefix a weight; only the ratios of the weights count. A split, `969,30,1`,
gives the shares of the documents to train on, to evaluate on and to leave out.
"""

import math
import os
import re
from fractions import Fraction

from fiddlex.errors import ConfigError

KIND = "megatron"
_NUMBER = r"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?"
_WEIGHTED = re.compile(f"({_NUMBER}):(.+)")
_SPLITS = 3


def parse_source(field: str, value: str) -> list[tuple[Fraction, str]]:
    """The weights and prefixes of `value`, one or more.

    Args:
      field: the field that has the value, for messages.
      value: megatron:PREFIX or megatron:WEIGHT:PREFIX,WEIGHT:PREFIX,….

    Raises:
      ConfigError: when a prefix is missing or named twice, or a weight is not above 0.
    """
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
    places = [os.path.abspath(os.path.expanduser(prefix)) for _, prefix in found]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise ConfigError(
            f"{field}={value!r} names {twice} twice, whose examples would come in the same order from both. "
            "Name it once, with the sum of the weights."
        )
    return found


def parse_split(field: str, value: str) -> tuple[float, float, float]:
    """The shares to train on, to evaluate on and to leave out; they sum to 1.

    Raises:
      ConfigError: when `value` is not one to three numbers of at least 0, of which the first is above 0.
    """
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
