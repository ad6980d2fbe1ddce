"""Decides whether a pipeline of unequal stages has no stage slower than a bound, and with how few devices.

The dynamic program of Piper (NeurIPS 2021), section 4.1, has the least time for each run of last layers, number of
devices and sum of replicas. With the time bounded, a run of last layers needs only the fewest devices for each sum of
replicas, and of these entries only those that no other beats in both numbers. Of a stage it needs one number: the
largest sum of replicas, of the stage and all later ones, with which its microbatches in flight fit the memory while it
is fast enough.
"""

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from fiddlex.tools.unequal_stages.chain import Part, StageProblem
from fiddlex.tools.unequal_stages.choices import Frontiers
from fiddlex.tools.unequal_stages.stage_costs import StageCosts

ROUNDING = 1e-9  # relative error of seconds that rounding may have
_NONE = 2**30  # devices of an entry that no pipeline reaches


class Decision:
    """Answers for one set of sizes of stages and one cap on the memory.

    In the tables a row is a stage's layers, `_first[row]` to `_last[row]`, and a column is a number of replicas with a
    tensor size.
    """

    def __init__(
        self,
        problem: StageProblem,
        frontiers: Mapping[int, Frontiers],  # those of the problem's chain for each tensor size
        costs: StageCosts,
        *,
        sizes: Sequence[tuple[int, int]],  # numbers of replicas, with tensor sizes, that stages may have
        memory_bytes: float,  # bytes that a stage may take on each device
    ):
        self._count, self._problem = problem.num_layers, problem
        self._first, self._last = np.triu_indices(self._count)
        self._row = np.zeros((self._count, self._count), np.int64)
        self._row[self._first, self._last] = np.arange(len(self._first))
        self._replicas, self._tensor = (np.array(column) for column in zip(*sizes, strict=True))
        self._seconds, self._stash, rows = _joined([frontiers[size] for size in problem.chains])
        of_size = dict(zip(problem.chains, rows, strict=True))
        self._point = np.stack([of_size[t][self._first, self._last] for _, t in sizes], axis=1)
        self._extra = np.stack([costs.extra_s(*size)[self._first, self._last] for size in sizes], axis=1)
        self._fixed = np.stack([costs.fixed_bytes(*size)[self._first, self._last] for size in sizes], axis=1)
        self._room = memory_bytes - self._fixed
        self._most = min(problem.num_devices, problem.num_microbatches)

    @property
    def least_s(self) -> float:
        """A lower bound on the seconds of any pipeline: each layer's least work, spread over all devices."""
        each = self._point[self._row.diagonal()]
        work = (self._seconds[each, 0] * self._tensor).min(axis=1)
        return float(work.sum()) / self._problem.num_devices

    @property
    def whole_bytes(self) -> float:
        """Bytes within which there is a pipeline: of all layers on one replica, one microbatch at a time."""
        whole = self._row[0, -1]
        return float((self._fixed[whole] + self._stash[self._point[whole], 0]).min())

    def _reached(self, seconds: float) -> np.ndarray:
        """How many sums of each stage's frontier take no more than `seconds`, [row, column]."""
        allowed = (min(seconds, sys.float_info.max / self._replicas.max() / 2) - self._extra) * self._replicas
        allowed += np.abs(allowed) * ROUNDING
        low, high = np.zeros(self._point.shape, np.int64), np.full(self._point.shape, self._seconds.shape[1] - 1)
        while (low < high).any():
            middle = (low + high) // 2
            within = self._seconds[self._point, middle] <= allowed
            low, high = np.where(within, middle + 1, low), np.where(within, high, middle)
        return low

    def next_s(self, seconds: float) -> float:
        """The shortest time of a stage that is longer than `seconds`; infinite where there is none."""
        later = self._seconds[self._point, self._reached(seconds)] / self._replicas + self._extra
        return float(later.min())

    def _most_replicas(self, seconds: float) -> np.ndarray:
        """The largest sum of replicas, of a stage and all later ones, with which it is within time and memory.

        It is 0 where no sum is, and no more than the batch and the devices allow; [row, column].
        """
        reached = self._reached(seconds)
        stash = self._stash[self._point, np.maximum(reached - 1, 0)]
        in_flight = np.full(stash.shape, float(self._most))
        np.floor_divide(self._room, stash, out=in_flight, where=stash > 0)
        in_flight += (in_flight + 1) * stash <= self._room  # a quotient may be rounded
        in_flight = np.where((reached > 0) & (self._room >= 0), np.minimum(in_flight, self._most), 0)
        return np.minimum(in_flight.astype(np.int64) * self._replicas, self._most)

    def pipeline_within(self, seconds: float) -> list[Part] | None:
        """The pipeline of fewest devices whose stages take no more than `seconds`; None: there is none."""
        within = self._most_replicas(seconds)
        entries = _Entries(self._count, self._most)
        for first in range(self._count - 1, -1, -1):
            entries.add(first, *self._options(first, within, entries))
        fewest = entries.fewest[0]
        total = int(fewest.argmin())
        return list(self._parts(total, within, entries)) if fewest[total] < _NONE else None

    def _options(self, first: int, within: np.ndarray, entries: "_Entries") -> tuple[np.ndarray, ...]:
        """All stages that begin at layer `first`, each with each entry for the layers after it."""
        last, rest, devices = entries.after(first)
        bound = within[self._row[first, last]]  # [entry, column]
        total = rest[:, None] + self._replicas
        used = devices[:, None] + self._replicas * self._tensor
        entry, column = np.nonzero((total <= bound) & (used <= self._problem.num_devices))
        # sum of replicas and devices, with the entry's; the stage's column and last layer; the entry's sum
        return total[entry, column], used[entry, column], column, last[entry], rest[entry]

    def _parts(self, total: int, within: np.ndarray, entries: "_Entries") -> Iterator[Part]:
        """The stages of the entry for all layers with this sum of replicas."""
        first = 0
        while first < self._count:
            totals, used, columns, lasts, rests = self._options(first, within, entries)
            found = int(np.flatnonzero((totals == total) & (used == entries.fewest[first, total]))[-1])
            column, last = columns[found], int(lasts[found])
            yield Part(first, last, int(self._replicas[column]), int(self._tensor[column]))
            first, total = last + 1, int(rests[found])


class _Entries:
    """The fewest devices for the layers from `first` on, [first, sum of replicas]."""

    def __init__(self, count: int, most: int):
        self.fewest = np.full((count + 1, most + 1), _NONE)
        self.fewest[count, 0] = 0
        self._entries = {count: (np.zeros(1, np.int64), np.zeros(1, np.int64))}
        self._count = count

    def add(self, first: int, total: np.ndarray, devices: np.ndarray, *_: np.ndarray) -> None:
        """Enters the options for the layers from `first` on; keeps those that no other beats in both numbers."""
        fewest = self.fewest[first]
        np.minimum.at(fewest, total, devices)
        earlier = np.concatenate([[_NONE], np.minimum.accumulate(fewest)[:-1]])
        kept = np.flatnonzero(fewest < earlier)
        self._entries[first] = kept, fewest[kept]

    def after(self, first: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """For each entry after a stage that begins at `first`: the stage's last layer, sum of replicas, devices."""
        starts = range(first + 1, self._count + 1)
        last = np.repeat([start - 1 for start in starts], [len(self._entries[start][0]) for start in starts])
        rest, devices = (np.concatenate([self._entries[start][part] for start in starts]) for part in (0, 1))
        return last, rest, devices


def _joined(frontiers: Sequence[Frontiers]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """The tables of several chains as one, with the rows of each chain's runs of layers in it."""
    longest = max(each.seconds.shape[1] for each in frontiers)
    pads = [((0, 0), (0, longest - each.seconds.shape[1])) for each in frontiers]
    seconds = [np.pad(each.seconds, pad, constant_values=np.inf) for each, pad in zip(frontiers, pads, strict=True)]
    stash = [np.pad(each.stash, pad) for each, pad in zip(frontiers, pads, strict=True)]
    starts = itertools.accumulate((len(each) for each in seconds[:-1]), initial=0)
    rows = [each.rows + start for each, start in zip(frontiers, starts, strict=True)]
    return np.concatenate(seconds), np.concatenate(stash), rows
