"""The values of `train.profile_steps` and `train.profile_ranks`: which steps to profile, and on which processes."""

import re

from fiddlex.errors import ConfigError

ALL_RANKS = "all"


def parse_steps(name: str, value: str, *, num_steps: int) -> range:
    """The steps to profile, counted from 1, from their first and last, as in `10:13`; empty for an empty text."""
    if not value:
        return range(0)
    form = f"{name}={value!r} must be the first and the last step, as in 10:13, or empty."
    if not (match := re.fullmatch(r"([0-9]{1,18}):([0-9]{1,18})", value)):
        raise ConfigError(form)
    first, last = map(int, match.groups())
    if not 1 <= first <= last:
        raise ConfigError(f"{form} Steps are counted from 1, and the last must not be before the first.")
    if last > num_steps:
        raise ConfigError(
            f"{name}={value!r} goes beyond the last step, train.num_steps={num_steps}. Choose steps of the run."
        )
    return range(first, last + 1)


def parse_ranks(name: str, value: str) -> frozenset[int] | None:
    """The ranks of the processes that profile; None for all."""
    if value == ALL_RANKS:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", value):
        raise ConfigError(f"{name}={value!r} must be ranks of processes, as in 0 or 0,3, or {ALL_RANKS}.")
    return frozenset(map(int, value.split(",")))


def check_ranks(name: str, value: str, *, num_processes: int) -> None:
    """Checks that the run has all the processes that `value`, which `parse_ranks` accepts, lists."""
    if (ranks := parse_ranks(name, value)) and max(ranks) >= num_processes:
        raise ConfigError(
            f"{name}={value!r}: the run has {num_processes} process{'es' * (num_processes > 1)}, whose ranks are "
            f"counted from 0. Use {'0' if num_processes == 1 else f'ranks up to {num_processes - 1}'} or {ALL_RANKS}."
        )
