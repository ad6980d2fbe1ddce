"""The table of a run's schedule in its workdir, `schedule.csv`, which stands for a source that may be gone.

Whoever reads a workdir takes this table in place of a table elsewhere, of a function in a Python file, and of a name
that only the training process had registered. A schedule that fiddlex comes with is made by its name, so that it exists
for other sizes too. Invariant: a function that the workdir's own `config.json` names is never run, since somebody else
may have written that file.
"""

import itertools
import logging
import os
import re
from pathlib import Path

from fiddlex.cluster import processes
from fiddlex.config import Config, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.config.values.every import AUTO
from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.files.small_files import read_small
from fiddlex.files.whole_files import unused, write_whole
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.schedule import Schedule
from fiddlex.terminal.readable import counted

logger = logging.getLogger(__name__)

TABLE = "schedule.csv"


def with_table(config: Config, workdir: Path) -> Config:
    """`config`, or a copy that names the workdir's own table in place of a source which may be gone or another's."""
    pipeline, table = config.pipeline, workdir / TABLE
    own = {"pipeline.schedule": f"file:{table}"}
    if source_of(pipeline.schedule).is_own:
        return replaced(config, own)
    if not _is_unknown(pipeline.schedule) or not table.is_file():
        return config
    if pipeline.order == "auto" and _has_whole(table):  # by a name, forwards run ahead unless its function is strict
        own["pipeline.order"] = "strict" if _saved(workdir).order == "strict" else "ahead"
    return replaced(config, own)


def with_order(config: Config, schedule: Schedule) -> Config:
    """`config`, which names `schedule`, with the order that `with_table` could not know without the name's function."""
    strict = schedule.strict and schedule.has_whole and config.pipeline.schedule not in GENERATORS.built_in
    by_name = source_of(config.pipeline.schedule).kind is Kind.NAME
    return replaced(config, {"pipeline.order": "strict"}) if strict and by_name else config


def _has_whole(table: Path) -> bool:
    try:
        return bool(re.search(r"\dB\d", read_small(table)))
    except (OSError, ValueError):  # `make_schedule` says what is wrong with it
        return False


def with_kept_schedule(config: Config, workdir: Path) -> Config:
    """The config with the workdir's own table if a run goes on there and the source of its schedule is gone.

    A source is gone if its file is not there, or no schedule is registered under its name. All processes do what the
    first one finds.
    """
    schedule = config.pipeline.schedule

    def is_needed() -> bool:
        source, saved = source_of(schedule), _saved(workdir).schedule
        own = saved == schedule or source.kind is source_of(saved).kind is Kind.TABLE
        if not own or not (workdir / TABLE).is_file() or not (source.is_missing or _is_unknown(schedule)):
            return False
        here = f"{os.path.abspath(source.path)} is not there" if source.is_own else "no schedule has this name here"
        logger.warning(
            "pipeline.schedule=%s: %s. The run goes on with the table that it has kept, %s.",
            schedule,
            here,
            workdir / TABLE,
        )
        return True

    return with_table(config, workdir) if processes.told_by_first("schedule of the run", is_needed) else config


def keep_other_table(workdir: Path, table: str) -> None:
    """Logs that the table of a run's schedule has changed, and copies the earlier table to a file beside it."""
    path = workdir / TABLE
    # A table that its name gives in every process is not kept: the log tells of changed fields anyway.
    if not path.exists() or _saved(workdir).schedule in GENERATORS.built_in:
        return
    earlier = path.read_text(encoding="utf-8", errors="replace")
    if earlier.split() == table.split():
        return
    copy = unused(workdir, f"{path.stem}-{{}}.csv")
    write_whole(copy, earlier)
    logger.warning(
        "The schedule's table has changed since this run was last started: %s. The run goes on with the new table. To "
        "go on with the earlier one, set pipeline.schedule=file:%s.",
        _first_difference(earlier.split(), table.split()),
        copy,
    )


def _first_difference(earlier: list[str], later: list[str]) -> str:
    """Where two tables, given as rows, differ first, in words."""
    if len(earlier) != len(later):
        return f"it has {counted(len(later), 'rank')}, and had {len(earlier)}"
    rows = zip(earlier, later, strict=True)
    rank = next(rank for rank, (was, now) in enumerate(rows) if was != now)
    cells = itertools.zip_longest(earlier[rank].split(","), later[rank].split(","), fillvalue="nothing")
    position, (was, now) = next((i, pair) for i, pair in enumerate(cells) if pair[0] != pair[1])
    return f"position {position} of rank {rank} is {now}, and was {was}"


def _saved(workdir: Path) -> PipelineConfig:
    """The pipeline as the workdir's config has it; one whose schedule is empty where there is none."""
    try:
        return Config.from_json(read_small(workdir / "config.json")).pipeline
    except (OSError, ValueError):
        return PipelineConfig(schedule="")


def _is_unknown(schedule: str) -> bool:
    return source_of(schedule).kind is Kind.NAME and schedule not in (*GENERATORS, AUTO)
