"""Prints the bubbles of schedules as a markdown table: formulas beside both clocks.

    fiddlex bubbles [--pipe=4 --pipe=8 --chunks=2 --microbatches=32 --format=json]
    fiddlex bubbles --schedule=1f1b --schedule=/tmp/mine.py:mine --schedule=file:/tmp/mine.csv
    fiddlex bubbles --found [--pipe=4]
    fiddlex bubbles --semantics=2bw [--pipe=64]

F, I and W of a stage take one unit each, and hops take none. A bubble is given as a share of the work, and memory as
the most activations that a rank holds, in microbatches of the whole rank. Sizes at which a schedule does not exist are
left out; without a formula, or where it does not hold, a schedule has an empty cell. With `--found`, each row also has
the bubble of the best schedule found (`fiddlex.synthesis`) for the lockstep clock that holds no more than the row's
schedule, and a bubble that none can beat with the placements of stages that are searched; that takes seconds for each
row. `--semantics` prints the second table instead: the time of a batch in the lockstep clock with and without a flush,
for 1, 2 and 4 microbatches a rank unless `--microbatches` is given. It is about 1F1B and about interleaved 1F1B with
two chunks unless `--schedule` is given; `--chunks` alone is of interleaved 1F1B.
"""

import functools
import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping

from absl import flags

from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule, require_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import make_semantics
from fiddlex.schedules.windows import unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.steady import steady
from fiddlex.simulate.timeline import BATCH_TIMES, bubble_in
from fiddlex.synthesis.anywhere import find_anywhere
from fiddlex.synthesis.search import NAME as AUTO
from fiddlex.terminal.command_line import define_registering
from fiddlex.terminal.readable import counted

logger = logging.getLogger("fiddlex.bubbles")

define_registering(GENERATORS)
_PIPE = flags.DEFINE_multi_integer("pipe", [], "ranks; by default 2 to 16, with --semantics 2 to 64", lower_bound=1)
_CHUNKS = flags.DEFINE_multi_integer("chunks", [1, 2, 3, 4], "stages on a rank", lower_bound=1)
_FOUND = flags.DEFINE_bool("found", False, "also search for the best schedule that holds as much, in lockstep")
_SCHEDULES = flags.DEFINE_multi_string(
    "schedule",
    [],
    "a name, PATH.py:FUNCTION, or file:PATH.csv, which has sizes of its own; by default all names with a formula",
)
_SEMANTICS = flags.DEFINE_string(
    "semantics", None, "2bw, stash, vertical_sync, delay:K or PATH.py:FUNCTION, to compare with a flush"
)
_MICROBATCHES = flags.DEFINE_multi_integer("microbatches", [8, 32, 128], "microbatches in a batch", lower_bound=1)
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "json: one JSON object last on standard output")

# The bubble over the work, and the sizes at which that formula holds, as functions of p, v and m. GPipe: Huang et al.,
# NeurIPS 2019; 1F1B, interleaved: Narayanan et al., SC 2021, section 2.2; breadth-first: Lamy-Poirier, MLSys 2023,
# section 4; zero-bubble: Qi et al., ICLR 2024, sections 2 and 6. Those of V-Half, V-Min and DualPipeV are fiddlex's own
# (`fiddlex.schedules.v_shape`, `fiddlex.schedules.dual_pipe_v`).
FORMULAS: dict[str, tuple[Callable[[int, int, int], float], Callable[[int, int, int], bool]]] = {
    "gpipe": (lambda p, v, m: (p - 1) / m, lambda p, v, m: v == 1),
    "1f1b": (lambda p, v, m: (p - 1) / m, lambda p, v, m: v == 1),
    "interleaved_1f1b": (lambda p, v, m: (p - 1) / (v * m), lambda p, v, m: m % p == 0),
    "breadth_first": (lambda p, v, m: (p - 1) / (v * m), lambda p, v, m: m >= p),
    "zb_h1": (lambda p, v, m: (p - 1) / (3 * m), lambda p, v, m: v == 1 and m >= p),
    "zb_h2": (lambda p, v, m: 0.0, lambda p, v, m: v == 1 and m >= 2 * p - 1),
    "zb_v": (lambda p, v, m: 0.0, lambda p, v, m: v == 2 and m >= 2 * p - 1),
    "v_half": (
        lambda p, v, m: (3 * p - (4 if p % 2 else 7)) / (6 * m),
        lambda p, v, m: v == 2 and p > 2 and m > (p + 2) // 2,
    ),
    "v_min": (
        lambda p, v, m: (4 * p - (7, 5, 9)[p % 3]) / (6 * m),
        lambda p, v, m: v == 2 and p > 2 and m > (p + 4) // 3,
    ),
    "dual_pipe_v": (lambda p, v, m: (p - 1) / (6 * m), lambda p, v, m: v == 2 and m >= 2 * p - 1),
}
# The columns: their names in JSON, and in the table.
_SIZES = {"schedule": "schedule", "pipe": "p", "chunks": "v", "microbatches": "m"}
_COLUMNS = _SIZES | {
    "formula": "formula",
    "free_running": "free-running",
    "lockstep": "lockstep",
    "num_ticks": "ticks",
    "held_free_running": "held, free",
    "held_lockstep": "held, lockstep",
}
_FOUND_COLUMNS = {"found": "found, lockstep", "bound": "lower bound"}

Sizes = tuple[str, int, int | None, int]  # a schedule and its ranks, chunks and microbatches
Row = tuple[str | int | float | None, ...]


def main(argv: list[str]) -> None:
    """Prints the table."""
    if _SEMANTICS.value and _FOUND.value:
        raise ConfigError(
            "--found searches for schedules that are flushed, and --semantics is about others: leave one out."
        )
    for schedule in _SCHEDULES.value:
        if schedule == AUTO:
            raise ConfigError(
                "--schedule=auto: a schedule, which is flushed after each batch, is searched for sizes and costs. "
                "fiddlex bubbles --found shows the bubble of the best one beside each row, and "
                "fiddlex schedule --name=auto --pipe=… --microbatches=… the schedule."
            )
        require_schedule(schedule)
        if _SEMANTICS.value and source_of(schedule).kind is Kind.TABLE:
            raise ConfigError(
                f"--schedule={schedule} with --semantics={_SEMANTICS.value}: several sizes are compared, and a table "
                f"has its own. fiddlex schedule --name={schedule} --semantics={_SEMANTICS.value} tells of the table."
            )
    if _SEMANTICS.value:
        columns = _SIZES | {
            "flush": "flush",
            "no_flush": _SEMANTICS.value,
            "faster": "faster",
            "ticks_of_first_step": "first step, ticks",
            "ticks_of_a_batch": "ticks a batch",
        }
        forms = {"flush": ".3f", "no_flush": ".3f", "faster": ".2f"}
        row = functools.partial(_semantics_row, _SEMANTICS.value)
        _print(columns, _rows(_semantics_sizes(), row), forms, {"semantics": _SEMANTICS.value})
        return
    bubble = bubble_in(BATCH_TIMES)
    shares = dict.fromkeys(("formula", "free_running", "lockstep", *_FOUND_COLUMNS), ".4f")
    _print(_COLUMNS | (_FOUND_COLUMNS if _FOUND.value else {}), _rows(_sizes(), _row), shares, {"bubble": bubble})
    if _FORMAT.value == "text":
        print(f"\nbubble: {bubble}", flush=True)


def _print(columns: Mapping[str, str], rows: Iterator[Row], forms: Mapping[str, str], facts: Mapping[str, str]) -> None:
    """Prints rows, each as soon as it is there, or with --format=json all of them last.

    Args:
      columns: the columns' names in JSON, each with its heading.
      rows: a cell for each column; None leaves it empty.
      forms: how the table prints the numbers of some columns; others as `:g` does.
      facts: what is beside the rows in JSON.
    """
    if _FORMAT.value == "json":
        print(json.dumps({"rows": [dict(zip(columns, row, strict=True)) for row in rows], **facts}))
        return
    first = [*itertools.islice(rows, 1)]  # a table of which every row is refused has no header either
    print(f"| {' | '.join(columns.values())} |\n|{'---|' * len(columns)}", flush=True)
    for row in itertools.chain(first, rows):
        cells = (
            "" if cell is None else format(cell, forms.get(name, "g")) if isinstance(cell, float) else str(cell)
            for name, cell in zip(columns, row, strict=True)
        )
        print(f"| {' | '.join(cells)} |", flush=True)


def _rows(sizes: Iterator[Sizes], make_row: Callable[[str, Schedule], Row]) -> Iterator[Row]:
    """The rows of a table, without the sizes at which a schedule does not exist.

    Raises:
      ScheduleError: at the end, when a schedule of --schedule exists at none of the sizes, or none of all names does.
    """
    missing: dict[str, list[ScheduleError]] = {}
    seen = set()
    for name, pipe, chunks, num_microbatches in sizes:
        try:
            schedule = _scheduled(name, pipe, chunks, num_microbatches)
        except ScheduleError as error:
            missing.setdefault(name, []).append(error)
            continue
        key = name, schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
        if key not in seen:  # as a table is, whose sizes are always the same
            seen.add(key)
            yield make_row(name, schedule)
    for name, errors in missing.items():
        if name in _SCHEDULES.value or not seen:
            if name not in {name for name, *_ in seen}:
                raise errors[-1]
            logger.warning(
                "--schedule=%s: left out at %s, the last since: %s", name, counted(len(errors), "size"), errors[-1]
            )


def _sizes() -> Iterator[Sizes]:
    """The schedules and their sizes; where no formula holds, as many chunks as they like unless a flag says."""
    names = _SCHEDULES.value or FORMULAS
    asked = _CHUNKS.value if _CHUNKS.present else (None,)
    for pipe, num_microbatches, name in itertools.product(_PIPE.value or [2, 4, 8, 16], _MICROBATCHES.value, names):
        holding = [chunks for chunks in _CHUNKS.value if _holds(name, pipe, chunks, num_microbatches)]
        yield from ((name, pipe, chunks, num_microbatches) for chunks in holding or asked)


def _holds(name: str, pipe: int, chunks: int, num_microbatches: int) -> bool:
    return name in FORMULAS and FORMULAS[name][1](pipe, chunks, num_microbatches)


def _scheduled(name: str, pipe: int, chunks: int | None, num_microbatches: int) -> Schedule:
    """A schedule of these sizes; a table has its own unless flags give them."""
    is_table = source_of(name).kind is Kind.TABLE
    return make_schedule(
        name,
        pipe=pipe if _PIPE.present or not is_table else None,
        chunks=chunks,
        num_microbatches=num_microbatches if _MICROBATCHES.present or not is_table else None,
        words=("--pipe", "--chunks", "--microbatches"),
    )


def _row(name: str, schedule: Schedule) -> Row:
    sizes = schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
    formula = FORMULAS[name][0](*sizes) if _holds(name, *sizes) else None
    lowered = lower(schedule)
    clocks = free_running(schedule, Costs()), lockstep(lowered, Costs())
    bubbles = (timeline.bubble_fraction for timeline in clocks)
    held = [max(timeline.peak_inflight) for timeline in clocks]
    found = _found(*sizes, cap=held[1]) if _FOUND.value else ()
    return name, *sizes, formula, *bubbles, lowered.num_ticks, *held, *found


def _found(pipe: int, chunks: int, num_microbatches: int, *, cap: float) -> tuple[float, float]:
    """The bubble of the best schedule found under a cap, and that which no schedule can beat, over the work."""
    found = find_anywhere(pipe, chunks, num_microbatches, Costs(), cap=cap)
    work = 3 * chunks * num_microbatches
    return found.judged.time / work - 1, found.bound / work - 1


def _semantics_sizes() -> Iterator[Sizes]:
    """The schedules and their sizes that are compared with a flush."""
    asked: list[int | None] = [*_CHUNKS.value] if _CHUNKS.present else [None]
    schedules: list[tuple[str, int | None]] = list(itertools.product(_SCHEDULES.value, asked))
    if not schedules:
        schedules = [("interleaved_1f1b", chunks or 2) for chunks in asked]
        schedules = schedules if _CHUNKS.present else [("1f1b", None), *schedules]
    for pipe in _PIPE.value or [2, 4, 8, 16, 32, 64]:
        numbers = _MICROBATCHES.value if _MICROBATCHES.present else [pipe, 2 * pipe, 4 * pipe]
        for size, (name, chunks) in itertools.product(numbers, schedules):
            yield name, pipe, chunks, size


def _semantics_row(semantics_name: str, name: str, schedule: Schedule) -> Row:
    """The time of a batch over its work, with and without a flush, and the speedup without it."""
    pipe, chunks, size = schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches
    semantics = make_semantics(semantics_name, num_stages=schedule.num_stages, batch_size=size)
    make = functools.partial(_scheduled, name, pipe, chunks)
    flush, continuous = lockstep(lower(schedule), Costs()), steady(unroll(schedule, semantics, make), Costs())
    times = (time / flush.ideal for time in (flush.makespan, continuous.period))
    faster, ticks = flush.makespan / continuous.period, (continuous.fill_ticks, continuous.period_ticks)
    return name, pipe, chunks, size, *times, faster, *ticks
