"""Lockstep: the tick of every action, when all ranks step through one table together.

A tick has three slots in this order: one forward, one backward (B or I) and one W. Activations sent in a tick arrive at
its end, input gradients at the next tick's backward slot, so a neighbour can use either one tick later; the last stage
turns its forward into a gradient within the tick. Two rules place a schedule's actions:

- With whole backwards (B) in it, a rank fills all three slots of a tick where it can. Forwards may then run ahead of
  backwards that precede them in the schedule, as a round trip through the pipe takes twice as many ticks as stages: at
  most `2·peak − 1` are in flight where the schedule itself holds `peak`, which is what 1F1B needs to go on without a
  stall. Nothing else changes its place.
- With all backwards split into I and W, each rank takes one action a tick, in the schedule's order: the actions are of
  about equal length then, and no rank waits for another's longer tick.

Invariant: placing keeps the order of each kind on a rank and never moves a backward before an action that precedes it.
Imports no jax.
"""

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from fiddlex.errors import ScheduleError
from fiddlex.pipeline.schedule import Action, Kind, Schedule
from fiddlex.pipeline.semantics import Semantics
from fiddlex.pipeline.validate import validate

Ticks = tuple[tuple[int, ...], ...]  # [rank][position] → tick

SLOTS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))


def place(schedule: Schedule, semantics: Semantics | None = None) -> Ticks:
    """The tick of each action of a legal schedule, or of one that has forwards alone (`forward_schedule`).

    Args:
      schedule: of one batch, or of several one after another.
      semantics: of several: a forward waits for the update that its weights come from.

    Raises:
      ScheduleError: when the schedule cannot be run to its end.
    """
    pairs = fills_pairs(schedule)
    ranks = [_Rank(row, pairs=pairs) for row in schedule.actions]
    updates = _Updates(schedule, semantics) if semantics else None
    done: set[Action] = set()
    tick = 0
    while any(rank.left for rank in ranks):
        before = len(done)
        for kinds in SLOTS:
            ran = []  # counts when the slot is over: what an action needs of another stage fills the same slot there
            for rank in ranks:
                action = rank.next(kinds, tick)
                if not action or not done.issuperset(action.needs(schedule.num_stages)):
                    continue
                if updates is None or updates.allow(action):
                    rank.run(action, tick)
                    ran.append(action)
            done.update(action.product for action in ran)
            if updates:
                updates.note(ran)
        if len(done) == before:
            validate(schedule)  # shows where it stalls
            raise ScheduleError(
                f"schedule {schedule.name}: no rank can go on in tick {tick}, since the forwards of a batch wait for "
                "updates that come after them. Give each batch's actions before those of the next but one."
            )
        tick += 1
    return tuple(tuple(rank.ticks) for rank in ranks)


def fills_pairs(schedule: Schedule) -> bool:
    """Whether a forward and a backward may share a tick: where any backward is whole."""
    return any(action.kind is Kind.B for row in schedule.actions for action in row)


def forward_schedule(placement: Sequence[int], num_microbatches: int) -> Schedule:
    """The forwards alone, for evaluation: in groups of as many microbatches as ranks, each group stage by stage."""
    num_ranks = 1 + max(placement)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    for start in range(0, num_microbatches, num_ranks):
        group = range(start, min(start + num_ranks, num_microbatches))
        for stage, rank in enumerate(placement):
            rows[rank] += [Action(stage, Kind.F, microbatch) for microbatch in group]
    return Schedule("forward", tuple(map(tuple, rows)), tuple(placement))


class _Updates:
    """Which updates are done: one after another, each when every backward pass of its batch has run."""

    def __init__(self, schedule: Schedule, semantics: Semantics):
        self._semantics, self._done = semantics, 0
        actions = (action for row in schedule.actions for action in row if action.kind is not Kind.F)
        self._left = Counter(semantics.batch(action.microbatch) for action in actions)

    def allow(self, action: Action) -> bool:
        """Whether the weights for an action are there."""
        if action.kind is not Kind.F:
            return True
        batch, delay = self._semantics.batch(action.microbatch), self._semantics.delays[action.stage]
        return batch - delay <= self._done

    def note(self, ran: Iterable[Action]) -> None:
        """Counts actions that have run."""
        self._left.subtract(self._semantics.batch(action.microbatch) for action in ran if action.kind is not Kind.F)
        while self._done in self._left and not self._left[self._done]:
            self._done += 1


class _Rank:
    """One rank's list, how far it has come, and what its own order allows next."""

    def __init__(self, row: Sequence[Action], *, pairs: bool):
        self.ticks = [-1] * len(row)
        self.left = len(row)
        self._row, self._pairs = row, pairs
        self._forwards = deque(i for i, action in enumerate(row) if action.kind is Kind.F)
        self._others = deque(i for i, action in enumerate(row) if action.kind is not Kind.F)
        self._cap = 2 * _peak(row) - 1 if self._others else math.inf
        self._in_flight, self._last_tick = 0, -1

    def next(self, kinds: tuple[Kind, ...], tick: int) -> Action | None:
        """The action that may fill a slot of these kinds in this tick."""
        forward = Kind.F in kinds
        queue, other = (self._forwards, self._others) if forward else (self._others, self._forwards)
        if not queue or self._row[queue[0]].kind not in kinds:
            return None
        first = not other or queue[0] < other[0]
        if not self._pairs:
            allowed = first and tick > self._last_tick
        else:
            allowed = self._in_flight < self._cap if forward else first
        return self._row[queue[0]] if allowed else None

    def run(self, action: Action, tick: int) -> None:
        """Notes that what `next` gave runs in this tick."""
        queue = self._forwards if action.kind is Kind.F else self._others
        self.ticks[queue.popleft()] = self._last_tick = tick
        self.left -= 1
        self._in_flight += _held_by(action)


def _held_by(action: Action) -> int:
    """What an action adds to the stage inputs that a rank holds: F takes one, B or W gives it back."""
    return {Kind.F: 1, Kind.I: 0}.get(action.kind, -1)


def _peak(row: Sequence[Action]) -> int:
    held = peak = 0
    for action in row:
        held += _held_by(action)
        peak = max(peak, held)
    return peak
