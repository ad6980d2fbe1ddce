"""A pipeline that goes on from batch to batch, in the lockstep clock: how long it fills, and what a batch takes then.

Imports no jax.
"""

from typing import NamedTuple

from fiddlex.pipeline.windows import Windows
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.timeline import Timeline


class Steady(NamedTuple):
    """Ticks and times, the latter in the unit of the costs.

    Attributes:
      fill_ticks: of the first batch, with which the pipeline fills.
      fill: their time.
      period_ticks: of a batch once windows repeat, on average.
      period: their time.
    """

    fill_ticks: int
    fill: float
    period_ticks: float
    period: float


def steady(windows: Windows, costs: Costs) -> Steady:
    """Runs a pipeline until its windows repeat.

    Raises:
      ScheduleError: when `costs` do not fit the stages.
    """
    before, length = max(len(windows.first), 1), len(windows.cycle)
    run = first_calls(windows, before + length, costs)
    ticks = [len(windows[call].table) for call in range(before + length)]
    ends = [*run.tick_starts, run.makespan]
    begins, finished = ends[sum(ticks[:before])], ends[sum(ticks)]
    return Steady(ticks[0], ends[ticks[0]], windows.period, (finished - begins) / length)


def first_calls(windows: Windows, num_calls: int, costs: Costs) -> Timeline:
    """The first calls, one after another.

    Raises:
      ScheduleError: when `costs` do not fit the stages.
    """
    return lockstep(windows.over(num_calls), costs)
