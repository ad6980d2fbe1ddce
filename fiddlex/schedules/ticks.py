"""Lockstep: the tick of every action, when all ranks step through one table together.

A tick has three slots, in this order: one forward, one backward (B or I) and one W. Activations sent in a tick arrive
at its end, and input gradients before the next tick's backward slot, so a neighbour can use either one tick later. The
last stage turns its forward into a gradient within the tick. Three rules place a schedule's actions:

- If the schedule has whole backwards (B) and is not strict, a rank fills as many of a tick's three slots as it can. A
  round trip through the pipe takes twice as many ticks as there are stages, so forwards may run ahead of backwards that
  precede them in the schedule. Where the schedule itself has at most `peak` forwards in flight on a rank, at most
  `2·peak − 1` are in flight on the ticks; 1F1B needs that many to continue without a stall. All other actions keep the
  schedule's order.
- If all backwards are split into I and W, each rank runs one action per tick, in the schedule's order. The actions then
  have about equal lengths, and no rank waits for another rank's longer tick.
- If the schedule is strict (`Schedule.strict`), each rank runs one action per tick too. A rank then holds exactly the
  activations that the order says: p − r microbatches in 1F1B. Beside the B of other ranks an F takes as long as a B.

Invariant: placing keeps the order of each kind on a rank and never moves a backward before an action that precedes it.
"""

import itertools
import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import NOTHING, Action, Kind, Schedule, execution_order
from fiddlex.schedules.semantics import Semantics
from fiddlex.schedules.validate import validate

Ticks = tuple[tuple[int, ...], ...]  # [rank][position] → tick

SLOTS = ((Kind.F,), (Kind.B, Kind.I), (Kind.W,))
SLOT_OF = {kind: slot for slot, kinds in enumerate(SLOTS) for kind in kinds}
_FORWARD = SLOT_OF[Kind.F]

_HELD = {Kind.F: 1, Kind.B: -1, Kind.I: 0, Kind.W: -1}  # change in the number of stage inputs that a rank holds


def place(schedule: Schedule, semantics: Semantics | None = None) -> Ticks:
    """Returns the tick of each action of a legal schedule, or of one with forwards only (`forward_schedule`).

    Args:
      schedule: the schedule of one batch, or of several batches one after another.
      semantics: those of several batches: a forward waits for the update that produces its weights; None: it does not.

    Raises:
      ScheduleError: when the schedule cannot run to its end.
    """
    actions, (neighbour, own) = schedule.numbered, schedule.needs
    pairs, slots = fills_pairs(schedule), sorted({SLOT_OF[action.kind] for action in actions})
    if not pairs and semantics is None and (ticks := in_order(schedule)):
        return ticks
    ranks = [_Rank(row, start, pairs=pairs) for row, start in zip(schedule.actions, schedule.starts, strict=False)]
    updates = _Updates(schedule, semantics) if semantics else None
    done = bytearray(len(actions) + 2)
    done[NOTHING] = True  # the last two entries are those of MISSING and NOTHING; MISSING is never done
    left, tick = len(actions), 0
    while left:
        before = left
        for slot in slots:
            ran = []  # marked as done only after the slot: no action can use what another rank runs in the same slot
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


def in_order(schedule: Schedule) -> Ticks | None:
    """The earliest ticks if each rank runs one action per tick, in order; None if the schedule stalls."""
    # The loop in `place` gives the same ticks, since an action needs of other ranks only actions of its own slot.
    neighbour = schedule.needs.neighbour
    ticks = [-1] * (len(schedule.numbered) + 2)  # plus MISSING and NOTHING
    last, left = [-1] * schedule.num_ranks, len(schedule.numbered)
    for rank, number in execution_order(schedule):
        # What an action needs of its own stage ran in an earlier tick of the same rank.
        ticks[number] = last[rank] = 1 + max(last[rank], ticks[neighbour[number]])
        left -= 1
    return tuple(tuple(ticks[start:end]) for start, end in itertools.pairwise(schedule.starts)) if not left else None


def fills_pairs(schedule: Schedule) -> bool:
    """Whether a forward and a backward may share a tick: true if a schedule that is not strict has a B."""
    return not schedule.strict and schedule.has_whole


class Ahead(NamedTuple):
    """What a placement on ticks moved, on one rank."""

    forwards: tuple[Action, ...]  # those that run before a backward which precedes them in the schedule, in order
    passed: Action  # the first such backward of the first of them
    held: int  # the most forward passes of a stage that the rank holds on the ticks
    held_in_order: int  # the most that it would hold in the schedule's order


def moved_ahead(schedule: Schedule, ticks: Ticks) -> dict[int, Ahead]:
    """Returns, for each rank on which the ticks change the schedule's order, what runs earlier than the order says."""
    moved = {}
    for rank, (row, own) in enumerate(zip(schedule.actions, ticks, strict=True)):
        forwards, latest = [], -1  # the latest tick of a backward so far; within a tick, the forward runs first
        for action, tick in zip(row, own, strict=True):
            if action.kind is not Kind.F:
                latest = max(latest, tick)
            elif tick <= latest:
                forwards.append((action, tick))
        if forwards:
            first, at = forwards[0]
            before = row[: row.index(first)]
            passed = (a for a, tick in zip(before, own, strict=False) if a.kind is not Kind.F and tick >= at)
            run = sorted(zip(own, row, strict=True), key=lambda pair: (pair[0], SLOT_OF[pair[1].kind]))
            held, in_order = _most_held(action for _, action in run), _most_held(row)
            moved[rank] = Ahead(tuple(action for action, _ in forwards), next(passed), held, in_order)
    return moved


def order_facts(schedule: Schedule, ticks: Ticks) -> dict[str, Any]:
    """The order of the ticks, for JSON: `order`, `ahead` or `strict`, and `moved`, each `Ahead` with its rank."""
    moved = [
        {
            "rank": rank,
            "forwards": list(map(str, ahead.forwards)),
            "passed": str(ahead.passed),
            "held": ahead.held,
            "held_in_order": ahead.held_in_order,
        }
        for rank, ahead in moved_ahead(schedule, ticks).items()
    ]
    return {"order": "ahead" if fills_pairs(schedule) else "strict", "moved": moved}


def _most_held(actions: Iterable[Action]) -> int:
    """The most forward passes of a stage that a rank holds while it runs these actions in this order."""
    return max(itertools.accumulate(_HELD[action.kind] for action in actions))


def forward_schedule(placement: Sequence[int], num_microbatches: int, *, chunk_major: bool = False) -> Schedule:
    """A schedule of forwards only, for evaluation: groups of one microbatch per rank, each stage by stage.

    With `chunk_major`, all microbatches are one group, so that each rank takes up each chunk once.
    """
    num_ranks = 1 + max(placement)
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]
    size = num_microbatches if chunk_major else num_ranks
    for start in range(0, num_microbatches, size):
        group = range(start, min(start + size, num_microbatches))
        for stage, rank in enumerate(placement):
            rows[rank] += [Action(stage, Kind.F, microbatch) for microbatch in group]
    return Schedule("forward", tuple(map(tuple, rows)), tuple(placement))


class _Updates:
    """Counts the updates that are done, in order; an update is done when all backward passes of its batch have run."""

    def __init__(self, schedule: Schedule, semantics: Semantics):
        self._semantics, self._done = semantics, 0
        actions = (action for row in schedule.actions for action in row if action.kind is not Kind.F)
        self._left = Counter(semantics.batch(action.microbatch) for action in actions)

    def allow(self, action: Action) -> bool:
        """Whether the update that produces an action's weights is done."""
        if action.kind is not Kind.F:
            return True
        batch, delay = self._semantics.batch(action.microbatch), self._semantics.delays[action.stage]
        return batch - delay <= self._done

    def note(self, ran: Iterable[Action]) -> None:
        self._left.subtract(self._semantics.batch(action.microbatch) for action in ran if action.kind is not Kind.F)
        while self._done in self._left and not self._left[self._done]:
            self._done += 1


class _Rank:
    """One rank's actions, the first with number `start`: which have run, and which may run next."""

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
        """The number of the action that may run in a slot of this tick; None if no action may."""
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
        position = (self._forwards if slot == _FORWARD else self._others).popleft()
        self.ticks[position] = self._last_tick = tick
        self._in_flight += self._changes[position]
