"""PipeDream's partitioner: divides layers into stages by dynamic programming.

The hierarchical formulation of Narayanan et al., PipeDream (SOSP 2019), section 3.1: stages may differ in layers and in
how often they are replicated, and each level of a cluster consists of whole groups of the level below. The time of a
stage is the time between two minibatches in a full pipeline. The time of a pipeline is that of its slowest stage or
link.

The partitioner shows where stages of unequal replication would be faster. This project's executor replicates all stages
equally, and its schedules give the stages and their ranks; `fiddlex.planner.balance` cuts the layers for it. Invariant:
no other partition of this kind has a faster slowest part.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fiddlex.errors import ConfigError


class Layer(NamedTuple):
    """The facts of a layer that the partitioner needs.

    Attributes:
      seconds: seconds of a minibatch's forward and backward pass on one device.
      activation_bytes: bytes of the layer's output for a minibatch.
      weight_bytes: bytes of the layer's weights.
    """

    seconds: float
    activation_bytes: float
    weight_bytes: float


class Level(NamedTuple):
    """A level of a cluster.

    Attributes:
      size: number of groups of the level below in a group of this level; in the innermost level, of devices.
      bandwidth: bytes/s between these groups or devices.
    """

    size: int
    bandwidth: float


class ReplicatedStage(NamedTuple):
    """Layers `first` to `last`, both included, on `replicas` devices or groups of the level below."""

    first: int
    last: int
    replicas: int


class Partition(NamedTuple):
    """A pipeline over the groups of a level, and the seconds between two minibatches when the pipeline is full."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]


def pipedream(layers: Sequence[Layer], levels: Sequence[Level]) -> Partition:
    """The fastest pipeline over a cluster.

    A_0(i→j, ·) is the compute time of layers i to j. For a level of m groups with links of B bytes/s, whose level below
    has m' groups:

        T(i→j, m) = max(A_below(i→j, m'), 2(m − 1)·Σ|w| / B) / m
        A(i→j, m) = min(T(i→j, m), min over s, r of max(A(i→s, m − r), 2·a_s / B, T(s+1→j, r)))

    Args:
      layers: the model's layers in order.
      levels: the cluster's levels, the innermost first.

    Returns:
      The stages over the groups of the outermost level; each stage is partitioned further within its groups.

    Raises:
      ConfigError: when there are no layers or no levels, or a level has no groups.
    """
    if not layers or not levels:
        raise ConfigError(f"{len(layers)} layers and {len(levels)} levels: a partition needs at least one of each.")
    if min(level.size for level in levels) < 1:
        raise ConfigError(f"levels {[level.size for level in levels]}: each must have at least one group.")
    below: Callable[[int, int], float] = _Compute(layers).seconds
    for level in levels:
        solved = _Level(layers, level, below)
        below = solved.whole
    return solved.best(0, len(layers) - 1, levels[-1].size)


class _Compute:
    """Compute times of consecutive layers."""

    def __init__(self, layers: Sequence[Layer]):
        self._sums = [0.0]
        for layer in layers:
            self._sums.append(self._sums[-1] + layer.seconds)

    def seconds(self, first: int, last: int) -> float:
        return self._sums[last + 1] - self._sums[first]


class _Level:
    """The tables of one level."""

    def __init__(self, layers: Sequence[Layer], level: Level, below: Callable[[int, int], float]):
        self.layers, self.level, self.below = layers, level, below
        self.best = functools.cache(self._best)

    def whole(self, first: int, last: int) -> float:
        """Seconds of layers `first` to `last` on all groups of the level."""
        return self.best(first, last, self.level.size).seconds

    def stage(self, first: int, last: int, replicas: int) -> float:
        """T(first→last, replicas)."""
        weights = sum(layer.weight_bytes for layer in self.layers[first : last + 1])
        shared = 2 * (replicas - 1) * weights / self.level.bandwidth
        return max(self.below(first, last), shared) / replicas

    def _best(self, first: int, last: int, groups: int) -> Partition:
        """A(first→last, groups)."""
        found = [Partition(self.stage(first, last, groups), (ReplicatedStage(first, last, groups),))]
        for cut in range(first, last):
            sent = 2 * self.layers[cut].activation_bytes / self.level.bandwidth
            for replicas in range(1, groups):
                before = self.best(first, cut, groups - replicas)
                seconds = max(before.seconds, sent, self.stage(cut + 1, last, replicas))
                found.append(Partition(seconds, (*before.stages, ReplicatedStage(cut + 1, last, replicas))))
        return min(found, key=lambda partition: (partition.seconds, len(partition.stages)))
