"""Schedules as text: CSV to exchange with other systems, and a grid of time slots for a terminal.

The CSV is the published form: a row for each rank, with the rank's actions in order as `2F0` tokens. A stage belongs to
the rank whose row has its actions. The tables that torch.distributed.pipelining exports (`_dump_csv` of PyTorch 2.13)
may also have pairs of actions that torch overlaps, and tokens for communication, which here follows from the order of
the actions. Invariant: `from_csv(to_csv(schedule), name)` has the actions and the placement of `schedule`.
"""

import collections
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule
from fiddlex.schedules.table import NONE
from fiddlex.schedules.ticks import in_order, moved_ahead
from fiddlex.schedules.validate import validate
from fiddlex.terminal.readable import counted

if TYPE_CHECKING:
    from fiddlex.schedules.lowering import Lowered
    from fiddlex.schedules.weight_stream import WeightStream

_FOLLOWS = {  # what a token of torch stands for that follows from the order of the actions
    "SEND_F": "sends and receives",
    "RECV_F": "sends and receives",
    "SEND_B": "sends and receives",
    "RECV_B": "sends and receives",
    "UNSHARD": "gathers and releases of weights",
    "RESHARD": "gathers and releases of weights",
    "REDUCE_GRAD": "sums of gradients over replicas",
}
_COMMUNICATION = re.compile(r"\d{1,9}(?:((?:SEND|RECV)_[FB])\d{1,9}|(UNSHARD|RESHARD|REDUCE_GRAD))", re.ASCII)
_PAIR = re.compile(r"\(([^;()]*);([^;()]*)\)OVERLAP_F_B")
_PAIRS = "overlapped pairs"
_ALLOWED = (
    "A table may also have (0F7;3B1)OVERLAP_F_B, read as a forward and then a backward, and SEND_F, RECV_F, SEND_B, "
    "RECV_B, UNSHARD, RESHARD and REDUCE_GRAD as torch writes them, which are skipped."
)


def to_csv(schedule: Schedule) -> str:
    """Writes one line for each rank: the rank's actions in order, separated by commas."""
    return "".join(",".join(map(str, row)) + "\n" for row in schedule.actions)


def from_csv(text: str, name: str) -> Schedule:
    """Reads a table of actions into a schedule, without validating the schedule.

    Args:
      text: a row for each rank; cells hold `2F0` tokens or, for idle slots, nothing. A cell `(0F7;3B1)OVERLAP_F_B` is
        read as its forward and then its backward. Blank lines and torch's tokens for communication are skipped.
      name: name of the schedule; error messages use it for the table too.

    Returns:
      The schedule; its `notes` tell what was skipped and which pairs were read as two actions. It places a stage on the
      rank with most of the stage's actions; `validate` reports the others.

    Raises:
      ScheduleError: when a cell is none of these (the error gives row and column, from 1), or a stage is in no row.
    """
    rows = []
    numbers: collections.Counter[str] = collections.Counter()
    for number, line in enumerate(text.splitlines(), start=1):
        row: list[Action] = []
        for column, cell in enumerate(line.split(","), start=1):
            try:
                row += _actions(cell.strip(), numbers)
            except ScheduleError as error:
                raise ScheduleError(f"{name}, row {number}, column {column}: {error} {_ALLOWED}") from error
        if line.strip():
            rows.append(tuple(row))
    return Schedule(name, tuple(rows), _placement(rows, name), notes=_notes(numbers))


def _actions(cell: str, numbers: collections.Counter[str]) -> list[Action]:
    """The actions of a cell; `numbers` counts overlapped pairs and what is skipped, by the words of the notes."""
    if not cell:
        return []
    if match := _COMMUNICATION.fullmatch(cell):
        numbers[_FOLLOWS[match[1] or match[2]]] += 1
        return []
    if match := _PAIR.fullmatch(cell):
        forward, backward = (Action.parse(token.strip()) for token in match.groups())
        if forward.kind is not Kind.F or backward.kind not in (Kind.B, Kind.I):
            raise ScheduleError(f"{cell!r} must pair a forward and a backward, in this order.")
        numbers[_PAIRS] += 1
        return [forward, backward]
    return [Action.parse(cell)]


def _notes(numbers: collections.Counter[str]) -> tuple[str, ...]:
    skipped = [f"{numbers[what]} {what}" for what in dict.fromkeys(_FOLLOWS.values()) if numbers[what]]
    notes = []
    if skipped:
        notes.append(f"skipped, since they follow from the order: {', '.join(skipped)}")
    if numbers[_PAIRS]:
        notes.append(f"{_PAIRS} read as a forward and then a backward: {numbers[_PAIRS]}")
    return tuple(notes)


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

    The first line numbers the slots.

    Args:
      schedule: a legal schedule.
      times: the slot of each action, `[rank][position]`. `+` joins actions of one rank in the same slot, in the order
        of a tick: F, then B or I, then W. None: every action takes one slot, and runs as early as it can.

    Raises:
      ScheduleError: when `times` is None and the schedule cannot be run to its end.
    """
    if times is None:
        times = in_order(schedule)
        if times is None:
            validate(schedule)  # shows where it stalls
            raise AssertionError("a schedule that stalls is not valid")
    order = tuple(Kind)
    rows: list[dict[int, str]] = [{} for _ in schedule.actions]
    for cells, row, slots in zip(rows, schedule.actions, times, strict=True):
        for action, slot in sorted(zip(row, slots, strict=True), key=lambda pair: order.index(pair[0].kind)):
            cells[slot] = f"{cells[slot]}+{action}" if slot in cells else str(action)
    return _grid(rows, 1 + max(slot for slots in times for slot in slots))


def copies_to_text(lowered: "Lowered") -> str:
    """Draws copies to and from the host as a grid of ticks: `↑0F2` is the spill of what 0F2 saved, `↓0F2` its fetch."""
    signs = (("spill", "↑"), ("fetch", "↓"))
    chunks, microbatches = (
        {name: lowered.column(f"{name}_{field}") for name, _ in signs} for field in ("chunk", "microbatch")
    )

    def copies(stages: Sequence[int], tick: int, rank: int) -> str:
        return "".join(
            f"{sign}{Action(stages[chunks[name][tick, rank]], Kind.F, int(microbatches[name][tick, rank]))}"
            for name, sign in signs
            if chunks[name][tick, rank] != NONE
        )

    rows = _copies(lowered, lowered.num_ticks, copies)
    return _grid(rows, lowered.num_ticks)


def stream_to_text(lowered: "Lowered", stream: "WeightStream") -> str:
    """Draws as a grid when weights come from the host (`↓3`: those of stage 3) and gradients go there (`↑3`).

    Each column is a period of ticks, named by the first. Weights that come replace others at the end of the period. A
    chunk that takes several transfers is in as many columns.
    """
    periods = len(stream.loads)

    def copies(stages: Sequence[int], period: int, rank: int) -> str:
        rows = (stream.loads[period, rank], "↓"), (stream.stores[period, rank], "↑")
        return "".join(f"{sign}{stages[row // stream.rows_per_chunk]}" for row, sign in rows if row != NONE)

    rows = _copies(lowered, periods, copies)
    return _grid(rows, periods, step=stream.period)


def order_to_text(lowered: "Lowered", order: str) -> str:
    """What the ticks do with the order; empty where the setting, `pipeline.order` or `--order`, would not change it."""
    schedule = lowered.schedule
    if schedule.strict and schedule.has_whole:
        return f"each rank runs one action a tick, in the schedule's order; with {order}=ahead, F and B share ticks"
    moved = moved_ahead(schedule, lowered.ticks)
    if not moved:
        return ""
    rank, first = next(iter(moved.items()))
    number = sum(len(each.forwards) for each in moved.values())
    return (
        f"the ticks run {counted(number, 'forward')} before backwards that come first in the schedule: on rank {rank} "
        f"at first {first.forwards[0]}, before {first.passed}, so that the rank holds {first.held} forward passes of a "
        f"stage instead of {first.held_in_order}; {order}=strict keeps the schedule's order"
    )


def _copies(lowered: "Lowered", columns: int, cell: Callable[[Sequence[int], int, int], str]) -> list[dict[int, str]]:
    """By rank and column, the texts that `cell` gives for the rank's stages, a column and the rank; empty ones go."""
    rows = enumerate(map(lowered.schedule.stages_of, range(lowered.schedule.num_ranks)))
    return [{at: text for at in range(columns) if (text := cell(stages, at, rank))} for rank, stages in rows]


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
