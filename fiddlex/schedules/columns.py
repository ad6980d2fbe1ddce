"""The actions of a schedule and their ticks as numpy arrays, for operations on all actions at once."""

import itertools
import operator
from typing import NamedTuple

import numpy as np

from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.ticks import Ticks

KIND_NUMBERS = {kind: number for number, kind in enumerate(Kind)}


class Columns(NamedTuple):
    """The fields of every action, each an int64 array [action] indexed by the action's number (`Schedule.numbered`)."""

    rank: np.ndarray
    stage: np.ndarray
    kind: np.ndarray  # the kind's number in `KIND_NUMBERS`
    microbatch: np.ndarray
    tick: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule, ticks: Ticks) -> "Columns":
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
        """The numbers of the actions of these kinds, in increasing order."""
        return np.flatnonzero(np.isin(self.kind, [KIND_NUMBERS[kind] for kind in kinds]))
