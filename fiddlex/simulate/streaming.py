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
    """The copies of a batch, alike on all ranks."""

    rows: int  # of a transfer
    period: int  # in ticks
    rows_per_chunk: int
    trains: bool = True  # whether there are backward passes, so that gradients go to the host

    @classmethod
    def of(cls, stream: WeightStream) -> "Copies":
        return cls(stream.rows, stream.period, stream.rows_per_chunk, stream.trains)

    def whole_periods(self, num_ticks: int) -> int:
        """The number of ticks after which the period that contains the last of `num_ticks` ticks ends."""
        return -(-num_ticks // self.period) * self.period

    def of_period(self, costs: Costs, *, spill: float) -> float:
        """The time for which a period uses the link; `spill`: that of a tick, each way, for what forwards save."""
        return self.rows * max(costs.load, costs.store * self.trains) + self.period * spill

    def lengthened(self, lengths: np.ndarray, costs: Costs, *, spill: float) -> np.ndarray:
        """The lengths of ticks, for whole periods, where each period's last tick waits for its copies, float [tick]."""
        periods = lengths.reshape(-1, self.period).copy()
        periods[:, -1] += np.maximum(self.of_period(costs, spill=spill) - periods.sum(axis=1), 0.0)
        return periods.ravel()

    def ends(self, costs: Costs) -> tuple[float, float]:
        """The times of the copies before the first tick and after the last."""
        return self.rows_per_chunk * costs.load, self.rows_per_chunk * costs.store * self.trains
