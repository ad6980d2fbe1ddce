"""Cuts a pipeline that continues from batch to batch into windows, each the ticks of one train step.

A window ends when the last gradient of its batch exists. It also runs work of later batches that the semantics allow,
so the pipeline does not drain. After a start with an empty pipeline, step s runs window s: the first windows fill the
pipeline, then the windows repeat in a cycle. Since a window numbers microbatches from its own batch and gives versions
as ages, repeated windows have the same table, except for the slots of what is in flight when they begin. These slots
are renamed between steps, as `Window.renames` says.

Invariant: the windows, run one after another with slots renamed between them, are the whole table of the schedule.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fiddlex.errors import ScheduleError
from fiddlex.schedules.buffers import Sizes, largest
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.pipeline_spec import PipelineSpec, make_spec, slots_of
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.semantics import Semantics
from fiddlex.schedules.table import BACKWARD_HOPS, COLUMNS, FORWARD_HOPS, NONE

# For each column of microbatches, the columns that are cleared with it.
_WORK = {
    "embed": ("embed", "embed_version"),
    "head": ("head", "head_version"),
    "embed_backward": ("embed_backward", "embed_backward_version"),
    **{
        f"{slot}_microbatch": tuple(name for name in COLUMNS if name.startswith(f"{slot}_"))
        for slot in ("forward", "backward", "weight", "spill", "fetch")
    },
}


class Renames(NamedTuple):
    """For each inbox and stash, int32 [rank, slot]: slot i of the next window is slot `rename[i]` of this window.

    An inbox's last slot takes what nobody reads; it keeps its number.
    """

    forward_inbox: Any
    backward_inbox: Any
    stash: Any
    weight_stash: Any
    host_stash: Any


@dataclasses.dataclass(frozen=True)
class Window:
    """The ticks of one train step."""

    # int32 [tick, rank, column] (`table.Tick`); microbatches count from the window's batch, ages from its start.
    table: np.ndarray
    renames: Renames  # between this window and the next

    def until(self, microbatch: int) -> np.ndarray:
        """The table without the work for `microbatch` and later ones, for the last windows of a phase."""
        table = self.table.copy()
        for name, columns in _WORK.items():
            dropped = table[..., COLUMNS[name]] >= microbatch
            for column in columns:
                table[..., COLUMNS[column]][dropped] = NONE
        return table


@dataclasses.dataclass(frozen=True)
class Windows:
    """All windows of a pipeline."""

    lowered: Lowered  # the schedule of several batches from which the windows were cut
    semantics: Semantics
    first: tuple[Window, ...]  # the windows that fill the pipeline
    cycle: tuple[Window, ...]  # the windows that repeat from then on

    def __getitem__(self, step: int) -> Window:
        """The window of a step, counted from 0 with an empty pipeline."""
        late = step - len(self.first)
        return self.first[step] if late < 0 else self.cycle[late % len(self.cycle)]

    def over(self, num_steps: int) -> Lowered:
        """The first `num_steps` steps as one lowered schedule; ValueError if `unroll` was asked for fewer."""
        batches = self.lowered.schedule.num_microbatches // self.semantics.batch_size
        if num_steps > batches - self.semantics.num_versions:
            raise ValueError(f"{num_steps} steps asked of a pipeline unrolled over {batches} batches")
        end = sum(len(self[step].table) for step in range(num_steps))
        rows = [
            [(action, tick) for action, tick in zip(row, ticks, strict=True) if tick < end]
            for row, ticks in zip(self.lowered.schedule.actions, self.lowered.ticks, strict=True)
        ]
        actions = tuple(tuple(action for action, _ in row) for row in rows)
        ticks = tuple(tuple(tick for _, tick in row) for row in rows)
        schedule = dataclasses.replace(self.lowered.schedule, actions=actions)
        return dataclasses.replace(self.lowered, schedule=schedule, ticks=ticks, table=self.lowered.table[:end])

    @property
    def period(self) -> float:
        """Average number of ticks of a step once the pipeline is full."""
        return sum(len(window.table) for window in self.cycle) / len(self.cycle)

    @property
    def longest(self) -> int:
        return max(len(window.table) for window in (*self.first, *self.cycle))

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Buffer counts that are enough for every window."""
        size = self.semantics.batch_size
        tables = [window.table for window in (*self.first, *self.cycle)]
        latest = {name: max(int(table[..., COLUMNS[name]].max()) // size for table in tables) for name in _WORK}
        return Sizes(
            slots_of(self.lowered),
            versions=self.semantics.num_versions,
            batches=1 + max(latest.values()),
            sums=_open_at_once(self.lowered, size),
            outer_sums=1 + max(latest["head"], latest["embed_backward"]),
            finished=1 + max(int(_finishing(table).max(initial=0)) // size for table in tables),
            head_versions=self.semantics.num_versions if self.semantics.delays[0] != self.semantics.delays[-1] else 0,
        )


def unroll(
    batch: Schedule,
    semantics: Semantics,
    longer: Callable[[int], Schedule] | None = None,
    *,
    num_steps: int = 0,
    spills: bool = False,
) -> Windows:
    """Runs a schedule of `semantics.batch_size` microbatches over batch after batch and cuts it into windows.

    `longer` returns the same kind of schedule for another number of microbatches. `unroll` then compares one such
    schedule over all batches with `batch` repeated, and uses the one with fewer ticks per step. `num_steps` is the
    least number of steps to unroll, for `Windows.over`.

    Raises:
      ScheduleError: when the windows of neither schedule become periodic.
    """
    size = semantics.batch_size
    kinds: list[Callable[[int], Schedule]] = [lambda number: repeat(batch, number)]
    if longer is not None:
        kinds.insert(0, lambda number: longer(number * size))
    found, failures = [], []
    for kind in kinds:
        try:
            found.append(_unroll(kind, semantics, num_steps, spills=spills))
        except ScheduleError as error:
            failures.append(error)
    if not found:
        raise failures[-1]
    return min(found, key=lambda windows: windows.period)


def _unroll(kind: Callable[[int], Schedule], semantics: Semantics, num_steps: int, *, spills: bool) -> Windows:
    ahead = semantics.num_versions
    for least in (4 + ahead, 10 + 3 * ahead, 40 + 7 * ahead):
        num_batches = max(least, num_steps) + ahead
        lowered = lower(kind(num_batches), semantics, spills=spills)
        tables = _cut(lowered, semantics)[: num_batches - ahead]  # the last windows lack later batches
        found = _find_cycle([_work(table, lowered) for table in tables])
        if found:
            start, length = found
            windows = _renamed(lowered, semantics, tables[: start + length], start)
            return Windows(lowered, semantics, windows[:start], windows[start:])
    raise ScheduleError(
        f"schedule {lowered.schedule.name}: over {num_batches} batches its ticks never become periodic, so it "
        "cannot continue from batch to batch. Use pipeline.semantics=sync, or another schedule."
    )


def _finishing(table: np.ndarray) -> np.ndarray:
    """The microbatches that complete a chunk's gradient of a batch."""
    slots = ("backward", "weight")
    parts = [table[..., COLUMNS[f"{slot}_microbatch"]][table[..., COLUMNS[f"{slot}_finishes"]] == 1] for slot in slots]
    return np.concatenate(parts)


def _open_at_once(lowered: Lowered, batch_size: int) -> int:
    """The largest number of batches whose gradients one chunk accumulates at the same time."""
    spans: dict[int, dict[int, list[int]]] = {}  # [stage][batch] → times at which an action adds to the gradient
    for row, ticks in zip(lowered.schedule.actions, lowered.ticks, strict=True):
        for action, tick in zip(row, ticks, strict=True):
            if action.kind is not Kind.F:
                moments = spans.setdefault(action.stage, {}).setdefault(action.microbatch // batch_size, [])
                moments.append(2 * tick + (action.kind is Kind.W))
    most = 1
    for batches in spans.values():
        for moments in batches.values():
            begins = min(moments)
            most = max(most, sum(min(other) <= begins <= max(other) for other in batches.values()))
    return most


def common_spec(windows: Sequence[Windows]) -> PipelineSpec:
    """The spec of a program that runs any of several pipelines, with the same batch and different semantics."""
    first = windows[0]
    return make_spec(first.lowered, first.semantics.batch_size, largest([each.sizes for each in windows]))


def repeat(batch: Schedule, num_batches: int) -> Schedule:
    """Repeats the schedule of a batch; microbatch numbers continue across batches."""
    size = batch.num_microbatches
    rows = (
        tuple(a._replace(microbatch=a.microbatch + number * size) for number in range(num_batches) for a in row)
        for row in batch.actions
    )
    return dataclasses.replace(batch, actions=tuple(rows))


def _cut(lowered: Lowered, semantics: Semantics) -> list[np.ndarray]:
    ends: dict[int, int] = {}
    for row, ticks in zip(lowered.schedule.actions, lowered.ticks, strict=True):
        for action, tick in zip(row, ticks, strict=True):
            if action.kind is not Kind.F:
                batch = semantics.batch(action.microbatch)
                ends[batch] = max(ends.get(batch, 0), tick + 1)
    starts = [0, *(ends[batch] for batch in range(len(ends) - 1))]
    stages = [lowered.schedule.stages_of(rank) for rank in range(lowered.schedule.num_ranks)]
    return [
        _from_own_batch(lowered.table[starts[batch] : ends[batch]].copy(), batch, semantics, stages)
        for batch in range(len(ends))
    ]


def _from_own_batch(table: np.ndarray, batch: int, semantics: Semantics, stages: Sequence[Sequence[int]]) -> np.ndarray:
    """Numbers microbatches from the first of `batch`, and turns versions into ages."""
    size = semantics.batch_size
    for name in _WORK:
        column = table[..., COLUMNS[name]]
        column[column != NONE] -= batch * size
    for name, stage in (("embed", 0), ("head", -1), ("embed_backward", 0)):
        version, microbatch = table[..., COLUMNS[f"{name}_version"]], table[..., COLUMNS[name]]
        busy = microbatch != NONE
        version[busy] = semantics.delays[stage] - microbatch[busy] // size
    for slot in ("forward", "backward", "weight"):
        version, chunk, microbatch = (
            table[..., COLUMNS[f"{slot}_{name}"]] for name in ("version", "chunk", "microbatch")
        )
        for rank, own in enumerate(stages):
            busy = chunk[:, rank] != NONE
            delays = np.asarray([semantics.delays[stage] for stage in own])
            version[busy, rank] = delays[chunk[busy, rank]] - microbatch[busy, rank] // size
    return table


def _work(table: np.ndarray, lowered: Lowered) -> bytes:
    """The work and the arrivals of a window without its slot numbers, as bytes that can be compared."""
    work = table.copy()
    for name, trash in (
        (FORWARD_HOPS, lowered.forward_inbox_slots),
        (BACKWARD_HOPS, lowered.backward_inbox_slots),
    ):
        arrivals = work[..., lowered.places(name)]
        work[..., lowered.places(name)] = arrivals != trash
    work[..., [COLUMNS[name] for name in lowered.accesses if name in COLUMNS]] = NONE
    return work.tobytes()


def _find_cycle(work: list[bytes]) -> tuple[int, int] | None:
    """Returns the first window of the cycle and the cycle's length; None unless the cycle runs at least twice."""
    for length in range(1, len(work) // 2 + 1):
        start = len(work) - length
        while start > 0 and work[start - 1] == work[start - 1 + length]:
            start -= 1
        if len(work) - start >= 2 * length:
            return start, length
    return None


def _renamed(lowered: Lowered, semantics: Semantics, tables: list[np.ndarray], start: int) -> tuple[Window, ...]:
    """Makes windows of tables; slots are renamed only after the last window, when the cycle starts again."""
    slots = slots_of(lowered)
    same = Renames(*(_same(lowered, size) for size in slots))
    begins = np.cumsum([0, *map(len, tables)])
    shift = (len(tables) - start) * semantics.batch_size
    renames = []
    for memory, size in zip(Renames._fields, slots, strict=True):
        rename = _same(lowered, size)
        first, again = (list(_in_flight(lowered, memory, begins[number])) for number in (start, len(tables)))
        for rank in range(lowered.schedule.num_ranks):
            now = {(chunk, microbatch - shift): slot for (chunk, microbatch), slot in again[rank].items()}
            assert now.keys() == first[rank].keys(), f"{memory} of rank {rank}: {now} in flight, not {first[rank]}"
            taken = {first[rank][value]: slot for value, slot in now.items()}
            spare = iter([slot for slot in range(size) if slot not in taken.values()])
            rename[rank] = [taken[slot] if slot in taken else next(spare) for slot in range(size)]
        renames.append(rename)
    last = len(tables) - 1
    return tuple(Window(table, Renames(*renames) if i == last else same) for i, table in enumerate(tables))


def _same(lowered: Lowered, size: int) -> np.ndarray:
    return np.tile(np.arange(size, dtype=np.int32), (lowered.schedule.num_ranks, 1))


def _in_flight(lowered: Lowered, memory: str, tick: int) -> Iterator[dict[tuple[int, int], int]]:
    """For each rank, what a memory holds when `tick` begins: chunk and microbatch of the reader → slot."""
    columns = [(access, lowered.places(name)) for name, access in lowered.accesses.items() if access.memory == memory]
    columns.sort(key=lambda column: column[0].phase, reverse=True)
    for rank in range(lowered.schedule.num_ranks):
        holds: dict[int, tuple[int, int]] = {}
        # Backwards from the end of the table: a slot is in use when its next access is a read, not a write.
        for row in lowered.table[tick:, rank][::-1].tolist():
            for access, places in columns:
                for slot in (row[place] for place in places):
                    if access.reader is None:
                        holds.pop(slot, None)
                    elif slot != NONE:
                        chunk, microbatch = (
                            row[COLUMNS[f"{access.reader}_{name}"]] for name in ("chunk", "microbatch")
                        )
                        holds[slot] = (chunk, microbatch)
        yield {value: slot for slot, value in holds.items()}
