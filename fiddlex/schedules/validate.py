"""Proves that a schedule is legal: each action runs once, on its stage's rank, after what it needs, without deadlock.

The rules hold for any exact pipelined training; those for I and W are from "Zero Bubble Pipeline Parallelism" (ICLR
2024), section 2. Invariant: if a schedule passes, ranks that each follow only their own list reach the end of it and
compute every gradient exactly once.
"""

from typing import NamedTuple, NoReturn

from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import Action, Kind, Schedule, execution_order
from fiddlex.terminal.readable import counted

_GRID_ROWS, _GRID_COLUMNS = 12, 16  # a larger grid is cropped around the action at fault
_KINDS = tuple(Kind)
_RIVALS = {Kind.F: (), Kind.B: (Kind.I, Kind.W), Kind.I: (Kind.B,), Kind.W: (Kind.B,)}

Positions = dict[Action, int]  # each action of a rank → its position in the rank's list


def validate(schedule: Schedule) -> Schedule:
    """Checks every rule, the simplest first, in time linear in the number of actions; returns the schedule itself.

    Raises:
      ScheduleError: at the first broken rule; the error shows the rule, the remedy, and the grid with a mark (`>2B0<`).
    """
    _check_placement(schedule)
    positions = _check_each_at_home_and_once(schedule)
    _check_complete(schedule, positions)
    _check_order_on_stage(schedule)
    _check_no_deadlock(schedule)
    return schedule


def _check_placement(schedule: Schedule) -> None:
    for stage, rank in enumerate(schedule.placement):
        if not 0 <= rank < schedule.num_ranks:
            raise ScheduleError(
                f"schedule {schedule.name}: stage {stage} is placed on rank {rank}, but there are actions for "
                f"{counted(schedule.num_ranks, 'rank')}, from 0: place it on one of them, or add a row of actions."
            )
    for rank in range(schedule.num_ranks):
        if rank not in schedule.placement:
            raise ScheduleError(
                f"schedule {schedule.name}: no stage is placed on rank {rank}: each rank holds at least one stage; "
                "take the rank's row out or place a stage on it."
            )
    if not schedule.num_microbatches:
        raise ScheduleError(f"schedule {schedule.name} has no actions: it needs at least one stage and microbatch.")


def _check_each_at_home_and_once(schedule: Schedule) -> list[Positions]:
    """Checks that each action runs once and on its stage's rank; returns the positions of each rank's actions."""
    all_positions = []
    for rank, row in enumerate(schedule.actions):
        positions: Positions = {}
        for position, action in enumerate(row):
            problem = _problem_with(action, rank, schedule, positions)
            if problem:
                _fail(schedule, {rank: position}, f"{action} at position {position} of rank {rank}: {problem}")
            positions[action] = position
        all_positions.append(positions)
    return all_positions


def _problem_with(action: Action, rank: int, schedule: Schedule, seen: Positions) -> str | None:
    stage, kind, microbatch = action
    if not 0 <= stage < schedule.num_stages or microbatch < 0:
        return f"stages are 0 … {schedule.num_stages - 1} here and microbatches count from 0."
    home = schedule.placement[stage]
    if home != rank:
        return f"stage {stage} is placed on rank {home}, and all its actions run there. Move it to rank {home}."
    if action in seen:
        return f"each action runs once, and this one is already at position {seen[action]}. Take one out."
    for other in _RIVALS[kind]:
        if (rival := Action(stage, other, microbatch)) in seen:
            return (
                f"B is I and W in one, and {rival} is already at position {seen[rival]}. "
                f"Keep either {stage}B{microbatch}, or {stage}I{microbatch} and {stage}W{microbatch}."
            )
    return None


def _check_complete(schedule: Schedule, positions: list[Positions]) -> None:
    # A generator: for a mistyped, huge microbatch number a list of all pairs would not fit into memory.
    every = ((stage, k) for stage in range(schedule.num_stages) for k in range(schedule.num_microbatches))
    for stage, microbatch in every:
        there = positions[schedule.placement[stage]]
        forward, fused, inputs, weights = ((stage, kind, microbatch) in there for kind in _KINDS)
        if forward and (fused or (inputs and weights)):
            continue
        if not forward:
            kind, rule = Kind.F, "each stage runs each microbatch forward"
        elif not inputs:
            kind, rule = Kind.I if weights else Kind.B, "each forward has a backward: B, or I and W"
        else:
            kind, rule = Kind.W, f"{Action(stage, Kind.I, microbatch)} gives no weight gradient"
        missing, rank = Action(stage, kind, microbatch), schedule.placement[stage]
        _fail(
            schedule,
            {rank: len(schedule.actions[rank])},
            f"{missing} is missing: {rule} (there are {schedule.num_microbatches} microbatches). "
            f"Add it to rank {rank}, which holds stage {stage}.",
            missing=missing,
        )


def _check_order_on_stage(schedule: Schedule) -> None:
    for number, need in enumerate(schedule.needs.own):
        if need > number:
            action, needed = schedule.numbered[number], schedule.numbered[need]
            rank = schedule.placement[action.stage]
            start = schedule.starts[rank]
            rule = "W comes after I" if action.kind is Kind.W else "a backward comes after its forward"
            _fail(
                schedule,
                {rank: number - start},
                f"{action} at position {number - start} of rank {rank} comes before {needed}, at position "
                f"{need - start}: {rule}. Move it behind {needed}.",
            )


class _Wait(NamedTuple):
    """What a blocked rank waits for: `head`, its next action, needs `need`, an action of another rank."""

    head: Action
    head_position: int
    need: Action
    holder: int
    position: int  # of `need` in the list of `holder`


def _check_no_deadlock(schedule: Schedule) -> None:
    waits = _waits(schedule)
    if not waits:
        return
    heads = {rank: wait.head_position for rank, wait in waits.items()}
    circle = _circle({rank: wait.holder for rank, wait in waits.items()})
    # At least one needed action comes after its holder's head in the list, or actions would depend on themselves.
    swaps = [rank for rank in circle if waits[rank].position > heads[waits[rank].holder]]
    first = circle.index(swaps[0])
    circle = circle[first:] + circle[:first]
    order = [*circle, *(rank for rank in waits if rank not in circle)]
    lines = [
        f"  rank {rank} waits at {wait.head} for {wait.need}, at position {wait.position} of rank {wait.holder}"
        for rank, wait in ((rank, waits[rank]) for rank in order[:_GRID_ROWS])
    ]
    if order[_GRID_ROWS:]:
        lines.append(f"  and {len(order) - _GRID_ROWS} more ranks wait for these")
    remedies = [
        f"on rank {wait.holder} put {wait.need} before {waits[wait.holder].head}"
        for wait in (waits[rank] for rank in swaps[:2])
    ]
    lines.append(f"{len(circle)} of them wait in a circle. To open it, {', or '.join(remedies)}.")
    _fail(
        schedule,
        {rank: heads[rank] for rank in order},
        f"deadlock: each rank runs its list in order, and {len(order)} of {schedule.num_ranks} ranks wait for ever.\n"
        + "\n".join(lines),
    )


def _waits(schedule: Schedule) -> dict[int, _Wait]:
    """For each rank that does not reach the end of its list, what it waits for; empty when every rank does."""
    starts, actions = schedule.starts, schedule.numbered
    heads = list(starts[:-1])
    for rank, number in execution_order(schedule):
        heads[rank] = number + 1
    waits = {}
    for rank, head in enumerate(heads):
        if head < starts[rank + 1]:
            # The earlier checks passed, so the head can wait only for what it needs from the neighbouring stage.
            need = schedule.needs.neighbour[head]
            holder = schedule.placement[actions[need].stage]
            waits[rank] = _Wait(actions[head], head - starts[rank], actions[need], holder, need - starts[holder])
    return waits


def _circle(waits_for: dict[int, int]) -> list[int]:
    """Ranks that wait for each other in a circle; one exists, since every rank that is waited for waits, too."""
    path = [next(iter(waits_for))]
    while waits_for[path[-1]] not in path:
        path.append(waits_for[path[-1]])
    return path[path.index(waits_for[path[-1]]) :]


def _fail(schedule: Schedule, marks: dict[int, int], message: str, *, missing: Action | None = None) -> NoReturn:
    raise ScheduleError(f"schedule {schedule.name}: {message}\n{_grid(schedule, marks, missing)}")


def _grid(schedule: Schedule, marks: dict[int, int], missing: Action | None) -> str:
    """Draws the actions of each rank by position; `marks` maps ranks to positions to mark, the most important first.

    If `missing` is given, `marks` holds only the end of its rank's row, where the grid shows it with a question mark.
    """
    focus = list(marks)[:_GRID_ROWS]
    by_distance = sorted(range(schedule.num_ranks), key=lambda rank: min(abs(rank - mark) for mark in focus))
    ranks = sorted(by_distance[:_GRID_ROWS])
    cut_columns = max(map(len, schedule.actions)) > _GRID_COLUMNS
    rows = []
    for rank in ranks:
        mark = marks.get(rank)
        start = max(0, marks.get(rank, marks[focus[0]]) - _GRID_COLUMNS // 2) if cut_columns else 0
        row = schedule.actions[rank][start : start + _GRID_COLUMNS]
        cells = [
            f">{action}<" if position == mark else f" {action} " for position, action in enumerate(row, start=start)
        ]
        if missing and mark is not None:
            cells.append(f">{missing}?<")
        label = f"rank {rank} [{start}:{start + len(row)}]" if cut_columns else f"rank {rank}"
        rows.append((label, cells))
    label_width = max(len(label) for label, _ in rows)
    cell_width = max(len(cell) for _, cells in rows for cell in cells)
    lines = [f"{label:{label_width}} " + "".join(cell.ljust(cell_width) for cell in cells) for label, cells in rows]
    if len(ranks) < schedule.num_ranks:
        lines.append(f"({schedule.num_ranks - len(ranks)} more ranks not shown)")
    return "\n".join(line.rstrip() for line in lines)
