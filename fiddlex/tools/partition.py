"""PipeDream's partitioner: divides layers into stages by dynamic programming.

The hierarchical formulation of Narayanan et al., PipeDream (SOSP 2019), section 3.1: stages may differ in layers and in
how often they are replicated, and each level of a cluster consists of whole groups of the level below. The time of a
stage is the time between two minibatches in a full pipeline. The time of a pipeline is that of its slowest stage or
link. The formulation has no cap on memory and no tensor parallelism, and it uses all devices;
`fiddlex.tools.unequal_stages` has Piper's, which has caps and tensor parallelism and may leave devices unused.

This module follows the paper. The code that the authors published (msr-fiddle/pipedream,
optimizer/optimizer_graph_hierarchical.py) departs from it:

- It adds the seconds of computing and of exchanging gradients, where the paper takes the larger of the two.
- With r replicas it counts 4(r − 1)/r bytes exchanged for each byte of weights, where the paper counts 2(r − 1).
- It ignores the link between two stages, unless it is given a compression ratio. Then it divides the bytes by the
  replicas, and also counts what the last stage sends on.
- In a level above the innermost it divides the exchange of a stage that is the whole pipeline by the size of a group.

The partitioner shows where stages of unequal replication would be faster; the executor replicates all stages equally,
and `fiddlex.planner.balance` cuts the layers for it. Invariant: no other partition of this kind has a faster slowest
part.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.errors import ConfigError

MOST_COMPARED = 4 * 10**11  # pipelines, which take about a minute


class Layer(NamedTuple):
    """The facts of a layer that the partitioner needs."""

    seconds: float  # seconds of a minibatch's forward and backward pass on one device
    activation_bytes: float  # bytes of the layer's output for a minibatch
    # bytes of the weights, divided by N where replicas exchange the sum of the gradients of N minibatches once
    weight_bytes: float


class Level(NamedTuple):
    """A level of a cluster."""

    size: int  # number of groups of the level below in a group of this level; in the innermost level, of devices
    bandwidth: float  # bytes/s between these groups or devices


class ReplicatedStage(NamedTuple):
    """A run of layers on devices, or on groups of the level below, each of which has all these layers."""

    first: int  # number of the first layer
    last: int  # number of the last layer
    replicas: int  # number of devices or groups
    inner: tuple["ReplicatedStage", ...] = ()  # the pipeline over each group; empty in the innermost level

    @property
    def of_devices(self) -> tuple["ReplicatedStage", ...]:
        """The stages that single devices run, with the number of devices of each."""
        if not self.inner:
            return (self,)
        stages = (each for stage in self.inner for each in stage.of_devices)
        return tuple(each._replace(replicas=self.replicas * each.replicas) for each in stages)


class Partition(NamedTuple):
    """A pipeline over the groups of a level, and the seconds between two minibatches when the pipeline is full."""

    seconds: float
    stages: tuple[ReplicatedStage, ...]

    @property
    def of_devices(self) -> tuple[ReplicatedStage, ...]:
        return tuple(each for stage in self.stages for each in stage.of_devices)


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
      The stages over the groups of the outermost level, each with the pipeline within its groups. Of equally fast
      pipelines it is the one whose last stages have most layers.

    Raises:
      ConfigError: when layers, levels or groups are missing, a figure is negative or not finite, or the search would
        take more than some minutes.
    """
    if not layers or not levels:
        raise ConfigError(f"{len(layers)} layers and {len(levels)} levels: a partition needs at least one of each.")
    if min(level.size for level in levels) < 1:
        raise ConfigError(f"levels {[level.size for level in levels]}: each must have at least one group.")
    for number, level in enumerate(levels):
        starts = 1 if number == len(levels) - 1 else len(layers)
        if (compared := starts * (len(layers) * level.size) ** 2) > MOST_COMPARED:
            raise ConfigError(
                f"{len(layers)} layers on {level.size:,} devices or groups of them: PipeDream's partitioner would "
                f"compare {compared:.0e} pipelines, and may compare {MOST_COMPARED:.0e}. Use fewer devices."
            )
    for number, layer in enumerate(layers):
        if not all(0 <= figure < float("inf") for figure in layer):
            raise ConfigError(f"layer {number} has {layer}: its seconds and bytes must be at least 0 and finite.")
    for level in levels:
        if not 0 < level.bandwidth < float("inf"):
            raise ConfigError(f"{level}: a bandwidth must be greater than 0 and finite.")
    times = np.array([layer.seconds for layer in layers])
    within, solved = _sums(times), list[_Level]()
    for number, level in enumerate(levels):
        solved.append(_Level(layers, level, within, outermost=number == len(levels) - 1))
        within = solved[-1].best[:, :, -1]
    seconds = float(within[0, -1])
    return Partition(seconds, _stages(solved, 0, len(layers) - 1, seconds))


def _sums(values: np.ndarray) -> np.ndarray:
    """Sums of values i to j, [i, j]; 0 where j < i."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return np.maximum(total[None, 1:] - total[:-1, None], 0.0)


class _Level:
    """The tables of one level, for layers i to j and r groups."""

    def __init__(self, layers: Sequence[Layer], level: Level, below: np.ndarray, *, outermost: bool):
        count, size = len(layers), level.size
        groups = np.arange(1, size + 1)
        weights = _sums(np.array([layer.weight_bytes for layer in layers]))
        shared = 2 * (groups - 1) * weights[:, :, None] / level.bandwidth
        self.sent = np.array([2 * layer.activation_bytes / level.bandwidth for layer in layers])  # 2·a_s / B, [s]
        self.stage = np.maximum(below[:, :, None], shared) / groups  # T(i→j, r), [i, j, r − 1]
        # A(i→j, r), [i, j, r − 1]; of the outermost level only i = 0
        self.best = self.stage[: 1 if outermost else count].copy()
        for cut in range(count - 1):
            last = np.maximum(self.stage[cut + 1, cut + 1 :], self.sent[cut])
            before, after = self.best[: cut + 1, cut, None], self.best[: cut + 1, cut + 1 :]
            for replicas in range(1, size):
                slowest = np.maximum(before[..., :-replicas], last[None, :, replicas - 1, None])
                np.minimum(after[..., replicas:], slowest, out=after[..., replicas:])

    def last_stage(self, first: int, last: int, groups: int, seconds: float) -> tuple[int, int]:
        """First layer and groups of the longest last stage of a pipeline that takes no more than `seconds`."""
        if self.stage[first, last, groups - 1] <= seconds:
            return first, groups
        for cut in range(first, last):
            for replicas in range(1, groups):
                slowest = max(self.best[first, cut, groups - replicas - 1], self.stage[cut + 1, last, replicas - 1])
                if max(slowest, self.sent[cut]) <= seconds:
                    return cut + 1, replicas
        raise AssertionError(f"no pipeline of layers {first} to {last} on {groups} groups takes {seconds} s")


def _stages(levels: Sequence[_Level], first: int, last: int, seconds: float) -> tuple[ReplicatedStage, ...]:
    """The stages of a pipeline over all groups of the last of `levels` that takes no more than `seconds`."""
    if not levels:
        return ()
    *inner, level = levels
    groups, stages = level.stage.shape[-1], list[ReplicatedStage]()
    while groups:
        start, replicas = level.last_stage(first, last, groups, seconds)
        allowed = max(replicas * seconds, float(inner[-1].best[start, last, -1])) if inner else 0.0
        stages.append(ReplicatedStage(start, last, replicas, _stages(inner, start, last, allowed)))
        last, groups = start - 1, groups - replicas
    return tuple(reversed(stages))
