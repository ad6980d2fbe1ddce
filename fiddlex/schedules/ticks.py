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
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import NOTHING, Action, Kind, Schedule
from fiddlex.schedules.semantics import Semantics
from fiddlex.schedules.validate import validate

Ticks = tuple[tuple[int, ...], ...]  # [rank][position] → tick

SLOTS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
SLOT_OF = {kind: slot for slot, kinds in enumerate(SLOTS) for kind in kinds}
_FORWARD = SLOT_OF[Kind.F]

_HELD = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}  # stage inputs that a rank holds more or less of


def place(schedule: Schedule, semantics: Semantics | None = None) -> Ticks:
    """The tick of each action of a legal schedule, or of one that has forwards alone (`forward_schedule`).

    Args:
      schedule: of one batch, or of several one after another.
      semantics: of several: a forward waits for the update that its weights come from.

    Raises:
      ScheduleError: when the schedule cannot be run to its end.
    """
    actions, (neighbour, own) = schedule.numbered, schedule.needs
    pairs, slots = fills_pairs(schedule), sorted({SLOT_OF[action.kind] for action in actions})
    ranks = [_Rank(row, start, pairs=pairs) for row, start in zip(schedule.actions, schedule.starts, strict=False)]
    updates = _Updates(schedule, semantics) if semantics else None
    done = bytearray(len(actions) + 2)
    done[NOTHING] = True  # the other of the two behind the actions is that of MISSING
    left, tick = len(actions), 0
    while left:
        before = left
        for slot in slots:
            ran = []  # counts when the slot is over: what an action needs of another stage fills the same slot there
            for rank in ranks:
                number = rank.next(slot, tick)
                if number is None or not (done[neighbour[number]] and done[own[number]]):
                    continue
                if updates is None or updates.allow(actions[number]):
                    rank.run(slot, tick)
                    ran.append(number)
            for number in ran:
                done[number] = True
            left -= len(ran)
            if updates:
                updates.note(actions[number] for number in ran)
        if left == before:
            validate(schedule)  # shows where it stalls
            raise ScheduleError(
                f"schedule {schedule.name}: no rank can go on in tick {tick}, since the forwards of a batch wait for "
                "updates that come after them. Give each batch's actions before those of the next but one."
            )
        tick += 1
    return tuple(tuple(rank.ticks) for rank in ranks)


def fills_pairs(schedule: Schedule) -> bool:
    """Whether a forward and a backward may share a tick: where any backward is whole."""
    return Kind.B in {action.kind for action in schedule.numbered}


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
    """One rank's list, how far it has come, and what its own order allows next.

    Args:
      row: the list.
      start: the number of its first action.
      pairs: whether a forward and a backward may share a tick.
    """

    def __init__(self, row: Sequence[Action], start: int, *, pairs: bool):
        self.ticks = [-1] * len(row)
        self._start, self._pairs = start, pairs
        self._slots = [SLOT_OF[action.kind] for action in row]
        self._changes = [_HELD[action.kind] for action in row]
        self._forwards = deque(i for i, slot in enumerate(self._slots) if slot == _FORWARD)
        self._others = deque(i for i, slot in enumerate(self._slots) if slot != _FORWARD)
        peak = max(itertools.accumulate(self._changes, initial=0))
        self._cap = 2 * peak - 1 if self._others else math.inf
        self._in_flight, self._last_tick = 0, -1

    def next(self, slot: int, tick: int) -> int | None:
        """The number of the action that may fill a slot in this tick."""
        forward = slot == _FORWARD
        queue, other = (self._forwards, self._others) if forward else (self._others, self._forwards)
        if not queue or self._slots[queue[0]] != slot:
            return None
        first = not other or queue[0] < other[0]
        if not self._pairs:
            allowed = first and tick > self._last_tick
        else:
            allowed = self._in_flight < self._cap if forward else first
        return self._start + queue[0] if allowed else None

    def run(self, slot: int, tick: int) -> None:
        """Notes that what `next` gave runs in this tick."""
        position = (self._forwards if slot == _FORWARD else self._others).popleft()
        self.ticks[position] = self._last_tick = tick
        self._in_flight += self._changes[position]
