"""The best choices of recomputation for the layers of a stage: seconds against bytes of the stash.

Each layer makes its own choice. Choosing for all layers of a stage is a knapsack problem (Piper, section 4.2 and
appendix): least seconds, with the stash within a bound. Piper's code solves it by exchanging the choice with the best
ratio until the stash fits, which may miss the best. Here a frontier holds all sums of choices that no other sum beats
in both seconds and bytes, so a stage's choice is exact. If a frontier has more than `POINTS` sums, it keeps that many,
spread evenly over the bytes; every sum that it keeps can still be had, but a better one between two of them may be
lost. Layers that are alike have as many sums as layers, so that a transformer's frontiers are complete.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.tools.unequal_stages.chain import Choice, ShardedLayer

POINTS = 512
_ROUNDING = 1e-12  # sums of the same numbers in another order differ by less


class Frontier(NamedTuple):
    """Sums of choices, the fastest first: from one to the next, seconds rise and bytes fall."""

    seconds: np.ndarray
    stash: np.ndarray  # bytes that are kept of each microbatch
    picked: np.ndarray  # for each sum, its place in the frontier without the last layer, and the last layer's choice


EMPTY = Frontier(np.zeros(1), np.zeros(1), np.zeros((1, 2), np.int64))


def extended(frontier: Frontier, choices: Sequence[Choice]) -> Frontier:
    """The frontier with one more layer, which has these choices."""
    seconds = np.add.outer(frontier.seconds, [choice.seconds for choice in choices]).ravel()
    stash = np.add.outer(frontier.stash, [choice.stash_bytes for choice in choices]).ravel()
    order = np.lexsort((stash, seconds))
    least = np.minimum.accumulate(stash[order])
    better = np.concatenate([[True], least[1:] < least[:-1] * (1 - _ROUNDING)])
    order = order[better]
    if len(order) > POINTS:
        order = order[_spread(stash[order])]
    picked = np.stack(np.divmod(order, len(choices)), axis=1)
    return Frontier(seconds[order], stash[order], picked)


def _spread(stash: np.ndarray) -> np.ndarray:
    """Places of `POINTS` or fewer of falling numbers: of the smallest in each of as many steps, so of the last too."""
    steps = np.floor((stash[0] - stash) / (stash[0] - stash[-1]) * (POINTS - 1)).astype(np.int64)
    last = np.append(steps[1:] != steps[:-1], True)
    return np.flatnonzero(last)


class Frontiers:
    """The frontiers of all runs of layers of a chain; runs of layers with equal choices share one."""

    def __init__(self, layers: Sequence[ShardedLayer]):
        kinds: dict[tuple[Choice, ...], int] = {}
        self._layers = layers
        names = [kinds.setdefault(layer.choices, len(kinds)) for layer in layers]
        found: dict[tuple[int, ...], int] = {}
        frontiers = list[Frontier]()
        self.rows = np.zeros((len(layers), len(layers)), np.int64)  # the row of the tables for layers i to j, [i, j]
        for first in range(len(layers)):
            frontier = EMPTY
            for last in range(first, len(layers)):
                key = tuple(names[first : last + 1])
                if key not in found:
                    found[key] = len(frontiers)
                    frontiers.append(extended(frontier, layers[last].choices))
                self.rows[first, last] = found[key]
                frontier = frontiers[found[key]]
        longest = 1 + max(len(each.seconds) for each in frontiers)
        # seconds of each sum, [row, point]; infinite after the last point
        self.seconds = np.full((len(frontiers), longest), np.inf)
        self.stash = np.zeros((len(frontiers), longest))  # bytes of each sum, [row, point]
        for row, each in enumerate(frontiers):
            self.seconds[row, : len(each.seconds)] = each.seconds
            self.stash[row, : len(each.stash)] = each.stash

    def fastest(self, first: int, last: int, *, in_flight: int, room: float) -> tuple[Choice, ...]:
        """The choices of layers `first` to `last` that take least time, with `in_flight` stashes within `room` bytes.

        If no choices are within it, the result has the smallest stash.
        """
        frontiers = list(
            itertools.accumulate((each.choices for each in self._run(first, last)), extended, initial=EMPTY)
        )
        within = np.flatnonzero(in_flight * frontiers[-1].stash <= room)
        point, picked = int(within[0]) if len(within) else len(frontiers[-1].stash) - 1, list[Choice]()
        for frontier, layer in zip(reversed(frontiers), reversed(self._run(first, last)), strict=False):
            point, choice = map(int, frontier.picked[point])
            picked.append(layer.choices[choice])
        return tuple(reversed(picked))

    def _run(self, first: int, last: int) -> Sequence[ShardedLayer]:
        return self._layers[first : last + 1]
