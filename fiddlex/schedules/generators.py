"""The named schedules, each a function of its sizes; callers get them from `make_schedule` only.

Orders and placements follow the papers: GPipe (Huang et al., NeurIPS 2019, section 2.2), 1F1B with flush and
interleaved 1F1B (Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC 2021, sections
2.2.1 and 2.2.2), breadth-first (Lamy-Poirier, "Breadth-First Pipeline Parallelism", MLSys 2023, section 4). The
zero-bubble schedules are in `zero_bubble`, those with less memory than 1F1B in `v_shape`, and DualPipeV is in
`dual_pipe_v`. A schedule has one name here; `other_names` has those of papers and other systems, such as depth-first
for interleaved 1F1B.

To try a schedule of your own, write one function in a file and name it, as in `--name=PATH.py:mine` or
`pipeline.schedule=PATH.py:mine`; in a notebook, put it in the table:

    def mine(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
        rows = []
        for rank in range(pipe):
            forwards = [Action(rank, Kind.F, k) for k in range(num_microbatches)]
            backwards = [Action(rank, Kind.B, k) for k in range(num_microbatches)]
            rows.append(tuple(alternate(forwards, backwards, warmup=pipe)))
        return Schedule("mine", tuple(rows), placement=tuple(range(pipe)))

    GENERATORS["mine"] = mine

The function returns each rank's order and each stage's rank. The default of `chunks` is the number of stages on a rank
when the caller gives none. `make_schedule` proves the schedule legal or shows where it is not; a legal schedule prints,
simulates and runs like the built-in ones. If the function has traits (`fiddlex.schedules.traits`), the planner's search
includes it and predicts long pipelines without simulating them whole. A table in a file needs no function:
`file:PATH.csv`. In files, as a table or as a function, a schedule keeps its order unless told otherwise; by a name of
the table here, forwards run ahead unless its function says `strict` (`pipeline.order`). Invariant: a schedule that
`make_schedule` returns is legal and has the requested sizes.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Sequence

from fiddlex.config.rules import nearest
from fiddlex.config.user_code.registries import Registry
from fiddlex.config.values.schedule_source import FORMS, hint, source_of
from fiddlex.config.values.schedule_source import Kind as From
from fiddlex.errors import ScheduleError
from fiddlex.files.small_files import read_small
from fiddlex.schedules.buffers import Sizes, Slots
from fiddlex.schedules.dual_pipe_v import dual_pipe_v
from fiddlex.schedules.functions import load_function, made_registered
from fiddlex.schedules.other_names import told_name
from fiddlex.schedules.schedule import Action, Kind, Schedule, alternate
from fiddlex.schedules.text import from_csv
from fiddlex.schedules.traits import Generator, Traits, with_traits
from fiddlex.schedules.v_shape import v_half, v_min
from fiddlex.schedules.validate import validate
from fiddlex.schedules.zero_bubble import zb_h1, zb_h2, zb_v


@with_traits(Traits(slots=None))  # not searched: 1F1B takes the same time and less memory
def gpipe(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """All forwards, then all backwards in the same order: all microbatches are in flight at once."""
    return _one_stage_a_rank("gpipe", pipe, chunks, num_microbatches, [num_microbatches] * pipe)


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2, 2, min(m, 2 * p - 1), 0),
        sizes_2bw=lambda p, v, m: Sizes(Slots(2, 2, 2 * p - 1, 0), 2, 2, 1, 2, 1),
        searched=("sync", "2bw"),
        never_waits=True,
    )
)
def one_forward_one_backward(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """1F1B with flush: rank r warms up with p−r−1 forwards, so at most p−r microbatches are in flight on it."""
    return _one_stage_a_rank("1f1b", pipe, chunks, num_microbatches, [pipe - rank - 1 for rank in range(pipe)])


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(2, 2, v * p + min(m // p - 1, 1) * (p - 1), 0),
        period=lambda p: p,
        chunks=(2, 3, 4, 5, 6, 8),
        searched=("sync",),  # under 2BW, 1F1B has no bubble that more chunks could reduce
        never_waits=True,
    )
)
def interleaved_1f1b(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """1F1B with v = `chunks` stages per rank: 1/v of the bubble of 1F1B, at the price of more hops.

    Rank r holds stages r, r+p, …, and warms up with 2(p−r−1) + (v−1)p forwards. A rank runs p microbatches through its
    first chunk, then the same p through its next chunk, and so on; the microbatches must be a multiple of p.
    """
    if num_microbatches % pipe:
        below = num_microbatches // pipe * pipe
        raise ScheduleError(
            f"interleaved_1f1b with pipe={pipe}, num_microbatches={num_microbatches}: the microbatches must be a "
            "multiple of the ranks, since they pass the chunks in groups of one for each rank. "
            f"Use {f'{below} or ' if below else ''}{below + pipe} microbatches; 1f1b and zb_v take any number."
        )
    rows = []
    for rank in range(pipe):
        forwards, backwards = [], []
        for k in range(num_microbatches * chunks):
            chunk, microbatch = k % (pipe * chunks) // pipe, k // (pipe * chunks) * pipe + k % pipe
            forwards.append(Action(rank + pipe * chunk, Kind.F, microbatch))
            backwards.append(Action(rank + pipe * (chunks - 1 - chunk), Kind.B, microbatch))
        rows.append(tuple(alternate(forwards, backwards, warmup=2 * (pipe - rank - 1) + (chunks - 1) * pipe)))
    return Schedule("interleaved_1f1b", tuple(rows), tuple(range(pipe)) * chunks)


@with_traits(
    Traits(
        slots=lambda p, v, m: Slots(max(m - p, 0) + 2, m + 1, v * m, 0),
        spilled_slots=lambda p, v, m: Slots(max(m - p, 0) + 2, m + 1, min(m, 2), 0, v * m - (m > 1)),
        chunks=(3, 4, 5, 6, 8, 10, 12, 16, 20, 24),
        searched=("sync",),
        chunk_major=True,
    )
)
def breadth_first(*, pipe: int, chunks: int = 1, num_microbatches: int) -> Schedule:
    """All microbatches through the first chunk of every rank, then all through the next, and back in the same way.

    Rank r holds stages r, r+p, …. The bubble is 1/v of 1F1B's if there are at least as many microbatches as ranks. All
    microbatches are in flight at once. A rank takes up each chunk twice in a batch, so that weights on the host
    (`fiddlex.schedules.weight_stream`) come a fixed number of times.
    """
    rows = []
    for rank in range(pipe):
        stages, microbatches = range(rank, pipe * chunks, pipe), range(num_microbatches)
        forwards = [Action(stage, Kind.F, k) for stage in stages for k in microbatches]
        backwards = [Action(stage, Kind.B, k) for stage in reversed(stages) for k in microbatches]
        rows.append((*forwards, *backwards))
    return Schedule("breadth_first", tuple(rows), tuple(range(pipe)) * chunks)


def _one_stage_a_rank(name: str, pipe: int, chunks: int, num_microbatches: int, warmups: list[int]) -> Schedule:
    del chunks  # make_schedule refuses any number but one
    rows = []
    for rank, warmup in enumerate(warmups):
        forwards, backwards = (
            [Action(rank, kind, microbatch) for microbatch in range(num_microbatches)] for kind in (Kind.F, Kind.B)
        )
        rows.append(tuple(alternate(forwards, backwards, warmup=warmup)))
    return Schedule(name, tuple(rows), tuple(range(pipe)))


MOST_ACTIONS = 2**24  # such a schedule takes some gigabytes, and a minute or more to lower

GENERATORS: Registry[Generator] = Registry(
    "pipeline.schedule",
    {
        "gpipe": gpipe,
        "1f1b": one_forward_one_backward,
        "interleaved_1f1b": interleaved_1f1b,
        "breadth_first": breadth_first,
        "zb_h1": zb_h1,
        "zb_h2": zb_h2,
        "zb_v": zb_v,
        "v_half": v_half,
        "v_min": v_min,
        "dual_pipe_v": dual_pipe_v,
    },
)


def make_schedule(
    name: str,
    *,
    pipe: int | None = None,
    chunks: int | None = None,
    num_microbatches: int | None = None,
    order: str = "auto",
    words: Sequence[str] = ("pipe", "chunks", "num_microbatches"),
) -> Schedule:
    """Returns the schedule `name` for the given sizes, proven legal.

    Args:
      name: a key of `GENERATORS`; `file:PATH.csv` for a table in the form of `fiddlex.schedules.text.from_csv`; or
        `PATH.py:FUNCTION` for a function as `fiddlex.schedules.functions` takes it.
      pipe: number of ranks; None: the number in the table.
      chunks: largest number of stages on a rank; None: the number in the table, or the generator's default.
      num_microbatches: microbatches in the batch of one replica; None: the number in the table.
      order: `strict` or `ahead`, see `Schedule.strict`; `auto`: strict for a user's file, else as the schedule says.
      words: the names of the three sizes in error messages: config fields, or flags.

    Raises:
      ScheduleError: when no schedule has this name, a size is missing, the schedule does not exist for these sizes, a
        file cannot be read or fails, or the actions break a rule (the error shows the grid).
    """
    asked = (pipe, chunks, num_microbatches)
    for word, value in zip(words, asked, strict=True):
        if value is not None and value < 1:
            raise ScheduleError(f"schedule {name}: {word}={value} must be at least 1.")
    source = source_of(name)
    if source.kind is From.TABLE:
        schedule = _read(source.path, name)
    else:
        generator = generator_of(name)
        if pipe is None or num_microbatches is None:
            raise ScheduleError(f"schedule {name} needs {words[0]} and {words[2]}; only a table has its own.")
        sizes = {"pipe": pipe, **({} if chunks is None else {"chunks": chunks}), "num_microbatches": num_microbatches}
        if (number := 2 * math.prod(sizes.values())) > MOST_ACTIONS:
            given = ", ".join(f"{word}={size}" for word, size in zip(words, asked, strict=True) if size is not None)
            raise ScheduleError(
                f"schedule {name} with {given} has {number:,} actions or more; it can have {MOST_ACTIONS:,}. Use fewer "
                "ranks, chunks or microbatches."
            )
        registered = source.kind is From.NAME and name not in GENERATORS.built_in
        schedule = made_registered(generator, name, sizes) if registered else generator(**sizes)
    own = schedule.strict or source.is_own
    schedule = validate(dataclasses.replace(schedule, strict=own if order == "auto" else order == "strict"))
    _check_sizes(name, schedule, asked, words)
    return schedule


def generator_of(name: str) -> Generator:
    """The function behind a name, `PATH.py:FUNCTION`, or `file:PATH.csv`; that of a table gives it for any sizes."""
    source = source_of(name)
    if source.kind is From.FUNCTION:
        return load_function(source.path, source.function)
    if source.kind is From.TABLE:
        return _generator_of_table(source.path, name)
    if name in GENERATORS.built_in and name in GENERATORS.origins:  # a workdir tells the schedule's name alone
        raise ScheduleError(
            f"fiddlex.schedules.generators.GENERATORS[{name!r}] is another than fiddlex's own. Programs that read the "
            "workdir would run fiddlex's: register yours under another name."
        )
    if name in GENERATORS:
        return GENERATORS[name]
    if name == "auto":
        raise ScheduleError(
            "schedule auto has to be searched first, for its costs: fiddlex.planner.settle.settle puts the table that "
            "it finds into a config."
        )
    if told := told_name(name, GENERATORS):
        raise ScheduleError(f"there is no schedule {name!r}: {told}")
    raise ScheduleError(
        f"there is no schedule {name!r}. {hint(name) or nearest(name.lower(), [*GENERATORS, 'auto', *FORMS])}"
    )


def require_schedule(name: str) -> None:
    """Raises ScheduleError when `make_schedule` could make no schedule of that name, whatever its sizes."""
    if source_of(name).kind is From.TABLE:
        make_schedule(name)
    else:
        generator_of(name)


@functools.cache
def _generator_of_table(path: str, name: str) -> Generator:
    def table(**sizes: int) -> Schedule:
        del sizes  # whoever asks compares them
        return dataclasses.replace(_read(path, name), strict=True)

    return table


def _check_sizes(name: str, schedule: Schedule, asked: Sequence[int | None], words: Sequence[str]) -> None:
    sizes = (schedule.num_ranks, schedule.num_chunks, schedule.num_microbatches)
    rows = [row for row in zip(words, sizes, asked, strict=True) if row[2] not in (None, row[1])]
    wrong = ", ".join(f"{word}={has} (not {value})" for word, has, value in rows)
    made = ", ".join(f"{word}={has}" for word, has, _ in rows)
    if not wrong:
        return
    remedies = {
        From.NAME: f"set {wrong}.",
        From.TABLE: f"set {wrong}, or name a schedule that exists for any, such as 1f1b.",
        From.FUNCTION: f"the function made {wrong}. Let it make the sizes that it is given, or set {made}.",
    }
    raise ScheduleError(f"schedule {name} has other sizes: {remedies[source_of(name).kind]}")


def _read(path: str, name: str) -> Schedule:
    if (function := source_of(path)).kind is From.FUNCTION:
        raise ScheduleError(
            f"schedule {name}: file: is for a table. A function in a Python file is named without it: "
            f"{function.path}:{function.function or 'FUNCTION'}."
        )
    try:
        text = read_small(path)
    except (OSError, ValueError) as error:
        raise ScheduleError(
            f"schedule {name}: {pathlib.Path(path).absolute()} cannot be read ({error}). "
            "Give the path of a CSV file with one row of actions for each rank."
        ) from error
    return from_csv(text, name)
