"""How much longer a batch takes in the lockstep clock because weights come from the host and gradients go there.

A period of ticks (`fiddlex.schedules.weight_stream`) copies as many rows of weights from the host and as many rows of
gradients to it, needed or not. The copies go on beside the ticks, and the next period begins once both have ended
(`fiddlex.pipeline.streamed_weights`). The link carries both directions at once, each at its full speed. What forwards
save may cross the same link, as much in every tick each way. So a period lasts at least as long as all that crosses the
link in one direction. The weights of chunk 0 come before the first tick and its gradients go after the last tick, with
nothing beside them.
"""

from typing import NamedTuple

import numpy as np

from fiddlex.schedules.weight_stream import WeightStream
from fiddlex.simulate.clock import Costs


class Copies(NamedTuple):
    """The copies of a batch, alike on all ranks.

    Attributes:
      rows: number of rows of a transfer.
      period: number of ticks in a period.
      rows_per_chunk: number of rows of each chunk.
      trains: whether there are backward passes, so that gradients go to the host.
    """

    rows: int
    period: int
    rows_per_chunk: int
    trains: bool = True

    @classmethod
    def of(cls, stream: WeightStream) -> "Copies":
        """The copies of a stream."""
        return cls(stream.rows, stream.period, stream.rows_per_chunk, stream.trains)

    def whole_periods(self, num_ticks: int) -> int:
        """The number of ticks after which the period that contains the last of `num_ticks` ticks ends."""
        return -(-num_ticks // self.period) * self.period

    def of_period(self, costs: Costs, *, spill: float) -> float:
        """The time for which the link is in use in each period; the arguments are those of `lengthened`."""
        return self.rows * max(costs.load, costs.store * self.trains) + self.period * spill

    def lengthened(self, lengths: np.ndarray, costs: Costs, *, spill: float) -> np.ndarray:
        """The lengths of ticks where the last tick of each period waits for the period's copies, float [tick].

        Args:
          lengths: the lengths of the ticks without these copies, for whole periods, float [tick].
          costs: times of the copies.
          spill: time for which each tick uses the link, each way, for what forwards save.
        """
        periods = lengths.reshape(-1, self.period).copy()
        periods[:, -1] += np.maximum(self.of_period(costs, spill=spill) - periods.sum(axis=1), 0.0)
        return periods.ravel()

    def ends(self, costs: Costs) -> tuple[float, float]:
        """The times of the copies before the first tick and after the last."""
        return self.rows_per_chunk * costs.load, self.rows_per_chunk * costs.store * self.trains
