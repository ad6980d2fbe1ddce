"""The actions of a schedule on its ticks as arrays of numpy, for passes over all of them at once."""

import itertools
import operator
from typing import NamedTuple

import numpy as np

from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.ticks import Ticks

KIND_NUMBERS = {kind: number for number, kind in enumerate(Kind)}


class Columns(NamedTuple):
    """Of each action by its number (`Schedule.numbered`), int64 [action].

    Attributes:
      rank: where it runs.
      stage: of the model.
      kind: by its number in `KIND_NUMBERS`.
      microbatch: on which it runs.
      tick: in which it runs.
    """

    rank: np.ndarray
    stage: np.ndarray
    kind: np.ndarray
    microbatch: np.ndarray
    tick: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule, ticks: Ticks) -> "Columns":
        """Reads off a schedule and the ticks of its actions."""
        number = len(schedule.numbered)
        stage, kind, microbatch = (map(operator.itemgetter(i), schedule.numbered) for i in range(3))
        return cls(
            np.repeat(np.arange(schedule.num_ranks), [len(row) for row in schedule.actions]),
            np.fromiter(stage, np.int64, number),
            np.fromiter(map(KIND_NUMBERS.__getitem__, kind), np.int64, number),
            np.fromiter(microbatch, np.int64, number),
            np.fromiter(itertools.chain.from_iterable(ticks), np.int64, number),
        )

    def numbers(self, *kinds: Kind) -> np.ndarray:
        """The actions of these kinds, by number, in order."""
        return np.flatnonzero(np.isin(self.kind, [KIND_NUMBERS[kind] for kind in kinds]))
