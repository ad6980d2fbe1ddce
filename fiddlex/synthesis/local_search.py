"""Improves the order of one schedule by moving single actions, with the clock as judge.

A move takes an action of one rank to another place in the rank's order, but keeps the order of the microbatches of each
kind on each stage, since all microbatches are alike. A move is kept unless it makes the schedule worse, so that the
search can cross schedules that are equally good. Invariant: the result is legal, within the caps, and never worse than
the schedule that was given.
"""

import dataclasses
import random

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Schedule
from fiddlex.synthesis.problem import Judged, Problem

FARTHEST = 12  # places by which an action moves at most


def improve(
    problem: Problem, schedule: Schedule, judged: Judged, *, tries: int, seed: int
) -> tuple[Schedule, Judged, int]:
    """The best among `tries` moves from a legal schedule within the caps, of which `judged` says how good it is.

    Returns:
      The schedule, how good it is, and the number of moves that were judged: those that keep the order of microbatches.
    """
    rng, number = random.Random(seed), 0
    rows = [list(row) for row in schedule.actions]
    for _ in range(tries):
        rank = rng.randrange(len(rows))
        moved = _move(rows[rank], rng)
        if moved is None:
            continue
        candidate = dataclasses.replace(
            schedule, actions=tuple(tuple(moved if r == rank else row) for r, row in enumerate(rows))
        )
        number += 1
        try:
            result = problem.judge(candidate)
        except ScheduleError:  # the ranks would wait for each other
            continue
        if result is not None and not judged.better_than(result):
            rows[rank], schedule, judged = moved, candidate, result
    return schedule, judged, number


def _move(row: list[Action], rng: random.Random) -> list[Action] | None:
    """The row with one action elsewhere; None if the action that was drawn cannot move that way."""
    start = rng.randrange(len(row))
    action = row[start]
    end = start + rng.choice((-1, 1)) * rng.randint(1, FARTHEST)
    if not 0 <= end < len(row):
        return None
    passed = row[end:start] if end < start else row[start + 1 : end + 1]
    if any(_keep_their_order(action, other) for other in passed):
        return None
    moved = row[:start] + row[start + 1 :]
    moved.insert(end, action)
    return moved


def _keep_their_order(one: Action, other: Action) -> bool:
    """Whether two actions of a rank may not pass each other."""
    return one.stage == other.stage and (one.kind is other.kind or one.microbatch == other.microbatch)
