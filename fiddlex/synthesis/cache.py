"""Keeps what searches found, so that the same question is answered at once.

An answer is a file of JSON in $XDG_CACHE_HOME/fiddlex/schedules (by default ~/.cache/fiddlex/schedules), named by a
checksum of the question, of `VERSION` and of the version of scipy, whose solver gives some of the candidates. The
schedule is judged again when it is read, so that a damaged file, or one of another version of the clocks, is never
believed. Nothing is kept where the folder cannot be written. Invariant: with the cache or without it, the answer to a
question is the same.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import scipy

from fiddlex.errors import ScheduleError
from fiddlex.files.places import cache_folder
from fiddlex.files.small_files import read_small
from fiddlex.files.whole_files import replacing
from fiddlex.schedules.text import from_csv, to_csv
from fiddlex.schedules.validate import validate
from fiddlex.synthesis.problem import Problem
from fiddlex.synthesis.search import NAME, Found, find

FOLDER = "schedules"  # of the user's caches
VERSION = 9  # to be raised whenever a change makes searches find something else
_WRONG = (  # what a damaged file may raise
    OSError,
    ValueError,
    LookupError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    ScheduleError,
)


def find_once(problem: Problem, *, effort: int, seed: int, with_bound: bool) -> Found:
    """What `search.find` returns or raises, from the cache if it was asked before."""
    try:
        path = cache_folder() / FOLDER / f"{_key(problem, effort, seed, with_bound)}.json"
    except FileNotFoundError:  # a user without a home keeps nothing
        return find(problem, effort=effort, seed=seed, with_bound=with_bound)
    found = _read(path, problem)
    if found is None:
        found = find(problem, effort=effort, seed=seed, with_bound=with_bound)
        _write(path, found)
    return found


def _key(problem: Problem, effort: int, seed: int, with_bound: bool) -> str:
    question = repr((VERSION, scipy.__version__, dataclasses.astuple(problem), effort, seed, with_bound))
    return hashlib.sha256(question.encode()).hexdigest()[:32]


def _read(path: Path, problem: Problem) -> Found | None:
    """The answer in a file; None if there is none, or none that is right."""
    try:
        answer = json.loads(read_small(path))
        schedule = dataclasses.replace(from_csv(answer["table"], NAME), strict=bool(answer["strict"]))
        validate(schedule)
        judged = problem.judge(schedule)
        bound, origin, tried = float(answer["bound"]), str(answer["origin"]), int(answer["tried"])
    except _WRONG:
        return None
    fits = (schedule.placement, schedule.num_microbatches) == (problem.placement, problem.num_microbatches)
    if not fits or judged is None or judged.time != answer["time"] or not 0 <= bound <= judged.time:
        return None
    return Found(schedule, judged, bound, origin, tried)


def _write(path: Path, found: Found) -> None:
    answer = {
        "time": found.judged.time,
        "bound": found.bound,
        "origin": found.origin,
        "tried": found.tried,
        "strict": found.schedule.strict,
        "table": to_csv(found.schedule),
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, shared=True) as file:
            file.write(json.dumps(answer).encode())
    except OSError:
        pass  # without a cache, the next search takes its time again
