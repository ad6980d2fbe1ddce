"""Prints, checks, draws, compares or exports pipeline schedules, and reports their costs.

    fiddlex schedule --name=1f1b --pipe=4 --microbatches=8
    fiddlex schedule --name=interleaved_1f1b --pipe=4 --chunks=2 --microbatches=8 --format=json
    fiddlex schedule --name=1f1b --pipe=4 --microbatches=8 --semantics=2bw
    fiddlex schedule --name=file:/tmp/mine.csv --costs=hop=0.1 --output=/tmp/mine.svg
    fiddlex schedule --name=/tmp/mine.py:mine --pipe=4 --microbatches=8
    fiddlex schedule --workdir=/tmp/gpt_tiny
    fiddlex schedule --compare=1f1b,zb_h1,zb_v --pipe=4 --microbatches=8 [--output=/tmp/three.pdf]

Two clocks give the cost. In the free-running clock, which papers use, each rank starts an action as soon as it can. In
the lockstep clock, which is the executor's, all ranks step through one table together. With `--semantics` the program
also reports, in lockstep, the cost of a pipeline with delayed weights that is not flushed, beside that of a flushed
one. `--compare` gives several schedules the same work (`fiddlex.simulate.comparison`).
"""

import dataclasses
import functools
import json
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterable

from absl import flags

from fiddlex.config import rules
from fiddlex.config.sections import MEMORIES, ORDERS
from fiddlex.config.values.schedule_source import FORMS, Kind, source_of
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.files.whole_files import write_output
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import NAMES, make_semantics
from fiddlex.schedules.text import to_csv
from fiddlex.schedules.weight_stream import WeightStream, stream_weights
from fiddlex.schedules.windows import Windows, unroll
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.comparison import Compared, Missing, compare, costs_of_stages
from fiddlex.simulate.comparison import to_text as comparison_text
from fiddlex.simulate.lockstep import lockstep
from fiddlex.simulate.page import (
    CLOCKS,
    page,
    schedule_facts,
    stream_facts,
    timeline_facts,
    unflushed_page,
    unflushed_run,
)
from fiddlex.simulate.steady import steady
from fiddlex.simulate.timeline import Timeline, bubble_in
from fiddlex.synthesis.anywhere import find_anywhere
from fiddlex.synthesis.report import facts as of_search
from fiddlex.synthesis.report import told
from fiddlex.synthesis.search import NAME as AUTO
from fiddlex.synthesis.search import Found
from fiddlex.terminal.command_line import define_path, define_registering
from fiddlex.terminal.output_format import check_output, output_format
from fiddlex.tools.run_schedule import define_run, take_run

logger = logging.getLogger("fiddlex.schedule")
STRAY_ARGUMENT = "name"

define_registering(GENERATORS)
define_run()
_NAME = flags.DEFINE_string(
    "name",
    None,
    f"{', '.join(GENERATORS)}; file:PATH.csv, a table; PATH.py:FUNCTION, your own function; or auto: the best found",
)
_COMPARE = flags.DEFINE_list(
    "compare",
    None,
    "instead of --name: several names separated by commas, for a table of their bubbles, times and memory, or a "
    "picture of all; interleaved_1f1b@2 has two chunks; a single time in --costs is that of all stages of a rank",
)
_PIPE = flags.DEFINE_integer("pipe", None, "ranks; a table has its own")
_CHUNKS = flags.DEFINE_integer("chunks", None, "stages on a rank; by default as many as the schedule takes, or one")
_MICROBATCHES = flags.DEFINE_integer("microbatches", None, "microbatches in a batch; a table has its own")
_COSTS = flags.DEFINE_string(
    "costs",
    None,
    "times in any unit, as in forward=1,backward_input=1,backward_weight=1,hop=0.1; forward=1:1:2:1 has one for each "
    "stage; what is left out is 1, a hop 0; load=… and store=…, with --weights_memory=host, are the times in which a "
    "layer's weights come and its gradients go",
)
_CAP = flags.DEFINE_float("cap", None, "for auto: the most microbatches of the whole rank that a rank may hold")
_SEMANTICS = flags.DEFINE_string(
    "semantics", None, f"{', '.join(NAMES)}: run on from batch to batch with weights so many updates old"
)
_ORDER = flags.DEFINE_enum(
    "order",
    "auto",
    list(ORDERS),
    "in lockstep: strict: one action per tick, in the schedule's order; ahead: F and B share ticks, and F runs ahead "
    "of B; auto: strict for a table or a function in a file, and what a schedule by name does by itself",
)
_STASH_MEMORY = flags.DEFINE_enum(
    "stash_memory",
    "device",
    list(MEMORIES),
    "host: what forward passes save waits in host memory; tells what each tick copies there (↑) and back (↓)",
)
_WEIGHTS_MEMORY = flags.DEFINE_enum(
    "weights_memory",
    "device",
    list(MEMORIES),
    "host: the layers' weights and gradients wait in host memory; tells in which ticks those of each stage come (↓) "
    "and go (↑)",
)
_LAYERS_PER_CHUNK = flags.DEFINE_integer("layers_per_chunk", 1, "of a stage, for --weights_memory=host", lower_bound=1)
_CLOCK = flags.DEFINE_enum(
    "clock",
    "both",
    ["both", "free_running", "lockstep"],
    "the clocks to show; a batch after another runs in lockstep; auto finds the best schedule for it, with both for "
    "lockstep",
)
_PICTURES = ("svg", "pdf", "png")
_ENDINGS = {".txt": "text", ".csv": "csv", ".json": "json"} | {f".{picture}": picture for picture in _PICTURES}
_FORMAT = flags.DEFINE_enum(
    "format",
    None,
    list(_ENDINGS.values()),
    "text: grids and costs; csv: the table, which file: reads; json: the costs as one object; svg, pdf, png: a "
    "picture; by default what the ending of --output says, or text",
)
_OUTPUT = define_path("output", None, "file to write; by default standard output, except for pictures")


def main(argv: list[str]) -> None:
    """Prints or writes the schedule in the format asked for."""
    take_run()
    output = pathlib.Path(_OUTPUT.value) if _OUTPUT.value else None
    form = output_format(_FORMAT.value, output, _ENDINGS, default="text")
    if form in _PICTURES and not output:
        raise ConfigError(f"--format={form} needs --output, the file to write the picture to.")
    if output:
        check_output("--output", output)
    costs = Costs.parse(_COSTS.value or "")
    _check_clock(costs)
    words = ("--pipe", "--chunks", "--microbatches")
    make = functools.partial(make_schedule, pipe=_PIPE.value, chunks=_CHUNKS.value, order=_ORDER.value, words=words)
    _check_search([_NAME.value or "", *(_COMPARE.value or [])])
    if _COMPARE.value is not None:
        _compare(_COMPARE.value, functools.partial(make, num_microbatches=_MICROBATCHES.value), costs, form, output)
    elif _NAME.value == AUTO:
        found = _search(costs, chunks=_CHUNKS.value)
        _show(lambda num_microbatches: found.schedule, costs, form, output, found)
    elif _NAME.value:
        _show(functools.partial(make, _NAME.value), costs, form, output)
    else:
        raise ConfigError(
            f"--name is required: {', '.join([*GENERATORS, *FORMS])} or auto; or --workdir; or --compare, with several."
        )
    if output:
        logger.info("%s is written.", output)


def _check_clock(costs: Costs) -> None:
    """Raises ConfigError when a flag is given that changes nothing but the lockstep clock, which is not shown."""
    used = {f"--order={_ORDER.value}": _ORDER.value != "auto", "sharing of --costs": costs.sharing}
    given = [name for name, value in used.items() if value]
    if given and _CLOCK.value == "free_running" and not _SEMANTICS.value:
        raise ConfigError(f"{given[0]} changes nothing without the lockstep clock: leave it or --clock out.")


def _check_search(names: list[str]) -> None:
    """Raises ConfigError when flags contradict the search of a schedule, or are about a search that there is not."""
    searches = any(name.partition("@")[0] == AUTO for name in names)
    if _CAP.value is not None and not searches:
        raise ConfigError(f"--cap={_CAP.value:g} changes nothing without --name=auto: leave it out.")
    contradictions = {
        f"--semantics={_SEMANTICS.value}": _SEMANTICS.value,
        "--stash_memory=host": _STASH_MEMORY.value == "host",
        f"--weights_memory={_WEIGHTS_MEMORY.value}": _WEIGHTS_MEMORY.value != "device",
        f"--order={_ORDER.value}": _ORDER.value != "auto"
        and all(name.partition("@")[0] == AUTO for name in names if name),
    }
    wrong = [name for name, given in contradictions.items() if given]
    if searches and wrong:
        raise ConfigError(
            "--name=auto finds schedules that are flushed after each batch, with everything on the devices and an "
            f"order of their own: leave out {wrong[0]}, or give another name."
        )


def _search(costs: Costs, chunks: int | None) -> Found:
    """The schedule that a search finds, whose notes say what was found."""
    pipe, microbatches, cap = _PIPE.value, _MICROBATCHES.value, _CAP.value
    clock = "free_running" if _CLOCK.value == "free_running" else "lockstep"
    if pipe is None or microbatches is None:
        raise ScheduleError(f"schedule {AUTO} needs --pipe and --microbatches; only a table has its own.")
    if cap is not None:
        rules.positive("--cap", cap)
    for flag, value in (("--pipe", pipe), ("--chunks", chunks), ("--microbatches", microbatches)):
        if value is not None and value < 1:
            raise ScheduleError(f"schedule {AUTO}: {flag}={value} must be at least 1.")
    try:
        found = find_anywhere(pipe, chunks or 1, microbatches, costs, cap=math.inf if cap is None else cap, clock=clock)
    except ScheduleError as error:
        raise ScheduleError(f"schedule {AUTO}: {error}") from error
    return found._replace(schedule=dataclasses.replace(found.schedule, notes=(told(found, clock),)))


def _compare(
    names: list[str], make: Callable[..., Schedule], costs: Costs, form: str, output: pathlib.Path | None
) -> None:
    """Prints or draws several schedules beside each other."""
    _check_comparison(names, costs, form)
    rows = compare(names, functools.partial(_with_chunks, make, costs), costs)
    there = [row for row in rows if isinstance(row, Compared)]
    if not there:
        raise ScheduleError("\n".join(row.reason for row in rows if isinstance(row, Missing)))
    clocks = _clocks()
    if form in _PICTURES and output:
        from fiddlex.simulate.plots import draw, save  # matplotlib is an extra, and slow to import

        for row in rows:
            if isinstance(row, Missing):
                logger.warning("--compare=%s is not in the picture: %s", row.name, row.reason)
        runs = {f"{row.name}, {clocks[clock]}": row.timelines[clock] for row in there for clock in clocks}
        save(draw(runs, brief=True), output, format=form)
    elif form == "json":
        facts = {"bubble": bubble_in(clocks), "schedules": [_compared(row, clocks) for row in rows]}
        _write(json.dumps(facts) + "\n", output)
    else:
        _write(comparison_text(rows, costs, clocks), output)


def _with_chunks(make: Callable[..., Schedule], costs: Costs, name: str) -> Schedule:
    """The schedule of a name in --compare, which may have its own number of chunks, as in `interleaved_1f1b@2`."""
    match = None
    if source_of(name).kind is not Kind.TABLE:  # whose file may have an @ in its name
        match = re.fullmatch(r"(.+)@(\d{1,9})", name, re.ASCII)
    own = {"chunks": int(match[2])} if match else {}
    if (match[1] if match else name) == AUTO:
        chunks = own.get("chunks", _CHUNKS.value or 1)
        return _search(costs_of_stages(costs, 1 / chunks), chunks).schedule
    return make(match[1] if match else name, **own)


def _check_comparison(names: list[str], costs: Costs, form: str) -> None:
    """Raises ConfigError when the names are no list, or other flags contradict --compare."""
    together = f"--compare={','.join(names)}"
    if _NAME.value:
        raise ConfigError(f"--name={_NAME.value} and {together}: show one schedule or several; leave one flag out.")
    if not all(names) or len({*names}) < len(names) or not names:
        raise ConfigError(f"{together} must name each schedule once, separated by commas, as in 1f1b,zb_h1,zb_v.")
    contradictions = {
        f"--semantics={_SEMANTICS.value}": _SEMANTICS.value,
        "--stash_memory=host": _STASH_MEMORY.value == "host",
        f"--weights_memory={_WEIGHTS_MEMORY.value}": _WEIGHTS_MEMORY.value != "device",
        f"--layers_per_chunk={_LAYERS_PER_CHUNK.value}": _LAYERS_PER_CHUNK.present,
        "load, store and spill of --costs": costs.load or costs.store or costs.spill,
    }
    if wrong := [name for name, given in contradictions.items() if given]:
        raise ConfigError(
            f"--compare is about batches that are flushed, with everything on the devices: leave out {wrong[0]}, or "
            "show one schedule with --name."
        )
    if _CHUNKS.value is not None and all(re.search(r"@\d+$", name, re.ASCII) for name in names):
        raise ConfigError(f"--chunks={_CHUNKS.value} changes nothing: all of {together} have a number of their own.")
    if form == "csv":
        raise ConfigError("csv is the format of one schedule: give --name instead of --compare, or another format.")


def _compared(row: Compared | Missing, clocks: Iterable[str]) -> dict[str, object]:
    """A row of the comparison, for JSON."""
    if isinstance(row, Missing):
        return {"name": row.name, "error": row.reason}
    timelines = {clock: timeline_facts(row.timelines[clock]) for clock in clocks}
    return schedule_facts(row.lowered) | {"name": row.name, "costs": str(row.costs)} | timelines


def _show(
    make: Callable[..., Schedule], costs: Costs, form: str, output: pathlib.Path | None, found: Found | None = None
) -> None:
    """Prints, draws or exports one schedule, which a search may have found."""
    if form == "csv":
        _check_table(searched=found is not None)
    if form in _PICTURES and _SEMANTICS.value and _CLOCK.value == "free_running":
        raise ConfigError(
            f"--clock=free_running with --semantics={_SEMANTICS.value}: pictures of one batch after another are in "
            "lockstep. Leave --clock out."
        )
    schedule = make(num_microbatches=_MICROBATCHES.value)
    if _ORDER.value != "auto" and not schedule.has_whole:
        logger.warning(
            "--order=%s changes nothing: schedule %s splits all backward passes into I and W, and each rank then runs "
            "one action per tick in the schedule's order.",
            _ORDER.value,
            schedule.name,
        )
    lowered, windows = lower(schedule, spills=_STASH_MEMORY.value == "host"), _windows(schedule, make)
    stream = _stream(lowered, costs)
    timelines = {"free_running": free_running(schedule, costs), "lockstep": lockstep(lowered, costs, stream)}
    shown = {clock: timelines[clock] for clock in _clocks()}
    if form in _PICTURES and output:
        steps = max((len(each.first) + len(each.cycle) + 1 for each in windows.values()), default=0)
        _draw(shown, _windows(schedule, make, steps), steps, costs, output, form)
        return
    if form == "csv":
        text = to_csv(schedule)
    elif form == "json":
        facts = schedule_facts(lowered) | ({"stream": stream_facts(stream)} if stream else {})
        facts |= {"found": of_search(found)} if found else {}
        facts |= {"bubble": bubble_in(shown)} | {clock: timeline_facts(run) for clock, run in shown.items()}
        if windows:
            facts["semantics"] = {name: steady(each, costs)._asdict() for name, each in windows.items()}
        text = json.dumps(facts) + "\n"
    else:
        text = page(lowered, stream, shown, costs) + "".join(unflushed_page(*item, costs) for item in windows.items())
    _write(text, output)


def _clocks() -> dict[str, str]:
    """The clocks to show, each with its name for people."""
    return {clock: title for clock, title in CLOCKS.items() if _CLOCK.value in ("both", clock)}


def _check_table(*, searched: bool) -> None:
    """Raises ConfigError when a flag is given that the table does not depend on; that of a search depends on costs."""
    unused = {
        f"--semantics={_SEMANTICS.value}": _SEMANTICS.value,
        "--stash_memory=host": _STASH_MEMORY.value == "host",
        f"--weights_memory={_WEIGHTS_MEMORY.value}": _WEIGHTS_MEMORY.value != "device",
        f"--costs={_COSTS.value}": _COSTS.value and not searched,
        f"--clock={_CLOCK.value}": _CLOCK.value != "both" and not searched,
        f"--order={_ORDER.value}": _ORDER.value != "auto",
    }
    if given := [name for name, value in unused.items() if value]:
        raise ConfigError(
            f"csv is the table of the actions of one batch, which {given[0]} does not change: leave it out."
        )


def _write(text: str, output: pathlib.Path | None) -> None:
    if output:
        write_output(output, text)
    else:
        print(text, end="")


def _stream(lowered: Lowered, costs: Costs) -> WeightStream | None:
    """When weights come from the host, with --weights_memory=host.

    Raises:
      ConfigError: when they cannot come from the host in this schedule, or with the other flags.
    """
    if _WEIGHTS_MEMORY.value == "device":
        if _LAYERS_PER_CHUNK.present:
            raise ConfigError("--layers_per_chunk changes nothing without --weights_memory=host: leave it out.")
        if costs.load or costs.store:
            raise ConfigError("--costs: load and store change nothing without --weights_memory=host: leave them out.")
        if costs.spill and _STASH_MEMORY.value == "device":
            raise ConfigError("--costs: spill changes nothing without --stash_memory=host: leave it out.")
        return None
    if _SEMANTICS.value:
        raise ConfigError(
            f"--weights_memory={_WEIGHTS_MEMORY.value} with --semantics={_SEMANTICS.value}: weights come from "
            "the host only in pipelines that are flushed, and --semantics is about others. Leave one of them out."
        )
    try:
        return stream_weights(lowered, rows_per_chunk=_LAYERS_PER_CHUNK.value)
    except ScheduleError as error:
        raise ConfigError(f"--weights_memory={_WEIGHTS_MEMORY.value}: {error}") from error


def _windows(schedule: Schedule, make: Callable[..., Schedule], num_steps: int = 0) -> dict[str, Windows]:
    """The windows of sync and the semantics asked for, over at least `num_steps` steps; none without --semantics."""
    names = dict.fromkeys(["sync", _SEMANTICS.value]) if _SEMANTICS.value else {}
    size = schedule.num_microbatches
    longer = None if source_of(_NAME.value or "").kind is Kind.TABLE else lambda number: make(num_microbatches=number)
    return {
        name: unroll(
            schedule,
            make_semantics(name, num_stages=schedule.num_stages, batch_size=size, field="--semantics"),
            longer,
            num_steps=num_steps,
            spills=_STASH_MEMORY.value == "host",
        )
        for name in names
    }


def _draw(
    shown: dict[str, Timeline], windows: dict[str, Windows], steps: int, costs: Costs, output: pathlib.Path, form: str
) -> None:
    """Draws the clocks one below the other or, with --semantics, the lockstep clock over several batches."""
    from fiddlex.simulate.plots import draw, save  # matplotlib is an extra, and slow to import

    named = dict(unflushed_run(*item, steps, costs) for item in windows.items())
    named = named or {CLOCKS[clock]: run for clock, run in shown.items()}
    semantics = {name: each.semantics for name, each in zip(named, windows.values(), strict=False)}
    save(draw(named, semantics), output, format=form)
