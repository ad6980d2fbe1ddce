"""Schedules beside each other: the bubble, time and memory of each in both clocks, for one model on as many ranks.

A schedule with several chunks on a rank cuts the model into more and shorter stages. So that all schedules do the same
work, a single time in the costs is that of all stages of a rank together, and each stage takes its part of it.
Invariant: a schedule that does not exist for the sizes has its reason in the table, and does not hide the others.
"""

import dataclasses
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fiddlex.errors import ScheduleError
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.schedule import Schedule
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.timeline import Timeline, bubble_in

_OF_STAGES = ("forward", "backward_input", "backward_weight")
_WIDEST_NOTE = 110
_SIZES = f"{'p':>4} {'v':>3} {'m':>4} {'ticks':>6}"
_OF_CLOCK = f"{'makespan':>9} {'bubble':>7} {'in flight':>9} {'for W':>6}"


class Compared(NamedTuple):
    """A schedule in the comparison."""

    name: str  # under which it was asked for
    lowered: Lowered  # the schedule on its ticks
    costs: Costs  # the times of its stages
    timelines: dict[str, Timeline]  # by clock: `free_running` and `lockstep`


class Missing(NamedTuple):
    """A schedule that does not exist, or not for these sizes and costs."""

    name: str  # under which it was asked for
    reason: str  # what is wrong, and what would be right


def compare(names: Sequence[str], make: Callable[[str], Schedule], costs: Costs) -> list[Compared | Missing]:
    """Runs schedules in both clocks; returns a row for each name, in their order.

    Args:
      names: names of schedules.
      make: returns the schedule of a name, or raises ScheduleError.
      costs: times; a single time of F, I or W is that of all stages of a rank together (`costs_of_stages`).
    """
    rows: list[Compared | Missing] = []
    for name in names:
        try:
            schedule = make(name)
            lowered, own = lower(schedule), costs_of_stages(costs, schedule.num_ranks / schedule.num_stages)
            runs = {"free_running": free_running(schedule, own), "lockstep": lockstep(lowered, own)}
            rows.append(Compared(name, lowered, own, runs))
        except ScheduleError as error:
            rows.append(Missing(name, str(error)))
    return rows


def costs_of_stages(costs: Costs, share: float) -> Costs:
    """The costs with which all stages together take as long as one stage on each rank would.

    Single times of F, I and W are multiplied by `share`, ranks divided by stages. Times that are given for each stage
    stay as they are, as do those of hops, embedding and head, which do not depend on the length of a stage.
    """
    times = {name: getattr(costs, name) for name in _OF_STAGES}
    return dataclasses.replace(
        costs, **{name: time * share for name, time in times.items() if not isinstance(time, tuple)}
    )


def to_text(rows: Sequence[Compared | Missing], costs: Costs, clocks: Mapping[str, str]) -> str:
    """The comparison as a table, a row for each schedule, and what its columns mean; `clocks` have their headings."""
    width = max(map(len, ["schedule", *(row.name for row in rows)]))
    above = " | ".join(f"{title:^{len(_OF_CLOCK)}}" for title in clocks.values())
    lines = [
        f"{'':{width}} {'':{len(_SIZES)}} | {above}",
        f"{'schedule':{width}} {_SIZES}{f' | {_OF_CLOCK}' * len(clocks)}",
    ]
    for row in rows:
        facts = _indented(row.reason, width + 1) if isinstance(row, Missing) else _cells(row, clocks)
        lines.append(f"{row.name:{width}} {facts}")
    notes = [
        "p, v, m: ranks, chunks (the most stages on a rank), microbatches",
        f"bubble: {bubble_in(clocks)}",
        "in flight: the most activations that a rank holds; for W: the most that a rank keeps from I to W; both in "
        "microbatches of the whole rank, on the rank with most",
        f"costs, in any unit; a single forward or backward time is that of all stages of a rank together: {costs}",
    ]
    wrapped = [textwrap.fill(note, _WIDEST_NOTE, subsequent_indent="  ", break_on_hyphens=False) for note in notes]
    return "".join(f"{line.rstrip()}\n" for line in [*lines, "", *wrapped])


def _indented(reason: str, margin: int) -> str:
    """A reason of several lines, such as one that shows a schedule's grid, all of them below its first word."""
    return f"\n{' ' * margin}".join(reason.rstrip().splitlines())


def _cells(row: Compared, clocks: Mapping[str, str]) -> str:
    schedule = row.lowered.schedule
    parts = [
        f"{schedule.num_ranks:>4} {schedule.num_chunks:>3} {schedule.num_microbatches:>4} {row.lowered.num_ticks:>6}"
    ]
    for timeline in (row.timelines[clock] for clock in clocks):
        in_flight, for_w = max(timeline.peak_inflight), max(timeline.peak_weight_stash)
        parts.append(f"{timeline.makespan:>9g} {timeline.bubble_fraction:>7.4g} {in_flight:>9g} {for_w:>6g}")
    return " | ".join(parts)
