"""Schedules as text: CSV to exchange with other systems, and a grid of time slots for a terminal.

The CSV is the published form: a row for each rank, with the rank's actions in order as `2F0` tokens. A stage belongs to
the rank whose row has its actions. Invariant: `from_csv(to_csv(schedule), name)` has the actions and the placement of
`schedule`.
"""

import collections
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule, execution_order
from fiddlex.schedules.table import NONE
from fiddlex.schedules.validate import validate

if TYPE_CHECKING:
    from fiddlex.schedules.lowering import Lowered
    from fiddlex.schedules.weight_stream import WeightStream


def to_csv(schedule: Schedule) -> str:
    """Writes one line for each rank: the rank's actions in order, separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str) -> Schedule:
    """Reads a table of actions into a schedule, without validating the schedule.

    Args:
      text: a row for each rank; cells hold `2F0` tokens or, for idle slots, nothing. Blank lines are skipped.
      name: name of the schedule; error messages use it for the table too.

    Returns:
      The schedule. It places a stage on the rank with most of the stage's actions; `validate` reports the others.

    Raises:
      ScheduleError: when a cell is not an action (the error gives row and column, from 1), or a stage is in no row.
    """
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        row = []
        for column, cell in enumerate(line.split(","), start=1):
            try:
                if cell.strip():
                    row.append(Action.parse(cell.strip()))
            except ScheduleError as error:
                raise ScheduleError(f"{name}, row {number}, column {column}: {error}") from error
        if line.strip():
            rows.append(tuple(row))
    return Schedule(name, tuple(rows), _placement(rows, name))


def _placement(rows: Sequence[Sequence[Action]], name: str) -> tuple[int, ...]:
    homes: dict[int, collections.Counter[int]] = {}
    for rank, row in enumerate(rows):
        for action in row:
            homes.setdefault(action.stage, collections.Counter())[rank] += 1
    for stage in range(max(homes, default=0)):
        if stage not in homes:
            raise ScheduleError(
                f"{name}: no row has an action of stage {stage}, though there is a stage {max(homes)}. "
                "Stages are numbered from 0 without gaps."
            )
    return tuple(homes[stage].most_common(1)[0][0] for stage in range(len(homes)))


def to_text(schedule: Schedule, times: Sequence[Sequence[int]] | None = None) -> str:
    """Draws the schedule as a grid: a row for each rank, a column for each time slot, `.` where a rank is idle.

    Args:
      schedule: a legal schedule.
      times: the slot of each action, [rank][position]. `+` joins actions of one rank in the same slot, in the order in
        which a tick runs them: F, then B or I, then W. None: every action takes one slot and runs as early as it can.

    Returns:
      The lines of the grid, each with a newline at its end; the first line numbers the slots.

    Raises:
      ScheduleError: when `times` is None and the schedule cannot be run to its end.
    """
    if times is None:
        times = _earliest_slots(schedule)
    order = tuple(Kind)
    rows: list[dict[int, str]] = [{} for _ in schedule.actions]
    for cells, row, slots in zip(rows, schedule.actions, times, strict=True):
        for action, slot in sorted(zip(row, slots, strict=True), key=lambda pair: order.index(pair[0].kind)):
            cells[slot] = f"{cells[slot]}+{action}" if slot in cells else str(action)
    return _grid(rows, 1 + max(slot for slots in times for slot in slots))


def copies_to_text(lowered: "Lowered") -> str:
    """Draws the copies of a lowered schedule to and from the host as a grid like that of `to_text`, by ticks.

    `↑0F2` is the spill of what 0F2 saved, beside the tick's forward slot; `↓0F2` is its fetch, beside the slots after.
    """
    signs = (("spill", "↑"), ("fetch", "↓"))
    chunks, microbatches = (
        {name: lowered.column(f"{name}_{field}") for name, _ in signs} for field in ("chunk", "microbatch")
    )
    rows: list[dict[int, str]] = [{} for _ in range(lowered.schedule.num_ranks)]
    for rank, cells in enumerate(rows):
        stages = lowered.schedule.stages_of(rank)
        for tick in range(lowered.num_ticks):
            copies = [
                f"{sign}{Action(stages[chunks[name][tick, rank]], Kind.F, int(microbatches[name][tick, rank]))}"
                for name, sign in signs
                if chunks[name][tick, rank] != NONE
            ]
            if copies:
                cells[tick] = "".join(copies)
    return _grid(rows, lowered.num_ticks)


def stream_to_text(lowered: "Lowered", stream: "WeightStream") -> str:
    """Draws as a grid when weights come from the host and gradients go there, with a column for each period of ticks.

    The columns are named by the first tick of each period. `↓3` is the arrival of weights of stage 3, which replace
    others at the end of the period, and `↑3` is the departure of its gradients. A chunk that takes several transfers is
    in as many columns.
    """
    periods = len(stream.loads)
    rows: list[dict[int, str]] = [{} for _ in range(lowered.schedule.num_ranks)]
    for rank, cells in enumerate(rows):
        stages = lowered.schedule.stages_of(rank)
        for period in range(periods):
            copies = [
                f"{sign}{stages[row // stream.rows_per_chunk]}"
                for row, sign in ((stream.loads[period, rank], "↓"), (stream.stores[period, rank], "↑"))
                if row != NONE
            ]
            if copies:
                cells[period] = "".join(copies)
    return _grid(rows, periods, step=stream.period)


def _grid(rows: Sequence[dict[int, str]], num_slots: int, *, step: int = 1) -> str:
    """The lines of a grid, given the text of each rank by time slot; the first line counts the slots by `step`."""
    grid = [["rank", *(str(step * slot) for slot in range(num_slots))]]
    grid += [[str(rank), *(cells.get(slot, ".") for slot in range(num_slots))] for rank, cells in enumerate(rows)]
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    slot_width = max(widths[1:])
    return "".join(
        (f"{line[0]:>{widths[0]}}" + "".join(f" {cell:^{slot_width}}" for cell in line[1:])).rstrip() + "\n"
        for line in grid
    )


def _earliest_slots(schedule: Schedule) -> list[list[int]]:
    neighbour = schedule.needs.neighbour
    slots = [-1] * (len(neighbour) + 2)  # plus MISSING and NOTHING
    last = [-1] * schedule.num_ranks
    for rank, number in execution_order(schedule):
        # What an action needs of its own stage has already run on the same rank.
        slots[number] = last[rank] = 1 + max(last[rank], slots[neighbour[number]])
    if -1 in slots[: len(neighbour)]:
        validate(schedule)  # shows where it stalls
    return [slots[start:end] for start, end in itertools.pairwise(schedule.starts)]
