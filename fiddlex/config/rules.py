"""Rules for config values; each raises ConfigError with the values, the rule and the remedy."""

import difflib
import math
import re
import reprlib
from collections.abc import Iterable, Sequence

from fiddlex.config.other_names import VALUES
from fiddlex.errors import ConfigError

INTEGER_LIMIT = 2**31  # steps, examples and sizes are 32-bit integers on the devices
_REPR = reprlib.Repr()
_REPR.maxstring = 200
# With one slash too, as pathlib writes a URL; `text:/books` and `file:/table.csv` are none.
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://|\b(?:gs|gcs|s3|hdfs|https?|abfss?):/")
ROUNDS_TO_ONE = 1 - 2**-25  # float32 rounds this number, and those between it and 1, to 1


def nearest(name: str, names: Iterable[str]) -> str:
    """'Did you mean x?' with the closest of `names`, or 'Known: …' with all of them when none is close."""
    names = list(names)
    return close(name, names) or f"Known: {', '.join(names)}."


def close(name: str, names: Sequence[str]) -> str:
    """A question that names the nearest of `names`; empty where none is near.

    What other systems call a value counts as near, and so does the beginning of a name, if only one begins so.
    """
    lower = name.lower()
    longer = [each for each in names if lower and each.lower().startswith(lower)]
    if VALUES.get(lower) in names:
        close = [VALUES[lower]]
    elif len(longer) == 1:
        close = longer
    else:
        close = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(lower, names, n=1)
    return f"Did you mean {close[0]!r}?" if close else ""


def choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        text = f"{name}={_REPR.repr(value)} is not one of {', '.join(choices)}. {close(value, choices)}"
        raise ConfigError(text.rstrip())


def local_path(name: str, value: str) -> None:
    """Checks that `value` has no URL, such as `s3://bucket/run`, which would be taken for a folder here."""
    if found := _URL.search(value):
        raise ConfigError(
            f"{name}={_REPR.repr(value)} has a URL, {found[0]}…: fiddlex reads and writes file systems alone. Mount "
            "what it names, or copy it, and give the path."
        )


def at_least(name: str, value: float, least: float) -> None:
    """Checks that `value` is at least `least`, and below the limit of its type."""
    if not least <= value < _limit(value):
        raise ConfigError(f"{name}={value} must be at least {least} and below {_limit(value)}.")


def between(name: str, value: float, least: float, most: float) -> None:
    """Checks that `value` lies between two bounds, both included."""
    if not least <= value <= most:
        raise ConfigError(f"{name}={value} must be at least {least} and at most {most:g}.")


def positive(name: str, value: float, most: float | None = None) -> None:
    """Checks that `value` is above 0, at most `most` if that is given, and below the limit of its type."""
    if most is not None and not 0 < value <= most:
        raise ConfigError(f"{name}={value} must be greater than 0 and at most {most:g}.")
    if not 0 < value < _limit(value):
        raise ConfigError(f"{name}={value} must be greater than 0 and below {_limit(value)}.")


def fraction(name: str, value: float) -> None:
    """Checks that `value` is at least 0 and below 1, also when it is rounded to float32."""
    if not 0 <= value < ROUNDS_TO_ONE:
        rounded = ", also when rounded to float32" if ROUNDS_TO_ONE <= value < 1 else ""
        raise ConfigError(f"{name}={value} must be at least 0 and below 1{rounded}.")


def divides(name: str, value: int, by_name: str, by: int, why: str, *, of: int = 0) -> None:
    """Checks that `value` is a multiple of `by`; `why` ends the sentence that states the rule.

    With `of`, a number that `value` divides, the message proposes no multiples that do not.
    """
    if value % by:
        fitting = _near([number for number in _divisors(of) if number % by == 0], value, 2) if of else []
        multiples = " or ".join(fitting) if of else near_multiples(value, by)
        others = f", or {name} {multiples}" if multiples else ""
        raise ConfigError(
            f"{name}={value} is not a multiple of {by_name}={by}: {why}. "
            f"Use {by_name} {near_divisors(value, by)}{others}."
        )


def _divisors(value: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(value) + 1) if value % d == 0]
    return sorted({*small, *(value // d for d in small)})


def near_divisors(value: int, by: int) -> str:
    """The divisors of `value` that are nearest to `by`, for a message."""
    return ", ".join(_near(_divisors(value), by, 4))


def _near(numbers: list[int], value: int, most: int) -> list[str]:
    return list(map(str, sorted(sorted(numbers, key=lambda number: abs(number - value))[:most])))


def near_multiples(value: int, by: int) -> str:
    """The multiples of `by` just below and just above `value`, for a message."""
    below, above = value // by * by, -(-value // by) * by
    return f"{below} or {above}" if below else f"{above}"


def _limit(value: float) -> float:
    return INTEGER_LIMIT if isinstance(value, int) else math.inf
