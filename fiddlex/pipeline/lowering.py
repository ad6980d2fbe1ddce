"""From a schedule to one table of ticks, the only thing that the executor reads.

A row of the table is what one device does in one tick: which chunk and microbatch fill its three slots, where their
inputs lie, and where what arrives is put. Memory is given out by lifetime: a slot of the stash (what a forward leaves
for its backward), of the weight stash (what I leaves for W) or of an inbox is taken when it is written and free again
after it was last read. There are as many slots of each kind as are ever alive at once on one rank; the inboxes have one
more, the trash, for what idle neighbours send.

Invariant: in the order of `Phase` nothing is read before it is written or overwritten before it was last read, and
each action of the schedule stands in the table once. Imports no jax.
"""

import dataclasses
import enum
import heapq
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.pipeline.schedule import Action, Kind, Schedule
from fiddlex.pipeline.semantics import Semantics
from fiddlex.pipeline.ticks import Ticks, fills_pairs, place

NONE = -1


class Phase(enum.IntEnum):
    """What happens in a tick, in this order on every device; lifetimes are counted in phases."""

    EMBED = 0  # the gradients of the tick before set out
    FORWARD = 1
    BETWEEN = 2  # activations set out, gradients arrive; the head scores if `Lowered.scores_between`
    BACKWARD = 3
    WEIGHT = 4
    END = 5  # activations arrive; the head scores otherwise; the first stage's gradient reaches the embedding


class Tick(NamedTuple):
    """The columns of the table by name; `NONE` where there is nothing to do or to read.

    The first six are the same on all devices, since all embed and score; all other columns are the device's own.
    Behind these columns stand those of the hops: for each of `Lowered.forward_shifts`, then for each of
    `Lowered.backward_shifts`, the inbox slot for what arrives from the rank that many before.

    Attributes:
      embed: microbatch that enters the first stage.
      head: microbatch that leaves the last stage and is scored, between the slots or at the tick's end.
      embed_backward: microbatch whose gradient leaves the first stage.
      embed_version: age of the weights that embed, in updates, 0 the newest.
      head_version: age of the weights that score.
      embed_backward_version: age of the weights that embedded the microbatch whose gradient leaves.
      is_last: 1 when this device's forward is the last stage's.
      is_first: 1 when this device's backward is the first stage's.
      head_inbox: slot of the backward inbox for the gradient that the head gives; the trash on other devices.
      forward_chunk: chunk that runs forward.
      forward_microbatch: on which microbatch.
      forward_inbox: its input; NONE: what was embedded in this tick.
      forward_stash: slot for what its backward needs.
      forward_version: age of its weights.
      backward_chunk: chunk that runs backward, B or I.
      backward_microbatch: on which microbatch.
      backward_inbox: the gradient of its output.
      backward_stash: what its forward left.
      backward_version: age of its weights, that of its forward.
      backward_weight_stash: slot for what W needs; NONE when the weight gradient is taken at once (B).
      backward_finishes: 1 when the chunk's gradient for a batch is complete with this.
      weight_chunk: chunk whose weight gradient is taken (W).
      weight_microbatch: for which microbatch.
      weight_stash: what its forward left.
      weight_weight_stash: what its I left.
      weight_version: age of its weights, that of its forward.
      weight_finishes: 1 when the chunk's gradient for a batch is complete with this.
    """

    embed: int = NONE
    head: int = NONE
    embed_backward: int = NONE
    embed_version: int = NONE
    head_version: int = NONE
    embed_backward_version: int = NONE
    is_last: int = 0
    is_first: int = 0
    head_inbox: int = NONE
    forward_chunk: int = NONE
    forward_microbatch: int = NONE
    forward_inbox: int = NONE
    forward_stash: int = NONE
    forward_version: int = NONE
    backward_chunk: int = NONE
    backward_microbatch: int = NONE
    backward_inbox: int = NONE
    backward_stash: int = NONE
    backward_version: int = NONE
    backward_weight_stash: int = NONE
    backward_finishes: int = NONE
    weight_chunk: int = NONE
    weight_microbatch: int = NONE
    weight_stash: int = NONE
    weight_weight_stash: int = NONE
    weight_version: int = NONE
    weight_finishes: int = NONE


COLUMNS = {name: index for index, name in enumerate(Tick._fields)}


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as the executor runs it.

    Attributes:
      schedule: what was lowered.
      ticks: the tick of each action, [rank][position].
      scores_between: whether the head scores between the forward and the backward slot, so that the last stage can turn
        its forward into a gradient within a tick. Where no tick has both it scores at the end, where all ranks meet
        anyway: between the slots they would wait for each other once more.
      table: int32 [tick, rank, column], see `Tick`.
      forward_shifts: how many ranks further an activation goes, for each way that occurs, 0 … p−1.
      backward_shifts: the same for gradients.
      forward_inbox_slots: slots of the inbox of activations, without the trash, which is the slot behind them.
      backward_inbox_slots: of the inbox of gradients, likewise.
      stash_slots: of the stash.
      weight_stash_slots: of the weight stash.
    """

    schedule: Schedule
    ticks: Ticks
    scores_between: bool
    table: np.ndarray
    forward_shifts: tuple[int, ...]
    backward_shifts: tuple[int, ...]
    forward_inbox_slots: int
    backward_inbox_slots: int
    stash_slots: int
    weight_stash_slots: int

    @property
    def num_ticks(self) -> int:
        """Length of the table."""
        return len(self.table)

    def column(self, name: str) -> np.ndarray:
        """A column of the table by its name in `Tick`, [tick, rank]."""
        return self.table[..., COLUMNS[name]]


def lower(schedule: Schedule, semantics: Semantics | None = None) -> Lowered:
    """Places a legal schedule, or the forwards of one, on ticks and gives out its memory.

    Args:
      schedule: of one batch, or of several one after another.
      semantics: of several, see `ticks.place`.

    Raises:
      ScheduleError: when the schedule cannot be run to its end.
    """
    return _Lowering(schedule, semantics).lowered()


class _Value(NamedTuple):
    """Something kept in a slot: on which rank, from when to when, and the cells of the table that name its slot."""

    rank: int
    written: tuple[int, Phase]
    read: tuple[int, Phase]
    cells: tuple[tuple[int, int], ...]  # tick, column


class _Lowering:
    """Fills the table: first the work, then the slots, one kind of memory after another."""

    def __init__(self, schedule: Schedule, semantics: Semantics | None):
        self.schedule, self.ticks = schedule, place(schedule, semantics)
        self._tick = {
            action: tick
            for row, ticks in zip(schedule.actions, self.ticks, strict=True)
            for action, tick in zip(row, ticks, strict=True)
        }
        self._batch_size = semantics.batch_size if semantics else schedule.num_microbatches
        self._last_stage = schedule.num_stages - 1
        self._scores_between = fills_pairs(schedule)
        self._forward_shifts, self._backward_shifts = self._shifts(+1), self._shifts(-1)
        num_columns = len(COLUMNS) + len(self._forward_shifts) + len(self._backward_shifts)
        shape = (1 + max(self._tick.values()), schedule.num_ranks, num_columns)
        self._table = np.full(shape, NONE, np.int32)

    def lowered(self) -> Lowered:
        self._fill_work()
        return Lowered(
            self.schedule,
            self.ticks,
            self._scores_between,
            self._table,
            self._forward_shifts,
            self._backward_shifts,
            forward_inbox_slots=self._fill_forward_inbox(),
            backward_inbox_slots=self._fill_backward_inbox(),
            stash_slots=self._give_slots(self._stashed()),
            weight_stash_slots=self._give_slots(self._weight_stashed()),
        )

    def _fill_work(self) -> None:
        ranks = range(self.schedule.num_ranks)
        chunks = {stage: i for rank in ranks for i, stage in enumerate(self.schedule.stages_of(rank))}
        self._table[..., COLUMNS["is_last"]] = self._table[..., COLUMNS["is_first"]] = 0
        for action, tick in self._tick.items():
            stage, kind, microbatch = action
            slot = {Kind.F: "forward", Kind.W: "weight"}.get(kind, "backward")
            row = self._table[tick, self.schedule.placement[stage]]
            row[COLUMNS[f"{slot}_chunk"]] = chunks[stage]
            row[COLUMNS[f"{slot}_microbatch"]] = microbatch
            row[COLUMNS[f"{slot}_version"]] = 0
            if kind is Kind.F and stage == 0:
                self._table[tick, :, COLUMNS["embed"]] = microbatch
                self._table[tick, :, COLUMNS["embed_version"]] = 0
            if kind is Kind.F and stage == self._last_stage:
                self._table[tick, :, COLUMNS["head"]] = microbatch
                self._table[tick, :, COLUMNS["head_version"]] = 0
                row[COLUMNS["is_last"]] = 1
            if slot == "backward" and stage == 0:
                self._table[tick, :, COLUMNS["embed_backward"]] = microbatch
                self._table[tick, :, COLUMNS["embed_backward_version"]] = 0
                row[COLUMNS["is_first"]] = 1
        for action in self._finishing():
            slot = "weight" if action.kind is Kind.W else "backward"
            self._table[self._tick[action], self._rank(action), COLUMNS[f"{slot}_finishes"]] = 1

    def _finishing(self) -> Iterable[Action]:
        """For every stage and batch the last action that adds to the gradient."""
        last: dict[tuple[int, int], Action] = {}
        for action in sorted(self._tick, key=lambda action: (self._tick[action], action.kind is Kind.W)):
            if action.kind in (Kind.B, Kind.W):
                last[action.stage, action.microbatch // self._batch_size] = action
        return last.values()

    def _stashed(self) -> Iterator[_Value]:
        for forward in self._all(Kind.F):
            backward, weight = self._backward_of(forward), forward._replace(kind=Kind.W)
            if backward:
                cells = [self._cell(forward, "forward_stash"), self._cell(backward, "backward_stash")]
                read = (self._tick[backward], Phase.BACKWARD)
                if weight in self._tick:
                    cells.append(self._cell(weight, "weight_stash"))
                    read = (self._tick[weight], Phase.WEIGHT)
                yield _Value(self._rank(forward), (self._tick[forward], Phase.FORWARD), read, tuple(cells))

    def _weight_stashed(self) -> Iterator[_Value]:
        for weight in self._all(Kind.W):
            inputs = weight._replace(kind=Kind.I)
            cells = (self._cell(inputs, "backward_weight_stash"), self._cell(weight, "weight_weight_stash"))
            written, read = (self._tick[inputs], Phase.BACKWARD), (self._tick[weight], Phase.WEIGHT)
            yield _Value(self._rank(weight), written, read, cells)

    def _fill_forward_inbox(self) -> int:
        first = len(COLUMNS)
        columns = {shift: first + i for i, shift in enumerate(self._forward_shifts)}
        values = []
        for forward in self._all(Kind.F):
            if forward.stage:
                sent, read = self._tick[forward._replace(stage=forward.stage - 1)], self._tick[forward]
                cells = (
                    (sent, columns[self._shift(forward.stage - 1, forward.stage)]),
                    self._cell(forward, "forward_inbox"),
                )
                values.append(_Value(self._rank(forward), (sent, Phase.END), (read, Phase.FORWARD), cells))
        return self._give_slots(values, trash=list(columns.values()))

    def _fill_backward_inbox(self) -> int:
        first = len(COLUMNS) + len(self._forward_shifts)
        columns = {shift: first + i for i, shift in enumerate(self._backward_shifts)}
        values = []
        for forward in self._all(Kind.F):
            backward = self._backward_of(forward)
            if backward is None:
                continue
            phase = Phase.BETWEEN
            if forward.stage == self._last_stage:  # the gradient comes from the head
                arrival = self._cell(forward, "head_inbox")
                phase = Phase.BETWEEN if self._scores_between else Phase.END
            else:
                after = self._backward_of(forward._replace(stage=forward.stage + 1))
                assert after is not None
                arrival = self._tick[after] + 1, columns[self._shift(after.stage, forward.stage)]
            read = (self._tick[backward], Phase.BACKWARD)
            cells = arrival, self._cell(backward, "backward_inbox")
            values.append(_Value(self._rank(forward), (arrival[0], phase), read, cells))
        return self._give_slots(values, trash=[COLUMNS["head_inbox"], *columns.values()])

    def _give_slots(self, values: Iterable[_Value], trash: Sequence[int] = ()) -> int:
        """Colours the lifetimes of each rank with as few slots as can be; cells left in `trash` columns get one more.

        Returns:
          The slots, without the trash.
        """
        num_slots = 0
        by_rank: dict[int, list[_Value]] = {}
        for value in values:
            by_rank.setdefault(value.rank, []).append(value)
        for rank, alive in by_rank.items():
            free: list[int] = []
            taken: list[tuple[tuple[int, Phase], int]] = []  # last read, slot
            for value in sorted(alive, key=lambda value: value.written):
                while taken and taken[0][0] < value.written:
                    heapq.heappush(free, heapq.heappop(taken)[1])
                slot = heapq.heappop(free) if free else len(taken)
                heapq.heappush(taken, (value.read, slot))
                num_slots = max(num_slots, slot + 1)
                for tick, column in value.cells:
                    self._table[tick, rank, column] = slot
        for column in trash:
            cells = self._table[..., column]
            cells[cells == NONE] = num_slots
        return num_slots

    def _all(self, kind: Kind) -> Iterator[Action]:
        return (action for action in self._tick if action.kind is kind)

    def _backward_of(self, forward: Action) -> Action | None:
        candidates = (forward._replace(kind=kind) for kind in (Kind.B, Kind.I))
        return next((action for action in candidates if action in self._tick), None)

    def _rank(self, action: Action) -> int:
        return self.schedule.placement[action.stage]

    def _cell(self, action: Action, column: str) -> tuple[int, int]:
        return self._tick[action], COLUMNS[column]

    def _shift(self, source: int, target: int) -> int:
        placement = self.schedule.placement
        return (placement[target] - placement[source]) % self.schedule.num_ranks

    def _shifts(self, step: int) -> tuple[int, ...]:
        backwards = any(action.kind is not Kind.F for action in self._tick)
        if step < 0 and not backwards:
            return ()
        stages = range(self._last_stage)
        pairs = ((s, s + 1) if step > 0 else (s + 1, s) for s in stages)
        return tuple(sorted({self._shift(*pair) for pair in pairs}))
