"""Piper's partitioner: stages that differ in layers, replicas and tensor size, under a cap on each device's memory.

The model of Tarnawski et al., Piper (NeurIPS 2021), sections 3 and 4. A batch has N microbatches, of which each replica
of a stage runs the d-th part. With d replicas of t devices each, a stage takes between two microbatches

    seconds = Σ p / d + 2·(c_in + c_out) / (d·B) + 4·(d − 1)·Σ w / (d·N·B)

for the passes through its layers, the activations and their gradients that it exchanges with the stages before and
after it, and the sum of gradients, which N microbatches share. The terms are added: nothing overlaps, in the paper as in
its code. In 1F1B a stage keeps y = ⌈s / d⌉ microbatches, where s is the sum of the replicas of this stage and of all
later ones, and so takes

    bytes = y·Σ stash + Σ kept + Σ divided / d + working.

Each layer of a stage chooses for itself what it recomputes (`choices`). The numbers of replicas divide N and add up to
no more than N. The pipeline is as slow as its slowest stage. Devices may be left unused.

The paper's dynamic program has an entry for each run of last layers, number of devices and sum of replicas. This one
decides for a bound T whether a pipeline has no stage slower than T. It has an entry for each run of last layers and sum
of replicas, the fewest devices, and keeps only the entries that no other beats in both. The search halves the interval
of T and moves both ends to times that stages can have. Invariant: no pipeline of this kind within the memory is faster,
up to `choices.POINTS`; and of the pipelines that are as fast, none takes fewer devices.

Where Piper's code (msr-fiddle/piper, algo.cpp) departs: its entries allow up to so many devices and replicas, where the
paper's have exactly so many, which changes no answer; and it chooses recomputation by the heuristic that `choices`
names. The factor 4 is that of PipeDream's code (a ring would exchange 2 bytes for each byte of w).
"""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.errors import DeviceError
from fiddlex.planner.unequal_stages.chain import Choice, StageProblem
from fiddlex.planner.unequal_stages.choices import Frontiers

_ROUNDING = 1e-9  # relative error that rounding may have
_EQUAL = 1e-8  # relative difference below which two times count as equal; more than `_ROUNDING`
_NONE = 2**30  # devices of an entry that no pipeline reaches


class Stage(NamedTuple):
    """A stage of a pipeline.

    Attributes:
      first: number of its first layer.
      last: number of its last layer.
      replicas: number of its replicas.
      tensor: number of tensor ranks of each replica.
      choices: what each of its layers recomputes, with its seconds and bytes.
      seconds: seconds between two microbatches.
      in_flight: number of microbatches that each replica keeps.
      memory_bytes: bytes on each device.
    """

    first: int
    last: int
    replicas: int
    tensor: int
    choices: tuple[Choice, ...]
    seconds: float
    in_flight: int
    memory_bytes: float

    @property
    def num_devices(self) -> int:
        """Number of devices of the stage."""
        return self.replicas * self.tensor


class UnequalPipeline(NamedTuple):
    """A pipeline of stages.

    Attributes:
      stages: the stages in order.
    """

    stages: tuple[Stage, ...]

    @property
    def seconds(self) -> float:
        """Seconds between two microbatches when the pipeline is full."""
        return max(stage.seconds for stage in self.stages)

    @property
    def num_devices(self) -> int:
        """Number of devices that the pipeline uses."""
        return sum(stage.num_devices for stage in self.stages)

    @property
    def memory_bytes(self) -> float:
        """Bytes on the device that needs most."""
        return max(stage.memory_bytes for stage in self.stages)


class Part(NamedTuple):
    """Layers `first` to `last` on `replicas` replicas of `tensor` devices each."""

    first: int
    last: int
    replicas: int
    tensor: int


class Piper:
    """A problem with the tables that all its searches share.

    Raises:
      ConfigError: when `StageProblem.validate` raises it.
    """

    def __init__(self, problem: StageProblem):
        self.problem = problem.validate()
        self._frontiers = {size: Frontiers(chain.layers) for size, chain in problem.chains.items()}
        self._sizes = [
            (replicas, tensor)
            for tensor in sorted(problem.chains)
            for replicas in problem.replica_counts()
            if replicas * tensor <= problem.num_devices
        ]

    def fastest(self, *, below: float = math.inf) -> UnequalPipeline | None:
        """The fastest pipeline.

        Args:
          below: seconds between two microbatches that are of no interest, nor is more.

        Returns:
          The pipeline; None: none takes less than `below`.

        Raises:
          DeviceError: when no pipeline is within the memory; the message gives the least that one needs.
        """
        found = self._search(_Tables(self, self._sizes, self.problem.memory_bytes), below)
        if found is None and below == math.inf:
            raise DeviceError(self._too_little())
        return found

    def fastest_alike(self) -> UnequalPipeline | None:
        """The fastest pipeline whose stages have equally many replicas of one tensor size; None: none is within memory.

        The stages may differ in layers.
        """
        best: UnequalPipeline | None = None
        for size in self._sizes:
            below = best.seconds if best else math.inf
            found = self._search(_Tables(self, [size], self.problem.memory_bytes), below)
            if found and (best is None or (found.seconds, found.num_devices) < (best.seconds, best.num_devices)):
                best = found
        return best

    def least_memory(self) -> int:
        """Bytes, to 0.1%, of the smallest cap within which there is a pipeline."""
        tables = _Tables(self, self._sizes, math.inf)
        most = tables.largest_need
        least = 0.0
        while most - least > 1e-3 * most:
            middle = (least + most) / 2
            found = _Tables(self, self._sizes, middle).pipeline_within(math.inf)
            least, most = (least, middle) if found else (middle, most)
        return math.ceil(most)

    def pipeline_of(self, parts: Sequence[Part]) -> UnequalPipeline:
        """The pipeline of given parts, each with the fastest choices within the memory; also where they do not fit."""
        stages, later = list[Stage](), 0
        for part in reversed(parts):
            later += part.replicas
            stages.append(self._stage(part, -(-later // part.replicas)))
        return UnequalPipeline(tuple(reversed(stages)))

    def extra_s(self, part: Part) -> float:
        """Seconds of a stage in addition to the passes: of activations, and of the sum of gradients."""
        problem, layers, d = self.problem, self.problem.chains[part.tensor].layers, part.replicas
        sent = layers[part.first - 1].output_bytes if part.first else 0.0
        sent += layers[part.last].output_bytes if part.last < len(layers) - 1 else 0.0
        summed = sum(layer.weight_bytes for layer in layers[part.first : part.last + 1])
        share = 4 * (d - 1) / d / problem.num_microbatches
        return (2 * sent / d + share * summed) / problem.bandwidth

    def fixed_bytes(self, part: Part) -> float:
        """Bytes of a stage on each device without the stash."""
        chain = self.problem.chains[part.tensor]
        own = chain.layers[part.first : part.last + 1]
        return chain.working_bytes + sum(each.kept_bytes + each.divided_bytes / part.replicas for each in own)

    def _too_little(self) -> str:
        problem = self.problem
        return (
            f"No pipeline of stages on {problem.num_devices} devices fits {problem.memory_bytes / 2**30:.4g} GiB a "
            f"device, whatever its stages recompute: the smallest need is {self.least_memory() / 2**30:.4g} GiB. Allow "
            "more memory, or use more devices or smaller microbatches."
        )

    def _stage(self, part: Part, in_flight: int) -> Stage:
        fixed = self.fixed_bytes(part)
        room = (self.problem.memory_bytes - fixed) / in_flight
        choices = self._frontiers[part.tensor].fastest(part.first, part.last, room)
        seconds = sum(each.seconds for each in choices) / part.replicas + self.extra_s(part)
        stash = in_flight * sum(each.stash_bytes for each in choices)
        return Stage(*part, choices, seconds, in_flight, fixed + stash)

    def _search(self, tables: "_Tables", below: float) -> UnequalPipeline | None:
        """The fastest pipeline that takes less than `below`, by halving the interval of its seconds."""
        parts = tables.pipeline_within(below * (1 - _EQUAL))
        if parts is None:
            return None
        best, least = self.pipeline_of(parts), tables.least_s
        while least < best.seconds * (1 - _EQUAL):
            middle = min((least + best.seconds) / 2, best.seconds * (1 - _EQUAL))
            parts = tables.pipeline_within(middle)
            if parts is None:
                least = tables.next_s(middle)
            else:
                best = self.pipeline_of(parts)
        fewest = tables.pipeline_within(best.seconds * (1 + _EQUAL))
        assert fewest is not None
        return self.pipeline_of(fewest)


class _Tables:
    """Seconds and bytes of all stages, for the sizes that stages may have and a cap on the memory.

    A stage is a row of each table, for layers `first[row]` to `last[row]`; a column is a number of replicas and a
    tensor size.

    Attributes:
      replicas: number of replicas, [column].
      tensor: tensor size, [column].
      extra: `Piper.extra_s`, [row, column].
      room: bytes for the stash, [row, column].
      point: row of the frontier, [row, column].
    """

    def __init__(self, piper: Piper, sizes: Sequence[tuple[int, int]], memory_bytes: float):
        problem = piper.problem
        self._count, self._problem = problem.num_layers, problem
        self._first, self._last = np.triu_indices(self._count)
        self._row = np.zeros((self._count, self._count), np.int64)
        self._row[self._first, self._last] = np.arange(len(self._first))
        self.replicas, self.tensor = (np.array(column) for column in zip(*sizes, strict=True))
        self._seconds, self._stash, rows = _joined([piper._frontiers[size] for size in problem.chains])
        of_size = dict(zip(problem.chains, rows, strict=True))
        self._point = np.stack([of_size[t][self._first, self._last] for _, t in sizes], axis=1)
        self._extra = np.stack([self._extras(*size) for size in sizes], axis=1)
        self._fixed = np.stack([self._fixeds(*size) for size in sizes], axis=1)
        self._room = memory_bytes - self._fixed
        self._most = min(problem.num_devices, problem.num_microbatches)

    def _extras(self, replicas: int, tensor: int) -> np.ndarray:
        """`Piper.extra_s` of each row."""
        problem, layers = self._problem, self._problem.chains[tensor].layers
        sent = np.array([0.0, *(layer.output_bytes for layer in layers[:-1]), 0.0])
        summed = self._summed([layer.weight_bytes for layer in layers])
        share = 4 * (replicas - 1) / replicas / problem.num_microbatches
        return (2 * (sent[self._first] + sent[self._last + 1]) / replicas + share * summed) / problem.bandwidth

    def _fixeds(self, replicas: int, tensor: int) -> np.ndarray:
        """`Piper.fixed_bytes` of each row."""
        chain = self._problem.chains[tensor]
        own = self._summed([layer.kept_bytes + layer.divided_bytes / replicas for layer in chain.layers])
        return chain.working_bytes + own

    def _summed(self, values: Sequence[float]) -> np.ndarray:
        """Sums over the layers of each row."""
        total = np.concatenate([[0.0], np.cumsum(values)])
        return total[self._last + 1] - total[self._first]

    @property
    def least_s(self) -> float:
        """A lower bound on the seconds of any pipeline: the work of all layers, spread over all devices."""
        whole = self._row[0, -1]
        return float((self._seconds[self._point[whole], 0] * self.tensor).min()) / self._problem.num_devices

    @property
    def largest_need(self) -> float:
        """Bytes within which there is a pipeline: of all layers on one replica, one microbatch at a time."""
        whole = self._row[0, -1]
        return float((self._fixed[whole] + self._stash[self._point[whole], 0]).min())

    def _reached(self, seconds: float) -> np.ndarray:
        """How many sums of each stage's frontier take no more than `seconds`, [row, column]."""
        allowed = (min(seconds, sys.float_info.max / self.replicas.max() / 2) - self._extra) * self.replicas
        allowed += np.abs(allowed) * _ROUNDING
        low, high = np.zeros(self._point.shape, np.int64), np.full(self._point.shape, self._seconds.shape[1] - 1)
        while (low < high).any():
            middle = (low + high) // 2
            within = self._seconds[self._point, middle] <= allowed
            low, high = np.where(within, middle + 1, low), np.where(within, high, middle)
        return low

    def next_s(self, seconds: float) -> float:
        """The shortest time of a stage that is longer than `seconds`; infinite where there is none."""
        later = self._seconds[self._point, self._reached(seconds)] / self.replicas + self._extra
        return float(later.min())

    def _most_replicas(self, seconds: float) -> np.ndarray:
        """The largest sum of replicas, of a stage and all later ones, with which it is within time and memory.

        It is 0 where no sum is, and no more than the batch and the devices allow; [row, column].
        """
        reached = self._reached(seconds)
        stash = self._stash[self._point, np.maximum(reached - 1, 0)]
        with np.errstate(divide="ignore", invalid="ignore"):
            in_flight = np.where(stash > 0, np.floor(self._room / stash * (1 + _ROUNDING)), np.inf)
        in_flight = np.where((reached > 0) & (self._room >= 0), np.minimum(in_flight, self._most), 0)
        return np.minimum(in_flight.astype(np.int64) * self.replicas, self._most)

    def pipeline_within(self, seconds: float) -> list[Part] | None:
        """The pipeline of fewest devices whose stages take no more than `seconds`; None: there is none."""
        within = self._most_replicas(seconds)
        ends = _Ends(self._count, self._most)
        for first in range(self._count - 1, -1, -1):
            ends.add(first, *self._options(first, within, ends))
        fewest = ends.fewest[0]
        total = int(fewest.argmin())
        return list(self._parts(total, within, ends)) if fewest[total] < _NONE else None

    def _options(self, first: int, within: np.ndarray, ends: "_Ends") -> tuple[np.ndarray, ...]:
        """All ways to begin with a stage at layer `first`: sum of replicas, devices, column, last layer, sum of the rest.

        Each stage is followed by any of the entries for the layers after it.
        """
        last, rest, devices = ends.after(first)
        bound = within[self._row[first, last]]  # [entry, column]
        total = rest[:, None] + self.replicas
        used = devices[:, None] + self.replicas * self.tensor
        entry, column = np.nonzero((total <= bound) & (used <= self._problem.num_devices))
        return total[entry, column], used[entry, column], column, last[entry], rest[entry]

    def _parts(self, total: int, within: np.ndarray, ends: "_Ends") -> Iterator[Part]:
        """The stages of the entry for all layers with this sum of replicas."""
        first = 0
        while first < self._count:
            totals, used, columns, lasts, rests = self._options(first, within, ends)
            found = int(np.flatnonzero((totals == total) & (used == ends.fewest[first, total]))[-1])
            column, last = columns[found], int(lasts[found])
            yield Part(first, last, int(self.replicas[column]), int(self.tensor[column]))
            first, total = last + 1, int(rests[found])


class _Ends:
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
