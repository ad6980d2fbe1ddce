"""Schedules as text: CSV that travels between systems, and a grid of time slots for a terminal.

The CSV is the published form: a row for each rank, its actions in order, as `2F0` tokens. A stage belongs to the rank
in whose row it stands. Invariant: `from_csv(to_csv(schedule), name)` has the actions and the placement of `schedule`.
"""

import collections
import itertools
from collections.abc import Sequence

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule, execution_order
from fiddlex.schedules.validate import validate


def to_csv(schedule: Schedule) -> str:
    """One line for each rank: its actions in order, separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str) -> Schedule:
    """Reads a table of actions. It is not yet validated.

    Args:
      text: a row for each rank; cells hold `2F0` tokens or, for idle slots, nothing. Blank lines are skipped.
      name: of the schedule, and of the table in messages.

    Returns:
      The schedule. A stage is placed on the rank that has most of its actions; `validate` marks the others.

    Raises:
      ScheduleError: on a cell that is no action, with its row and column (from 1), or a stage that is in no row.
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
      times: the slot of each action, [rank][position]; actions of one rank in the same slot are joined by `+`, F before
        B or I before W, as a tick runs them. Without it, every action takes one slot and runs as early as it can.

    Returns:
      The lines, the slots numbered above, each ended by a newline.

    Raises:
      ScheduleError: when `times` is None and the schedule cannot be run to its end.
    """
    if times is None:
        times = _earliest_slots(schedule)
    order = tuple(Kind)
    num_slots = 1 + max(slot for slots in times for slot in slots)
    grid = [["rank", *map(str, range(num_slots))]]
    for rank, (row, slots) in enumerate(zip(schedule.actions, times, strict=True)):
        cells: dict[int, str] = {}
        for action, slot in sorted(zip(row, slots, strict=True), key=lambda pair: order.index(pair[0].kind)):
            cells[slot] = f"{cells[slot]}+{action}" if slot in cells else str(action)
        grid.append([str(rank), *(cells.get(slot, ".") for slot in range(num_slots))])
    widths = [max(map(len, column)) for column in zip(*grid, strict=True)]
    slot_width = max(widths[1:])
    return "".join(
        (f"{line[0]:>{widths[0]}}" + "".join(f" {cell:^{slot_width}}" for cell in line[1:])).rstrip() + "\n"
        for line in grid
    )


def _earliest_slots(schedule: Schedule) -> list[list[int]]:
    neighbour = schedule.needs.neighbour
    slots = [-1] * (len(neighbour) + 2)  # with NOTHING and MISSING
    last = [-1] * schedule.num_ranks
    for rank, number in execution_order(schedule):
        # What it needs of its own stage has run on its own rank.
        slots[number] = last[rank] = 1 + max(last[rank], slots[neighbour[number]])
    if -1 in slots[: len(neighbour)]:
        validate(schedule)  # shows where it stalls
    return [slots[start:end] for start, end in itertools.pairwise(schedule.starts)]
