"""Times of a pipeline without flushes in the lockstep clock: the time to fill it, and then the time per batch."""

from typing import NamedTuple

from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.schedules.resolve import Pipeline
from fiddlex.schedules.windows import Windows
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.timeline import BUBBLE, Timeline
from fiddlex.terminal.readable import counted


class Steady(NamedTuple):
    """Numbers of ticks, and times in the unit of the costs."""

    fill_ticks: int  # of the first step, which fills the pipeline and ends with the first batch's last gradient
    fill: float  # time of the first step
    period_ticks: float  # average number of ticks per batch once the windows repeat
    period: float  # average time per batch once the windows repeat
    # The period beyond the busiest rank's work, in which it waits for updates or other ranks, divided by that work.
    bubble_fraction: float


def steady(windows: Windows, costs: Costs) -> Steady:
    """Runs a pipeline until its windows repeat; raises ScheduleError if `costs` do not fit the stages."""
    before, length = max(len(windows.first), 1), len(windows.cycle)
    run = first_steps(windows, before + length, costs)
    ticks = [len(windows[step].table) for step in range(before + length)]
    ends = [*run.tick_starts, run.makespan]
    period = (ends[sum(ticks)] - ends[sum(ticks[:before])]) / length
    work = _work(windows, costs)
    return Steady(ticks[0], ends[ticks[0]], windows.period, period, period / work - 1 if work else 0.0)


def mean_batch_time(pipeline: Pipeline, costs: Costs) -> float:
    """Average time per batch over the steps of a run, without filling and draining between phases."""
    if not pipeline.windows:
        return lockstep(pipeline.lowered, costs, pipeline.stream).makespan
    periods = {name: steady(windows, costs).period for name, windows in pipeline.windows.items()}
    steps = sum(phase.end - phase.start for phase in pipeline.phases)
    return sum((phase.end - phase.start) * periods[phase.semantics] for phase in pipeline.phases) / steps


def describe(windows: Windows) -> str:
    """A few words for a log, assuming stages of equal length."""
    facts = steady(windows, Costs())
    ticks, bubble = f"{facts.period_ticks:g} ticks a batch", f"bubble {facts.bubble_fraction:.0%} ({BUBBLE})"
    return f"{ticks}, {bubble}, {facts.fill_ticks} ticks in the first step"


def no_gain(windows: Windows, order: str) -> str:
    """Why a pipeline without flushes takes as many ticks for a batch as one with; empty where it takes fewer."""
    facts, schedule = steady(windows, Costs()), windows.lowered.schedule
    delayed, waits = max(windows.semantics.delays) > 0, facts.bubble_fraction > 0
    if not delayed or not waits or facts.period_ticks < facts.fill_ticks:
        return ""
    if not windows.semantics.delays[0]:
        return (
            "delayed weights save no time here: stage 0 has a delay of 0, so it begins a batch only after its last "
            "backward pass of the one before. Give it a delay of 1 or more."
        )
    ahead = ""
    if schedule.strict and schedule.has_whole:
        ahead = f"With {order}=ahead, forwards of the next batch share ticks with backwards. "
    if source_of(schedule.name).kind is Kind.TABLE:
        return (
            "delayed weights save no time here: a table is repeated for each batch, and each rank ends the order of "
            f"one batch before it begins that of the next. {ahead}A name or a function makes one order for all batches."
        )
    number = counted(windows.semantics.batch_size, "microbatch", "microbatches")
    return (
        f"delayed weights save no time here: with {number} in a batch, neither one order for all batches nor the order "
        f"of one batch repeated lets the next batch begin sooner. {ahead}More microbatches in a batch may."
    )


def _work(windows: Windows, costs: Costs) -> float:
    """Time for which the busiest rank works on one batch."""
    schedule, semantics = windows.lowered.schedule, windows.semantics
    durations = costs.durations(schedule.num_stages)
    return max(
        sum(durations[action.kind][action.stage] for action in row if semantics.batch(action.microbatch) == 0)
        for row in schedule.actions
    )


def first_steps(windows: Windows, num_steps: int, costs: Costs) -> Timeline:
    """Runs the first `num_steps` steps one after another in the lockstep clock."""
    return lockstep(windows.over(num_steps), costs)
