"""Lowers a schedule to one table of ticks, the only form that the executor reads.

Memory is allocated by lifetime: a slot of the stash (what a forward saves for its backward), of the weight stash (what
an I saves for its W) or of an inbox is taken when it is written and freed after its last read. Each memory has as many
slots as are ever in use at once on one rank; each inbox has one more, the trash, for what idle neighbours send.

With `spills`, what a forward saves can wait on the host. It is copied there (a spill) in the tick of the rank's next
forward, and back (a fetch) in the tick of the rank's last backward before its own, so that each copy has a slot of work
beside it. From the fetch on, it is in the stash until its last read. A value stays in the stash if its rank has no such
forward or backward, or if the fetch would come before the spill; and so do all values of a rank that needs no more
slots without spills than some rank needs with them. Where every rank runs one action per tick, a value waits on the
host between I and W instead, if these are further apart than F and I.

Invariant: in the order of `TickPhase`, nothing is read before it is written or overwritten before its last read, and
each action of the schedule is in the table exactly once.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.schedules.buffers import IN_TRANSIT
from fiddlex.schedules.columns import KIND_NUMBERS, Columns
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.semantics import Semantics
from fiddlex.schedules.table import BACKWARD_HOPS, COLUMNS, FORWARD_HOPS, NONE, Access, TickPhase, accesses
from fiddlex.schedules.ticks import SLOTS, Ticks, fills_pairs, place


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A schedule as the executor runs it."""

    schedule: Schedule
    ticks: Ticks  # of each action, [rank][position]
    # Whether the head scores between a tick's forward and backward slots; else at its end, as no tick runs both.
    scores_between: bool
    table: np.ndarray  # int32 [tick, rank, column], see `table.Tick`
    forward_shifts: tuple[int, ...]  # distances that activations travel, in ranks ahead modulo p, each once
    backward_shifts: tuple[int, ...]  # distances that gradients travel, in ranks ahead modulo p, each once
    forward_inbox_slots: int  # for activations; without the trash, which is the slot after them
    backward_inbox_slots: int  # for gradients; without the trash, which is the slot after them
    stash_slots: int  # for what forwards save for their backwards
    weight_stash_slots: int  # for what I saves for W
    host_stash_slots: int  # without the trash, which is the slot after them; 0 if nothing is spilled

    @property
    def num_ticks(self) -> int:
        """Number of ticks in the table."""
        return len(self.table)

    @property
    def accesses(self) -> dict[str, Access]:
        """Which columns name slots of which memory (`table.accesses`)."""
        return accesses(scores_between=self.scores_between)

    def column(self, name: str) -> np.ndarray:
        """A column of the table by its name in `Tick`, [tick, rank]."""
        return self.table[..., COLUMNS[name]]

    def with_idle(self, num_ticks: int) -> np.ndarray:
        """The table with idle ticks at its end, `num_ticks` in all."""
        idle = np.full((1, *self.table.shape[1:]), NONE, np.int32)
        idle[..., [COLUMNS["is_last"], COLUMNS["is_first"]]] = 0
        for name, access in self.accesses.items():
            if access.memory.endswith("inbox") and access.reader is None:  # what idle neighbours send
                idle[..., self.places(name)] = getattr(self, f"{access.memory}_slots")
        return np.concatenate([self.table, np.repeat(idle, num_ticks - self.num_ticks, axis=0)])

    def places(self, name: str) -> range:
        """The positions in a row of a column of `Tick`, or of the columns of the hops."""
        first, backward = len(COLUMNS), len(COLUMNS) + len(self.forward_shifts)
        if name == FORWARD_HOPS:
            return range(first, backward)
        if name == BACKWARD_HOPS:
            return range(backward, backward + len(self.backward_shifts))
        return range(COLUMNS[name], COLUMNS[name] + 1)


def lower(schedule: Schedule, semantics: Semantics | None = None, *, spills: bool = False) -> Lowered:
    """Places a legal schedule, or a schedule of forwards only, on ticks and allocates its memory.

    Args:
      schedule: the schedule of one batch, or of several batches one after another.
      semantics: the weight semantics of several batches (`ticks.place`); None: one batch.
      spills: whether what forwards save may wait on the host.

    Raises:
      ScheduleError: when the schedule cannot run to its end.
    """
    return _Lowering(schedule, semantics, spills=spills).lowered()


class _Lowering:
    """Fills the table: the work, then the slots. Arrays refer to actions by number (`Columns`); -1: no action."""

    def __init__(self, schedule: Schedule, semantics: Semantics | None, *, spills: bool):
        self.schedule, self.ticks, self._spills = schedule, place(schedule, semantics), spills
        self._columns = Columns.of(schedule, self.ticks)
        self._batch_size = semantics.batch_size if semantics else schedule.num_microbatches
        self._last_stage = schedule.num_stages - 1
        # At a tick's end all ranks synchronize anyway; to score between the slots, they synchronize once more.
        self._scores_between = fills_pairs(schedule)
        self._accesses = accesses(scores_between=self._scores_between)
        self._neighbour = np.asarray(schedule.needs.neighbour)
        self._forward_of, self._input_of, self._weight_of = self._passes()
        self._chunks = np.zeros(schedule.num_stages, np.int64)  # the chunk that each stage is on its rank
        for stages in map(schedule.stages_of, range(schedule.num_ranks)):
            self._chunks[list(stages)] = range(len(stages))
        self._forward_shifts, self._backward_shifts = self._shifts(+1), self._shifts(-1)
        num_columns = len(COLUMNS) + len(self._forward_shifts) + len(self._backward_shifts)
        shape = (1 + int(self._columns.tick.max()), schedule.num_ranks, num_columns)
        self._table = np.full(shape, NONE, np.int32)

    def lowered(self) -> Lowered:
        self._fill_work()
        stash_slots, host_stash_slots = self._fill_stash()
        return Lowered(
            self.schedule,
            self.ticks,
            self._scores_between,
            self._table,
            self._forward_shifts,
            self._backward_shifts,
            forward_inbox_slots=self._fill_forward_inbox(),
            backward_inbox_slots=self._fill_backward_inbox(),
            stash_slots=stash_slots,
            weight_stash_slots=self._fill_weight_stash(),
            host_stash_slots=host_stash_slots,
        )

    def _passes(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the forwards that have a backward, the B or I of each, and the W of each or -1."""
        own = np.asarray(self.schedule.needs.own)
        inputs, weights = self._columns.numbers(Kind.B, Kind.I), self._columns.numbers(Kind.W)
        weight_of = np.full(len(own), -1)
        weight_of[own[weights]] = weights
        inputs = inputs[np.argsort(own[inputs])]
        return own[inputs], inputs, weight_of[inputs]

    def _fill_work(self) -> None:
        columns = self._columns
        for slot, kinds in zip(("forward", "backward", "weight"), SLOTS, strict=True):
            numbers = columns.numbers(*kinds)
            self._put(numbers, f"{slot}_chunk", self._chunks[columns.stage[numbers]])
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
        """Returns, for every stage and batch, the last action that adds to the gradient."""
        numbers = self._columns.numbers(Kind.B, Kind.W)
        _, stage, kind, microbatch, tick = (column[numbers] for column in self._columns)
        batch = microbatch // self._batch_size
        order = np.lexsort((kind == KIND_NUMBERS[Kind.W], tick, batch, stage))
        changes = (np.diff(each[order], append=-1) != 0 for each in (stage, batch))
        return numbers[order[np.logical_or(*changes)]]

    def _fill_stash(self) -> tuple[int, int]:
        """Fills the columns of the stash and of the host stash; returns the number of slots of each."""
        inputs, weights = self._input_of, self._weight_of
        waits, split = self._waits(), weights >= 0
        spilled = np.zeros_like(waits.can_spill)
        slots = self._stash_slots(waits, spilled)
        if self._spills:
            ranks, fewest = self._columns.rank[inputs], self._stash_slots(waits, waits.can_spill)
            needed, possible = (self._peaks(ranks, *pair) for pair in (slots, fewest))
            enough = np.minimum(needed, possible).max(initial=0)
            if enough + IN_TRANSIT < needed.max(initial=0):
                spilled = waits.can_spill & (needed > enough)[ranks]
                slots = self._stash_slots(waits, spilled)
        before, after = slots
        self._put(self._forward_of, "forward_stash", before)
        self._put(inputs, "backward_stash", np.where(waits.before_weight, before, after))
        self._put(weights[split], "weight_stash", after[split])
        return _number(np.concatenate(slots)), self._fill_host_stash(waits, spilled, *slots)

    def _fill_host_stash(self, waits: "_Waits", spilled: np.ndarray, before: np.ndarray, after: np.ndarray) -> int:
        """Fills the columns of spills and fetches, given `_stash_slots`; returns the number of slots on the host."""
        columns, owners, spills, fetches = self._columns, self._input_of[spilled], *waits.at(spilled)
        slots = self._slots(owners, self._moment("spill_host", spills), self._moment("fetch_host", fetches))
        chunks = self._chunks[columns.stage[owners]]
        for name, tick, stash in (("spill", spills, before), ("fetch", fetches, after)):
            values = {"chunk": chunks, "microbatch": columns.microbatch[owners], "stash": stash[spilled], "host": slots}
            for column, each in values.items():
                self._table[tick, columns.rank[owners], COLUMNS[f"{name}_{column}"]] = each
        return _number(slots)

    def _waits(self) -> "_Waits":
        tick, forwards, inputs, weights = self._columns.tick, self._forward_of, self._input_of, self._weight_of
        late = np.where(weights >= 0, tick[weights] - tick[inputs], 0) > tick[inputs] - tick[forwards]
        late &= not fills_pairs(self.schedule)  # else a rank could have two fetches in a tick
        begins, ends = np.where(late, inputs, forwards), np.where(late, weights, inputs)
        spill = self._neighbouring(begins, self._columns.numbers(Kind.F), after=True)
        fetch = self._neighbouring(ends, self._columns.numbers(Kind.B, Kind.I, Kind.W), after=False)
        can_spill = (spill >= 0) & (fetch >= spill)
        first = np.zeros_like(can_spill)  # of those with one tick on one rank
        first[np.unique(np.stack([self._columns.rank[begins], spill]), axis=1, return_index=True)[1]] = True
        return _Waits(spill, fetch, late, can_spill & first)

    def _neighbouring(self, numbers: np.ndarray, others: np.ndarray, *, after: bool) -> np.ndarray:
        """The tick of the first of `others` after each action on its rank, or of the last before it; -1: none."""
        length = len(self._table) + 1  # the moments of two ranks never meet
        times = self._columns.rank * length + self._columns.tick
        known = np.sort(times[others])
        # Others of the same tick do not count.
        place = np.searchsorted(known, times[numbers], side="right" if after else "left") - (not after)
        found = known[np.clip(place, 0, len(known) - 1)] if len(known) else np.full(len(numbers), -1)
        there = (place >= 0) & (place < len(known)) & (found // length == self._columns.rank[numbers])
        return np.where(there, found % length, -1)

    def _stash_slots(self, waits: "_Waits", spilled: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The slot of each value before its wait and after it, if the values `spilled` wait on the host."""
        tick, inputs, weights = self._columns.tick, self._input_of, self._weight_of
        written = self._moment("forward_stash", tick[self._forward_of])
        by_input, by_weight = (
            self._moment(f"{slot}_stash", tick[n]) for slot, n in (("backward", inputs), ("weight", weights))
        )
        last = np.where(weights >= 0, by_weight, by_input)
        leaves, returns = self._moment("spill_stash", waits.spill), self._moment("fetch_stash", waits.fetch)
        slots = self._slots(
            np.concatenate([inputs, inputs[spilled]]),
            np.concatenate([written, returns[spilled]]),
            np.concatenate([np.where(spilled, leaves, last), last[spilled]]),
        )
        before, after = slots[: len(inputs)], slots[: len(inputs)].copy()
        after[spilled] = slots[len(inputs) :]
        return before, after

    def _peaks(self, ranks: np.ndarray, *slots: np.ndarray) -> np.ndarray:
        """The number of slots that each rank uses, given the ranks of the values and the slots that each has."""
        peaks = np.zeros(self.schedule.num_ranks, np.int64)
        for each in slots:
            np.maximum.at(peaks, ranks, each + 1)
        return peaks

    def _fill_weight_stash(self) -> int:
        tick, split = self._columns.tick, self._weight_of >= 0
        inputs, weights = self._input_of[split], self._weight_of[split]
        written = self._moment("backward_left", tick[inputs])
        slots = self._slots(weights, written, self._moment("weight_left", tick[weights]))
        self._put(inputs, "backward_left", slots)
        self._put(weights, "weight_left", slots)
        return _number(slots)

    def _fill_forward_inbox(self) -> int:
        tick, forwards = self._columns.tick, self._columns.numbers(Kind.F)
        forwards = forwards[self._neighbour[forwards] >= 0]
        senders = self._neighbour[forwards]
        written, read = self._moment(FORWARD_HOPS, tick[senders]), self._moment("forward_inbox", tick[forwards])
        slots = self._slots(forwards, written, read)
        arrivals = self._arrivals(senders, forwards, self._forward_shifts, first=len(COLUMNS))
        self._table[tick[senders], self._columns.rank[forwards], arrivals] = slots
        self._put(forwards, "forward_inbox", slots)
        return self._fill_trash(_number(slots), [*range(len(COLUMNS), len(COLUMNS) + len(self._forward_shifts))])

    def _fill_backward_inbox(self) -> int:
        tick, first = self._columns.tick, len(COLUMNS) + len(self._forward_shifts)
        inputs, senders = self._input_of, self._neighbour[self._input_of]
        scored = senders < 0  # the last stage gets its gradient from the head
        arrives = np.where(scored, tick[self._forward_of], tick[senders] + 1)
        written = np.where(scored, self._moment("head_inbox", arrives), self._moment(BACKWARD_HOPS, arrives))
        slots = self._slots(inputs, written, self._moment("backward_inbox", tick[inputs]))
        arrivals = self._arrivals(senders, inputs, self._backward_shifts, first=first)
        self._table[arrives, self._columns.rank[inputs], np.where(scored, COLUMNS["head_inbox"], arrivals)] = slots
        self._put(inputs, "backward_inbox", slots)
        trash = [COLUMNS["head_inbox"], *range(first, first + len(self._backward_shifts))]
        return self._fill_trash(_number(slots), trash)

    def _slots(self, owners: np.ndarray, written: np.ndarray, read: np.ndarray) -> np.ndarray:
        """Assigns slots to the values that each rank stores, as few as possible; returns the slot of each value.

        For each value, `owners` has an action on its rank, `written` and `read` the moments of its write and last read.
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

    def _moment(self, column: str, tick: np.ndarray) -> np.ndarray:
        """When the slots that a column names are written or read in these ticks, as integers in order of time."""
        return len(TickPhase) * tick + self._accesses[column].phase

    def _put(self, numbers: np.ndarray, column: str, values: np.ndarray | int) -> None:
        self._table[self._columns.tick[numbers], self._columns.rank[numbers], COLUMNS[column]] = values

    def _fill_trash(self, num_slots: int, columns: Sequence[int]) -> int:
        for column in columns:
            cells = self._table[..., column]
            cells[cells == NONE] = num_slots
        return num_slots

    def _arrivals(self, senders: np.ndarray, receivers: np.ndarray, shifts: Sequence[int], *, first: int) -> np.ndarray:
        """Returns the hop column of each message from a sender to its receiver."""
        rank = self._columns.rank
        return first + np.searchsorted(shifts, (rank[receivers] - rank[senders]) % self.schedule.num_ranks)

    def _shifts(self, step: int) -> tuple[int, ...]:
        if step < 0 and not len(self._input_of):
            return ()
        hops = step * np.diff(self.schedule.placement) % self.schedule.num_ranks
        return tuple(np.unique(hops).tolist())


class _Waits(NamedTuple):
    """For each value of the stash, the time during which it can wait on the host."""

    spill: np.ndarray  # tick of the copy to the host
    fetch: np.ndarray  # tick of the copy back
    before_weight: np.ndarray  # whether it waits between I and W, and not before B or I
    # Whether both ticks exist, in this order, and no value before it on its rank has the same spill tick.
    can_spill: np.ndarray

    def at(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.spill[values], self.fetch[values]


def _number(slots: np.ndarray) -> int:
    return 1 + int(slots.max(initial=-1))
