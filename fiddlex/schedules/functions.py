"""Schedules that a function in a user's Python file makes (`fiddlex.config.user_code.own_functions`).

The function takes the keyword arguments of the generators and returns a `Schedule`. Invariant: what `load_function`
returns gives a schedule whose parts have the right types, or raises a ScheduleError that names file and line.
"""

import functools
import inspect
import reprlib
from collections.abc import Callable
from typing import Any

from fiddlex.config.user_code.own_functions import Own
from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.traits import Generator

_OWN = Own("schedule", "(*, pipe, chunks=1, num_microbatches)", ScheduleError)


def load_function(path: str, function: str) -> Generator:
    """The generator that is a function in a Python file, the same one as long as the file has not changed."""
    return _generator(_OWN.load(path, function), path, f"{path}:{function}")


@functools.lru_cache(maxsize=16)
def _generator(function: Callable[..., Any], path: str, named: str) -> Generator:
    return functools.partial(_made, function, path, named)


def made_registered(function: Callable[..., Any], name: str, sizes: dict[str, int]) -> Schedule:
    """What a function that a user has registered under a name makes of the sizes, checked as that of a file is."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return _made(function, code.co_filename if code else name, name, registered=True, **sizes)


def _made(function: Callable[..., Any], path: str, named: str, *, registered: bool = False, **sizes: int) -> Schedule:
    """What the function makes of the sizes, under the name by which the user knows it, with the types checked."""
    with _OWN.naming(named):
        schedule = _OWN.call(function, path, sizes)
        if not isinstance(schedule, Schedule):
            name = getattr(function, "__name__", repr(function))
            raise ScheduleError(
                f"{name} of {path} returned {reprlib.repr(schedule)}; it must return a "
                "fiddlex.schedules.schedule.Schedule."
            )
        if registered:  # it has the name and the order that its function says
            return _checked(schedule, str(schedule.name), strict=schedule.strict)
        return _checked(schedule, named, strict=True)


def _checked(schedule: Schedule, name: str, *, strict: bool) -> Schedule:
    """The schedule under another name, with tuples for its rows and the types of its parts checked."""
    rows, placement = schedule.actions, schedule.placement
    if not _is_sequence(rows) or not all(map(_is_sequence, rows)):
        raise ScheduleError("its actions must be a tuple with a tuple of actions for each rank.")
    for rank, row in enumerate(rows):
        for position, action in enumerate(row):
            if not (type(action) is Action and type(action.stage) is type(action.microbatch) is int):
                wrong = reprlib.repr(action)
            elif not isinstance(action.kind, Kind):
                wrong = f"of kind {action.kind!r}"
            else:
                continue
            raise ScheduleError(
                f"position {position} of rank {rank} is {wrong}; it must be an action, as in "
                "Action(stage=0, kind=Kind.F, microbatch=0)."
            )
    if not _is_sequence(placement) or not all(type(rank) is int for rank in placement):
        raise ScheduleError(
            f"its placement is {reprlib.repr(placement)}; it must be a tuple with the rank of each stage."
        )
    return Schedule(name, tuple(map(tuple, rows)), tuple(placement), strict=strict, notes=schedule.notes)


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)
