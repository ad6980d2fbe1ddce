"""Schedules that a function in a user's Python file makes, `PATH.py:FUNCTION`.

The function takes the keyword arguments of the generators (`fiddlex.schedules.generators`) and returns a `Schedule`.
The file is run as a config file is, with the user's rights, once for each state of the file. Only texts of the user's
own command line or config lead here: a workdir's own `config.json` never does (`fiddlex.train.run.workdir`). Invariant:
what `load_function` returns gives a schedule whose parts have the right types, or raises a ScheduleError that names
file and line.
"""

import contextlib
import functools
import inspect
import os
import reprlib
import stat
from collections.abc import Callable, Iterator
from typing import Any

from fiddlex.config.python_files import errors_of, run_file, similar_file
from fiddlex.config.rules import nearest
from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.traits import Generator

SIGNATURE = "(*, pipe, chunks=1, num_microbatches)"


def load_function(path: str, function: str) -> Generator:
    """The generator that is a function in a Python file; the file is run unless it was, and has not changed since.

    Args:
      path: the file.
      function: the name of the function; empty where the user gave none.

    Raises:
      ScheduleError: when the file is missing or fails (the message names the line), or has no such function.
    """
    name = f"{path}:{function}" if function else path
    try:
        state = os.stat(path)
    except OSError as error:
        raise ScheduleError(
            f"schedule {name}: {os.path.abspath(path)} cannot be read ({error.strerror}).{similar_file(path)} Give the "
            "path of a Python file and the name of a function in it, as in my/schedules.py:mine."
        ) from error
    if not stat.S_ISREG(state.st_mode):  # a folder, which Python would run too, or a pipe, for which it would wait
        raise ScheduleError(f"schedule {name}: {os.path.abspath(path)} is not a file.")
    with _naming(name):
        return _loaded(path, function, os.path.abspath(path), state.st_mtime_ns, state.st_size)


@contextlib.contextmanager
def _naming(name: str) -> Iterator[None]:
    """Puts the name of a schedule before the message of a ScheduleError that the body raises."""
    try:
        yield
    except ScheduleError as error:
        raise ScheduleError(f"schedule {name}: {error}") from error


@functools.lru_cache(maxsize=16)
def _loaded(path: str, function: str, *state: object) -> Generator:
    """The generator of a file in some state."""
    with errors_of(path, ScheduleError):
        contents = run_file(path)
    names = [name for name, value in contents.items() if inspect.isfunction(value) and name[0] != "_"]
    own = [name for name in names if contents[name].__code__.co_filename == path]  # not what the file imports
    if not function:
        raise ScheduleError(f"name a function of the file too, as in {path}:{(own or ['mine'])[0]}.")
    if not callable(contents.get(function)):
        has = nearest(function, own) if own else f"Write one that begins with def {function}{SIGNATURE}."
        raise ScheduleError(f"{path} has no function {function!r}. {has}")
    return functools.partial(_made, contents[function], path, f"{path}:{function}")


def _made(function: Callable[..., Any], path: str, named: str, **sizes: int) -> Schedule:
    """What the function makes of the sizes, under the name by which the user knows it, with the types checked."""
    with _naming(named):
        return _checked(_called(function, path, sizes), named)


def _called(function: Callable[..., Any], path: str, sizes: dict[str, int]) -> Schedule:
    name = getattr(function, "__name__", repr(function))
    with errors_of(path, ScheduleError):  # some callables, as those written in C, have no signature
        signature = inspect.signature(function)
    try:
        signature.bind(**sizes)
    except TypeError as error:
        raise ScheduleError(
            f"{path} has {name}{signature}, which cannot be called with {', '.join(sizes)} ({error}). It must take the "
            f"keyword arguments of def {name}{SIGNATURE}."
        ) from error
    with errors_of(path, ScheduleError):
        schedule = function(**sizes)
    if not isinstance(schedule, Schedule):
        raise ScheduleError(
            f"{name} of {path} returned {reprlib.repr(schedule)}; it must return a fiddlex.schedules.schedule.Schedule."
        )
    return schedule


def _checked(schedule: Schedule, name: str) -> Schedule:
    """The schedule under another name, with tuples for its rows; it keeps its order.

    Raises:
      ScheduleError: when a part of it has a wrong type.
    """
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
    return Schedule(name, tuple(map(tuple, rows)), tuple(placement), strict=True, notes=schedule.notes)


def _is_sequence(value: object) -> bool:
    return isinstance(value, list | tuple)
