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
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.pipeline.columns import KIND_NUMBERS, Columns
from fiddlex.pipeline.schedule import Kind, Schedule
from fiddlex.pipeline.semantics import Semantics
from fiddlex.pipeline.ticks import SLOTS, Ticks, fills_pairs, place

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


class _Lowering:
    """Fills the table: first the work, then the slots, one kind of memory after another.

    Actions go by their numbers, in arrays (`Columns`); none is -1.
    """

    def __init__(self, schedule: Schedule, semantics: Semantics | None):
        self.schedule, self.ticks = schedule, place(schedule, semantics)
        self._columns = Columns.of(schedule, self.ticks)
        self._batch_size = semantics.batch_size if semantics else schedule.num_microbatches
        self._last_stage = schedule.num_stages - 1
        self._scores_between = fills_pairs(schedule)
        self._neighbour = np.asarray(schedule.needs.neighbour)
        self._forward_of, self._input_of, self._weight_of = self._passes()
        self._forward_shifts, self._backward_shifts = self._shifts(+1), self._shifts(-1)
        num_columns = len(COLUMNS) + len(self._forward_shifts) + len(self._backward_shifts)
        shape = (1 + int(self._columns.tick.max()), schedule.num_ranks, num_columns)
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
            stash_slots=self._fill_stash(),
            weight_stash_slots=self._fill_weight_stash(),
        )

    def _passes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The forwards that have a backward, what gives the gradient of the input of each, and its W or -1."""
        own = np.asarray(self.schedule.needs.own)
        inputs, weights = self._columns.numbers(Kind.B, Kind.I), self._columns.numbers(Kind.W)
        weight_of = np.full(len(own), -1)
        weight_of[own[weights]] = weights
        inputs = inputs[np.argsort(own[inputs])]
        return own[inputs], inputs, weight_of[inputs]

    def _fill_work(self) -> None:
        ranks, columns = range(self.schedule.num_ranks), self._columns
        chunks = np.zeros(self.schedule.num_stages, np.int64)
        for rank in ranks:
            stages = self.schedule.stages_of(rank)
            chunks[list(stages)] = range(len(stages))
        for slot, kinds in zip(("forward", "backward", "weight"), SLOTS, strict=True):
            numbers = columns.numbers(*kinds)
            self._put(numbers, f"{slot}_chunk", chunks[columns.stage[numbers]])
            self._put(numbers, f"{slot}_microbatch", columns.microbatch[numbers])
            self._put(numbers, f"{slot}_version", 0)
        forwards, inputs = columns.numbers(Kind.F), columns.numbers(Kind.B, Kind.I)
        enter, leave = (forwards[columns.stage[forwards] == stage] for stage in (0, self._last_stage))
        come_back = inputs[columns.stage[inputs] == 0]
        for name, numbers in (("embed", enter), ("head", leave), ("embed_backward", come_back)):
            ticks = columns.tick[numbers]
            self._table[ticks, :, COLUMNS[name]] = columns.microbatch[numbers, None]
            self._table[ticks, :, COLUMNS[f"{name}_version"]] = 0
        self._table[..., COLUMNS["is_last"]] = self._table[..., COLUMNS["is_first"]] = 0
        self._put(leave, "is_last", 1)
        self._put(come_back, "is_first", 1)
        finishing = self._finishing()
        late = columns.kind[finishing] == KIND_NUMBERS[Kind.W]
        self._put(finishing[late], "weight_finishes", 1)
        self._put(finishing[~late], "backward_finishes", 1)

    def _finishing(self) -> np.ndarray:
        """For every stage and batch the last action that adds to the gradient."""
        numbers = self._columns.numbers(Kind.B, Kind.W)
        _, stage, kind, microbatch, tick = (column[numbers] for column in self._columns)
        batch = microbatch // self._batch_size
        order = np.lexsort((kind == KIND_NUMBERS[Kind.W], tick, batch, stage))
        changes = (np.diff(each[order], append=-1) != 0 for each in (stage, batch))
        return numbers[order[np.logical_or(*changes)]]

    def _fill_stash(self) -> int:
        tick, forwards, inputs, weights = self._columns.tick, self._forward_of, self._input_of, self._weight_of
        split = weights >= 0
        read = np.where(split, _moment(tick[weights], Phase.WEIGHT), _moment(tick[inputs], Phase.BACKWARD))
        slots = self._slots(forwards, _moment(tick[forwards], Phase.FORWARD), read)
        self._put(forwards, "forward_stash", slots)
        self._put(inputs, "backward_stash", slots)
        self._put(weights[split], "weight_stash", slots[split])
        return _number(slots)

    def _fill_weight_stash(self) -> int:
        tick, split = self._columns.tick, self._weight_of >= 0
        inputs, weights = self._input_of[split], self._weight_of[split]
        written, read = _moment(tick[inputs], Phase.BACKWARD), _moment(tick[weights], Phase.WEIGHT)
        slots = self._slots(weights, written, read)
        self._put(inputs, "backward_weight_stash", slots)
        self._put(weights, "weight_weight_stash", slots)
        return _number(slots)

    def _fill_forward_inbox(self) -> int:
        tick, forwards = self._columns.tick, self._columns.numbers(Kind.F)
        forwards = forwards[self._neighbour[forwards] >= 0]
        senders = self._neighbour[forwards]
        slots = self._slots(forwards, _moment(tick[senders], Phase.END), _moment(tick[forwards], Phase.FORWARD))
        arrivals = self._arrivals(senders, forwards, self._forward_shifts, first=len(COLUMNS))
        self._table[tick[senders], self._columns.rank[forwards], arrivals] = slots
        self._put(forwards, "forward_inbox", slots)
        return self._fill_trash(_number(slots), [*range(len(COLUMNS), len(COLUMNS) + len(self._forward_shifts))])

    def _fill_backward_inbox(self) -> int:
        tick, first = self._columns.tick, len(COLUMNS) + len(self._forward_shifts)
        inputs, senders = self._input_of, self._neighbour[self._input_of]
        scored = senders < 0  # of the last stage: the gradient comes from the head
        arrives = np.where(scored, tick[self._forward_of], tick[senders] + 1)
        phases = np.where(scored, Phase.BETWEEN if self._scores_between else Phase.END, Phase.BETWEEN)
        slots = self._slots(inputs, _moment(arrives, phases), _moment(tick[inputs], Phase.BACKWARD))
        arrivals = self._arrivals(senders, inputs, self._backward_shifts, first=first)
        self._table[arrives, self._columns.rank[inputs], np.where(scored, COLUMNS["head_inbox"], arrivals)] = slots
        self._put(inputs, "backward_inbox", slots)
        trash = [COLUMNS["head_inbox"], *range(first, first + len(self._backward_shifts))]
        return self._fill_trash(_number(slots), trash)

    def _slots(self, owners: np.ndarray, written: np.ndarray, read: np.ndarray) -> np.ndarray:
        """Colours the lifetimes of what each rank keeps with as few slots as can be.

        Args:
          owners: for each thing kept an action of its rank, by number.
          written: the moment from which on each is kept.
          read: the moment at which each is last read.

        Returns:
          The slot of each.
        """
        ranks = self._columns.rank[owners]
        order = np.lexsort((written, ranks))
        rank = -1
        slots: list[int] = []
        free: list[int] = []
        taken: list[tuple[int, int]] = []  # last read, slot
        for own, begins, ends in zip(*(each[order].tolist() for each in (ranks, written, read)), strict=True):
            if own != rank:
                rank, free, taken = own, [], []
            while taken and taken[0][0] < begins:
                heapq.heappush(free, heapq.heappop(taken)[1])
            slots.append(heapq.heappop(free) if free else len(taken))
            heapq.heappush(taken, (ends, slots[-1]))
        result = np.empty(len(order), np.int64)
        result[order] = slots
        return result

    def _put(self, numbers: np.ndarray, column: str, values: np.ndarray | int) -> None:
        """Writes where actions stand in the table."""
        self._table[self._columns.tick[numbers], self._columns.rank[numbers], COLUMNS[column]] = values

    def _fill_trash(self, num_slots: int, columns: Sequence[int]) -> int:
        for column in columns:
            cells = self._table[..., column]
            cells[cells == NONE] = num_slots
        return num_slots

    def _arrivals(self, senders: np.ndarray, receivers: np.ndarray, shifts: Sequence[int], *, first: int) -> np.ndarray:
        """The columns of the hops from senders to receivers."""
        rank = self._columns.rank
        return first + np.searchsorted(shifts, (rank[receivers] - rank[senders]) % self.schedule.num_ranks)

    def _shifts(self, step: int) -> tuple[int, ...]:
        if step < 0 and not len(self._input_of):
            return ()
        hops = step * np.diff(self.schedule.placement) % self.schedule.num_ranks
        return tuple(np.unique(hops).tolist())


def _moment(tick: np.ndarray, phase: np.ndarray | Phase) -> np.ndarray:
    """Ticks and phases as one number, in order of time."""
    return len(Phase) * tick + phase


def _number(slots: np.ndarray) -> int:
    return 1 + int(slots.max(initial=-1))
