"""Layers to stages by dynamic programming: PipeDream's partitioner.

The hierarchical formulation of Narayanan et al., PipeDream (SOSP 2019), section 3.1: stages may differ in layers and in
how often they are replicated, and each level of a cluster is made of whole groups of the level below. The time of a
stage is that between two minibatches in a full pipeline; the pipeline's is that of its slowest stage or link.

It tells where stages of unequal replication would win. This project's executor replicates all stages alike and spreads
the vocabulary over all ranks, and layers are alike, so that there the most even cut (`placement.place_layers`) is the
best. Invariant: no other partition of the kind has a slowest part that is faster.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from fiddlex.errors import ConfigError


class Layer(NamedTuple):
    """What the partitioner knows of a layer.

    Attributes:
      seconds: forward and backward of a minibatch on one device.
      activation_bytes: of its output for a minibatch.
      weight_bytes: of its weights.
    """

    seconds: float
    activation_bytes: float
    weight_bytes: float


class Level(NamedTuple):
    """A level of a cluster.

    Attributes:
      size: groups of the level below in a group of this one; devices in the first.
      bandwidth: bytes/s between them.
    """

    size: int
    bandwidth: float


class ReplicatedStage(NamedTuple):
    """Layers `first` to `last`, both included, on `replicas` devices or groups of the level below."""

    first: int
    last: int
    replicas: int


class Partition(NamedTuple):
    """A pipeline over the groups of the outermost level, and seconds between two minibatches when it is full."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]


def pipedream(layers: Sequence[Layer], levels: Sequence[Level]) -> Partition:
    """The fastest pipeline over a cluster.

    With A_0(i→j, ·) the compute time of layers i to j, for a level of m groups, links of B bytes/s and the level below
    with m' of its own:

        T(i→j, m) = max(A_below(i→j, m'), 2(m − 1)·Σ|w| / B) / m
        A(i→j, m) = min(T(i→j, m), min over s, r of max(A(i→s, m − r), 2·a_s / B, T(s+1→j, r)))

    Args:
      layers: of the model in order.
      levels: of the cluster, the innermost first.

    Returns:
      The stages over the outermost level's groups; each is partitioned further within its groups.

    Raises:
      ConfigError: without layers or levels, or when a level has no groups.
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
    """Compute times of runs of layers."""

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
        """Seconds of layers on all groups of the level."""
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
