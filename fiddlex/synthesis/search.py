"""The best schedule found for a problem: candidates of every kind, then a local search from the best if it is small.

The candidates are the schedules that have names, those of `greedy` under many rules, those that repeat a block, and for
the lockstep clock those of beam searches, all judged by the same clock under the same caps. The search draws from a
seed and counts its work in actions, not in seconds: the same inputs and version of scipy give the same schedule on
every machine and in every process. Invariant: the schedule is legal, within the caps, and never worse than a named one.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.validate import validate
from fiddlex.synthesis import beam, blocks, bounds, greedy
from fiddlex.synthesis.local_search import improve
from fiddlex.synthesis.problem import ROUNDING, Judged, Problem

EFFORT = 1_000_000  # actions that candidates and moves of a search have in all: a few seconds
SHARE_OF_BEAM = 0.3  # of the effort, in the lockstep clock
PARTIAL = 4  # effort, in actions, for an action of each partial schedule of a beam search
FEW_IDLE = 8  # ranks for each microbatch, beyond which a beam search takes more effort for ranks that are idle
WIDEST = 128  # partial schedules that a beam search keeps
SHARE_OF_MOVES = 0.3  # of the effort, if that is at least so many moves from each start:
FEWEST_MOVES = 100
STARTS = 3  # best candidates from which the local search goes on
_AHEAD = (0, 1, 2, 4, math.inf)  # microbatches that a stage lets in beyond a round trip
NAME = "auto"


class Found(NamedTuple):
    """What a search found."""

    schedule: Schedule
    judged: Judged
    bound: float  # a time that no schedule beats with its placement of stages, or 0 if none was computed
    origin: str  # what made it, for people
    tried: int  # number of schedules that were judged


class _Candidate(NamedTuple):
    judged: Judged
    number: int  # breaks ties
    schedule: Schedule
    origin: str


def find(problem: Problem, *, effort: int = EFFORT, seed: int = 0, with_bound: bool = True) -> Found:
    """Searches for the best schedule of a problem.

    Args:
      problem: what is asked for.
      effort: number of actions that all candidates have together.
      seed: seed of the local search.
      with_bound: whether to compute a bound too.
    """
    best: list[_Candidate] = []
    size = 3 * problem.num_stages * problem.num_microbatches
    bound, tried = 0.0, 0
    tries = int(effort * SHARE_OF_MOVES / size / STARTS)
    if tries < FEWEST_MOVES:  # too few to find anything
        tries = 0
    share = SHARE_OF_BEAM if problem.clock == "lockstep" else 0.0
    most = math.ceil(effort * (1 - share - (SHARE_OF_MOVES if tries else 0.0)) / size)
    idle = max(1.0, problem.num_ranks / problem.num_microbatches / FEW_IDLE)
    width = min(WIDEST, int(effort * share / size / PARTIAL / idle))
    for candidates in (named(problem), _others(problem, most), _of_beams(problem, width), _safe(problem)):
        if _reached(best, bound):
            break
        for schedule, origin in candidates:
            judged = problem.judge(schedule)
            tried += 1
            if judged is not None:
                best.append(_Candidate(judged, tried, schedule, origin))
                best = heapq.nsmallest(STARTS, best, key=_rank)
        if best and with_bound and not bound:
            bound = bounds.lower_bound(problem, best[0].judged.time)
    if tries and not _reached(best, bound):
        for number, start in enumerate(best):
            schedule, judged, moves = improve(problem, start.schedule, start.judged, tries=tries, seed=seed + number)
            tried += moves
            origin = f"{start.origin}, then moves" if judged.better_than(start.judged) else start.origin
            best[number] = _Candidate(judged, start.number, schedule, origin)
    winner = min(best, key=_rank)
    schedule = validate(dataclasses.replace(winner.schedule, name=NAME))
    return Found(schedule, winner.judged, min(bound, winner.judged.time), winner.origin, tried)


def _rank(candidate: _Candidate) -> tuple[float, float, int]:
    return candidate.judged.time, candidate.judged.makespan, candidate.number


def _reached(best: list[_Candidate], bound: float) -> bool:
    """Whether no schedule can be better than the best."""
    return bool(best) and best[0].judged.time <= bound * (1 + ROUNDING)


def _others(problem: Problem, most: int) -> Iterator[tuple[Schedule, str]]:
    """Up to `most` schedules without a name: of rules and of blocks in turn, until there are no more."""
    turns = itertools.zip_longest(_of_rules(problem), _of_blocks(problem))
    return itertools.islice((candidate for turn in turns for candidate in turn if candidate is not None), most)


def _safe(problem: Problem) -> Iterator[tuple[Schedule, str]]:
    """A microbatch after another with whole backwards, which is within all caps."""
    rules = greedy.Rules((1,) * problem.num_stages, splits=False, reserves=True)
    yield greedy.build(problem, rules), "rules for one microbatch after another"


def named(problem: Problem) -> Iterator[tuple[Schedule, str]]:
    """The named schedules that have this placement."""
    chunks = max(map(len, problem.stages_of))
    for name, generator in GENERATORS.items():
        try:
            schedule = generator(pipe=problem.num_ranks, chunks=chunks, num_microbatches=problem.num_microbatches)
        except ScheduleError:  # there is none of this size
            continue
        if schedule.placement != problem.placement:
            continue
        yield schedule, name
        if problem.clock == "lockstep" and schedule.has_whole:
            other = not schedule.strict  # dual_pipe_v is strict by itself, and faster ahead where ticks take time too
            yield dataclasses.replace(schedule, strict=other), f"{name}, {'strict' if other else 'ahead'}"


def _of_rules(problem: Problem) -> Iterator[tuple[Schedule, str]]:
    """What ranks with many rules run; those that differ most come first."""
    units = (False, True) if problem.clock == "lockstep" and not _even(problem) else (False,)
    for deep, splits, patience, unit, reserves, first, ahead in itertools.product(
        (True, False), (True, False), (0.0, 1.0), units, (True, False), (False, True), _AHEAD
    ):
        if patience and not splits:  # there are no W
            continue
        limits = greedy.limits(problem, ahead)
        schedule = greedy.build(problem, greedy.Rules(limits, splits, first, deep, reserves, patience, unit))
        yield schedule, f"rules {_told(ahead)}" + ("" if splits else ", whole backwards")
        if problem.clock == "lockstep" and not splits:
            yield dataclasses.replace(schedule, strict=False), f"rules {_told(ahead)}, whole backwards, ahead"


def _of_beams(problem: Problem, width: int) -> Iterator[tuple[Schedule, str]]:
    """What beam searches find; a wider one is not always better."""
    for share, splits in ((1, True), (4, True), (4, False)):
        if width >= share:
            schedule = beam.search(problem, width=width // share, splits=splits)
            if schedule is not None:
                yield schedule, "a beam search" + ("" if splits else ", whole backwards")


def _even(problem: Problem) -> bool:
    """Whether all actions have the same time, and messages none."""
    times = {time for kind in (Kind.F, Kind.I, Kind.W) for time in problem.durations[kind]}
    return len(times) == 1 and not any(problem.costs.per_stage(problem.num_stages)["hop"])


def _told(ahead: float) -> str:
    return "without limits" if ahead == math.inf else f"with {ahead:g} beyond a round trip"


def _of_blocks(problem: Problem) -> Iterator[tuple[Schedule, str]]:
    for block in blocks.regular(problem):
        yield blocks.repeated(problem, block), f"a regular block of {block.period} units"
    shortest, _ = blocks.solved(problem)
    if shortest is not None:
        yield blocks.repeated(problem, shortest), f"the shortest block, of {shortest.period} units"
