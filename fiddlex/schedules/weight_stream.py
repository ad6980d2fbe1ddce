"""When each chunk's weights come from the host, and when its gradients go there (`pipeline.weights_memory=host`).

A device then holds the weights of two chunks: those of the chunk that runs, and those of the next one, which come
meanwhile. It holds the gradients of two chunks too: of the chunk that runs, and of the one before, which leave. So the
number of chunks does not change what a device holds, and a model may be larger than the memory of all devices
together, as on the virtual devices of Harmony (Li et al., PVLDB 2022).

The schedule must be chunk-major (`breadth_first`): on each rank, all microbatches pass chunk 0, then chunk 1 and so on,
and come back from the last chunk to chunk 0. Then chunk c always has place c modulo 2 on the device. All chunks come in
the forward passes, and all but the last two, which are still there, again in the backward passes. So 2v − 2 chunks of
weights and v chunks of gradients cross the link in a batch, whatever the number of microbatches.

Copies to and from the host cannot be conditional (`fiddlex.pipeline.streamed_weights`). Therefore a copy of a few rows,
a transfer, starts every few ticks, a period, each way. Weights that arrive replace those of the chunk before the
present one at the end of the period. Gradients leave from the start of the period on. Chunk 0 has no period: its
weights come before the first tick, and its gradients go after the last.
"""

import dataclasses
import itertools

import numpy as np

from fiddlex.errors import ScheduleError
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.table import NONE

CHUNKS_HELD = 2  # of weights, and of gradients
FEWEST_CHUNKS = CHUNKS_HELD + 1  # with fewer, the devices would hold all weights
_MOST_REPEATED = 0.5  # a transfer has more rows where the periods would else have so many more than are needed, a share


@dataclasses.dataclass(frozen=True)
class WeightStream:
    """The transfers of a batch. Rows are those of a rank's stacked weights (`fiddlex.schedules.placement`), from 0."""

    rows: int  # of a transfer
    period: int  # ticks from the start of a transfer to that of the next
    rows_per_chunk: int
    loads: np.ndarray  # int32 [period, rank]: first row of the weights that come, or `NONE`
    # int32 [period, rank]: first row of the gradients that go; `NONE`: none go, as without backward passes.
    stores: np.ndarray

    @property
    def trains(self) -> bool:
        """Whether gradients go to the host."""
        return bool((self.stores != NONE).any())

    def held_text(self, num_chunks: int) -> str:
        """What a device holds, for people, where each rank has `num_chunks` chunks."""
        layers, ticks = (
            f"{word}{'s' * (number > 1)}" for word, number in (("layer", self.rows), ("tick", self.period))
        )
        every = f"every {self.period} {ticks}" if self.period > 1 else f"every {ticks}"
        return (
            f"the weights of {CHUNKS_HELD} of {num_chunks} chunks on a device, to which {self.rows} {layers} may come "
            f"{every}"
        )

    @property
    def chunks_each_way(self) -> tuple[int, int]:
        """How many chunks of weights come to a rank in a batch, and how many of gradients go, on the busiest rank."""
        transfers = -(-self.rows_per_chunk // self.rows)
        loads, stores = (int((each != NONE).sum(axis=0).max()) // transfers for each in (self.loads, self.stores))
        return loads + 1, stores + self.trains  # with chunk 0 before the first tick and after the last

    @property
    def early_stores(self) -> np.ndarray:
        """`stores` where each period has a copy: one without work copies what a later store of the row replaces."""
        stores = np.concatenate([self.stores, np.zeros_like(self.stores[:1])])  # chunk 0 goes after the last tick
        places = np.where(stores == NONE, len(stores), np.arange(len(stores))[:, None])
        following = np.minimum.accumulate(places[::-1])[::-1]
        return np.take_along_axis(stores, following, axis=0)[:-1]


def stream_weights(lowered: Lowered, *, rows_per_chunk: int) -> WeightStream:
    """Spreads the transfers of a batch over its ticks.

    Raises:
      ScheduleError: when a rank has fewer than three chunks, a backward pass is split, or the order is not chunk-major.
    """
    ranks = [_Rank.of(lowered, rank) for rank in range(lowered.schedule.num_ranks)]
    shortest = min(end - start for rank in ranks for _, start, end in (*rank.loads, *rank.stores))
    rows, period = transfer_of(rows_per_chunk, shortest)
    loads, stores = (
        np.full((-(-lowered.num_ticks // period), len(ranks)), NONE, np.int32) for _ in ("loads", "stores")
    )
    for number, rank in enumerate(ranks):
        # Weights that arrive with tick t replace others that ran in tick t or before. Gradients leave before tick t.
        for table, windows, late in ((loads, rank.loads, 1), (stores, rank.stores, 0)):
            for chunk, start, end in windows:
                periods = itertools.count(start // period + 1 - late)
                for first, place in zip(_pieces(rows_per_chunk, rows), periods, strict=False):
                    assert start < (place + late) * period <= end
                    table[place, number] = chunk * rows_per_chunk + first
    return WeightStream(rows, period, rows_per_chunk, loads, stores)


def _pieces(rows_per_chunk: int, rows: int) -> list[int]:
    """The first rows of the transfers of a chunk; the last two may have rows in common."""
    return [min(first, rows_per_chunk - rows) for first in range(0, rows_per_chunk, rows)]


def transfer_of(rows_per_chunk: int, ticks: int) -> tuple[int, int]:
    """The number of rows of a transfer and the number of ticks of a period, so that a chunk passes in `ticks` ticks.

    Under `breadth_first` the ticks are as many as the microbatches or the ranks, whichever are more. Any `ticks`
    successive ticks have as many starts of periods as a chunk has transfers. A device has room for one transfer besides
    two chunks, so the fewest rows are best, unless far more rows would be copied than a chunk has.
    """
    for rows in range(1, rows_per_chunk + 1):
        number = -(-rows_per_chunk // rows)
        if number > ticks:
            continue
        period = ticks // number
        if rows * ticks <= (1 + _MOST_REPEATED) * rows_per_chunk * period:
            break
    return rows, period


@dataclasses.dataclass(frozen=True)
class _Rank:
    """The windows in which the chunks of a rank may come and go, each a chunk and two numbers of ticks."""

    loads: list[tuple[int, int, int]]  # for each chunk that comes, the first tick of the chunk before it, and its own
    # For each chunk that goes, the tick that completes its gradient, and that of the next chunk.
    stores: list[tuple[int, int, int]]

    @classmethod
    def of(cls, lowered: Lowered, rank: int) -> "_Rank":
        forwards, backwards = (lowered.column(f"{slot}_chunk")[:, rank] for slot in ("forward", "backward"))
        number = len(lowered.schedule.stages_of(rank))
        trains = lowered.stash_slots > 0
        _check(lowered, rank, forwards, backwards)
        begins, _ = _runs(forwards, number)
        loads = [(chunk, begins[chunk - 1], begins[chunk]) for chunk in range(1, number)]
        stores = []
        if trains:
            begins, ends = _runs(backwards, number)
            back = range(number - 1, -1, -1)
            loads += [(chunk, begins[chunk + 1], begins[chunk]) for chunk in back[2:]]
            stores = [(chunk, ends[chunk] - 1, ends[chunk - 1] - 1) for chunk in back[:-1]]
        return cls(loads, stores)


def _runs(chunks: np.ndarray, number: int) -> tuple[list[int], list[int]]:
    """The tick in which each chunk runs first, and the one after its last, given the chunk of each tick."""
    ticks = [np.flatnonzero(chunks == chunk) for chunk in range(number)]
    return [int(each[0]) for each in ticks], [int(each[-1]) + 1 for each in ticks]


def _check(lowered: Lowered, rank: int, forwards: np.ndarray, backwards: np.ndarray) -> None:
    """Raises ScheduleError unless the weights of a rank's chunks can come from the host."""
    schedule, number = lowered.schedule, len(lowered.schedule.stages_of(rank))
    if number < FEWEST_CHUNKS:
        raise ScheduleError(
            f"schedule {schedule.name} has {number} chunk{'s' * (number > 1)} on rank {rank}: a device holds the "
            f"weights of two chunks, and with fewer than {FEWEST_CHUNKS} chunks it would hold all. Use breadth_first "
            f"with {FEWEST_CHUNKS} chunks or more, or leave the weights on the devices."
        )
    if lowered.weight_stash_slots:
        raise ScheduleError(
            f"schedule {schedule.name} splits backward passes into I and W: weights can only come from the host for "
            "whole backward passes (B). Use breadth_first, or leave the weights on the devices."
        )
    forward, backward = forwards[forwards != NONE], backwards[backwards != NONE]
    back_first = len(backward) and np.flatnonzero(backwards != NONE)[0] < np.flatnonzero(forwards != NONE)[-1]
    if back_first or (np.diff(forward) < 0).any() or (np.diff(backward) > 0).any():
        raise ScheduleError(
            f"schedule {schedule.name} is not chunk-major on rank {rank}: weights can only come from the host where "
            "all microbatches pass one chunk before the next, first forward and then backward. Use breadth_first, or "
            "leave the weights on the devices."
        )
