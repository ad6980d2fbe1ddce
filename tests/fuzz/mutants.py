"""Damaged and hostile files, made from whole ones: of any bytes, and of JSON with values that a writer never writes.

The functions take any source of random choices, so that hypothesis, which shrinks what fails, and long runs share them.
"""

import json
import struct
from collections.abc import Callable
from typing import Any, Protocol

from hypothesis import strategies as st


class Choices(Protocol):
    """A source of random choices, such as `random.Random`."""

    def randrange(self, stop: int, /) -> int:
        """A number from 0 to below `stop`."""

    def choice(self, values: Any) -> Any:
        """One of the values of a sequence."""


# Numbers at the edges of the types that formats have, in each size.
_NUMBERS = (0, 1, 2, 127, 128, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
# As they stand in JSON. Python's parser takes NaN and Infinity; 1e400 becomes infinity; it refuses the long integer.
ODD_JSON = (
    *(
        "null",
        "true",
        "false",
        '""',
        "[]",
        "{}",
        "0",
        "-1",
        "1.5",
        "-0.0",
        "1e400",
        "-1e400",
        "NaN",
        "Infinity",
        "1e-400",
    ),
    *("2147483647", "2147483648", "9223372036854775807", "9223372036854775808", "1e308", "18446744073709551616"),
    *('"x"', '".."', '"../x"', '"/etc/passwd"', '"a\\u0000b"', '"\\ud800"', '"\\u2028"', '"1e5"', '"NaN"', "[[]]"),
    "1" + "0" * 400,
    "9" * 5000,
    '"' + "x" * 5000 + '"',
    "[" * 300 + "]" * 300,
    "[" * 100_000 + "]" * 100_000,
    '{"x":' * 2000 + "1" + "}" * 2000,
)
_PLACE = "\ue000"  # stands for the value to put in


def mutated(choices: Choices, whole: bytes, *, is_json: bool) -> bytes:
    """The file with one to three changes."""
    data = whole
    for _ in range(1 + choices.randrange(3)):
        kinds: list[Callable[[Choices, bytes], bytes]] = [_flip, _number, _cut, _drop, _repeat, _insert]
        data = choices.choice([*kinds, *([_value] * 6 if is_json else [])])(choices, data)
    return data


def _flip(choices: Choices, data: bytes) -> bytes:
    if not data:
        return data
    damaged = bytearray(data)
    damaged[choices.randrange(len(data))] ^= 1 << choices.randrange(8)
    return bytes(damaged)


def _number(choices: Choices, data: bytes) -> bytes:
    """Writes a number at the edge of a type over some bytes."""
    size = choices.choice((1, 2, 4, 8))
    if len(data) < size:
        return data
    place = choices.randrange(len(data) - size + 1)
    number = struct.pack("<Q", choices.choice(_NUMBERS))[:size]
    return data[:place] + number + data[place + size :]


def _cut(choices: Choices, data: bytes) -> bytes:
    return data[: choices.randrange(len(data) + 1)]


def _drop(choices: Choices, data: bytes) -> bytes:
    place = choices.randrange(len(data) + 1)
    return data[:place] + data[place + 1 + choices.randrange(16) :]


def _repeat(choices: Choices, data: bytes) -> bytes:
    place = choices.randrange(len(data) + 1)
    return data[:place] + data[place : place + 1 + choices.randrange(40)] + data[place:]


def _insert(choices: Choices, data: bytes) -> bytes:
    place = choices.randrange(len(data) + 1)
    return data[:place] + bytes(choices.randrange(256) for _ in range(1 + choices.randrange(4))) + data[place:]


def _value(choices: Choices, data: bytes) -> bytes:
    """Puts an odd value in the place of one in a line of JSON, under another key too, or takes the value out."""
    lines = data.split(b"\n")
    number = choices.randrange(len(lines))
    try:
        value = json.loads(lines[number])
        text = json.dumps(_replaced(choices, value))
    except (ValueError, RecursionError):  # an earlier change has damaged the line
        return data
    lines[number] = text.replace(json.dumps(_PLACE), choices.choice(ODD_JSON)).encode()
    return b"\n".join(lines)


def _replaced(choices: Choices, value: Any) -> Any:
    if not isinstance(value, dict | list) or not value or choices.randrange(6) == 0:
        return _PLACE
    if isinstance(value, list):
        place = choices.randrange(len(value))
        return [*value[:place], _replaced(choices, value[place]), *value[place + 1 :]]
    key = choices.choice(list(value))
    kind = choices.randrange(8)
    if kind == 0:
        return {name: each for name, each in value.items() if name != key}
    if kind == 1:
        return value | {choices.choice(("x", "__metadata__", "..", "", key * 40)): value[key]}
    return value | {key: _replaced(choices, value[key])}


class _Drawn:
    """Choices that hypothesis makes."""

    def __init__(self, draw: st.DrawFn):
        self._draw = draw

    def randrange(self, stop: int, /) -> int:
        return self._draw(st.integers(0, stop - 1))

    def choice(self, values: Any) -> Any:
        return values[self.randrange(len(values))]


@st.composite
def files(draw: st.DrawFn, seeds: list[bytes], *, is_json: bool) -> bytes:
    """A damaged file, or bytes that have nothing to do with the format."""
    if draw(st.integers(0, 19)) == 0:
        return draw(st.binary(max_size=200))
    return mutated(_Drawn(draw), draw(st.sampled_from(seeds)), is_json=is_json)
