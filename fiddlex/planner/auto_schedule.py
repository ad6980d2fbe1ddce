"""Finds the schedule of a config with `pipeline.schedule=auto`, for its costs and the memory of its devices.

The search (`fiddlex.synthesis`) takes a cap in microbatches, which is lowered until the memory that the memory model
predicts fits. Where the memory of the devices is not known, as on CPU devices, the cap is 2p − 1, what `1f1b` holds on
the ticks, so that the table is no slower than it by its costs. The table goes into a file, which the settled config
names as it would name a table of the user's. Invariant: the same config, costs and limit give the same table in every
process.
"""

import contextlib
import hashlib
import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import Backend
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.files.places import cache_folder
from fiddlex.files.whole_files import replacing
from fiddlex.planner.predict import needed_memory, pipeline_of
from fiddlex.planner.times import MicrobatchTimes
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.placement import place_layers
from fiddlex.schedules.text import to_csv
from fiddlex.schedules.ticks import fills_pairs
from fiddlex.simulate.lockstep import lockstep
from fiddlex.synthesis.anywhere import find_among, placements
from fiddlex.synthesis.cache import FOLDER
from fiddlex.synthesis.problem import Problem, check_size
from fiddlex.synthesis.search import NAME, Found

AUTO = NAME  # of `pipeline.schedule`
EFFORT = 300_000  # of a search for each placement (`fiddlex.synthesis.search`): a config may take several searches
_MOST_CAPS = 8  # caps that are tried, the least of all as the last


class Memory(NamedTuple):
    """The memory of a device."""

    limit: int  # bytes that a program may take
    backend: Backend  # how the compiler stores arrays


class Settled(NamedTuple):
    """The result of a search."""

    config: Config  # with the table that was found in place of the word
    found: Found
    bubble_fraction: float  # in lockstep, as a share of the work (`Timeline.bubble_fraction`)
    cap: float  # the most microbatches of the whole rank that the search allowed
    fits: bool | None  # whether the predicted memory fits the devices; None: their memory is not known


def find_schedule(config: Config, times: MicrobatchTimes, memory: Memory | None) -> Settled:
    """The schedule of a config with `pipeline.schedule=auto` and no word in `pipeline.layers_per_stage`.

    Raises:
      ConfigError: when the config has fields with which no schedule is searched, or fewer layers than stages.
    """
    _check(config)
    chunks, cap = config.pipeline.num_chunks, 2.0 * config.mesh.pipe - 1
    if memory is None:
        found = _find(config, times, cap)
        return Settled(_applied(config, found), found, _bubble(config, times, found), cap, None)
    cap = math.inf
    for left in reversed(range(_MOST_CAPS)):
        found = _find(config, times, cap)
        settled = _applied(config, found)
        needed = needed_memory(settled, memory.backend)
        slots = pipeline_of(settled).sizes.slots.stash
        if needed.peak <= memory.limit or cap == 1:
            break
        of_slot = (needed.stash + needed.weight_stash) / slots  # a lower cap has fewer I whose W waits, too
        spare = math.ceil((needed.peak - memory.limit) / of_slot)
        cap = max(min(cap, slots / chunks) - spare / chunks, 1.0) if left > 1 else 1.0  # the last is the least
    return Settled(settled, found, _bubble(config, times, found), cap, needed.peak <= memory.limit)


def _check(config: Config) -> None:
    pipeline, name = config.pipeline, f"pipeline.schedule={AUTO}"
    try:
        check_size(config.mesh.pipe * pipeline.num_chunks, pipeline.num_microbatches)
    except ScheduleError as error:
        raise ConfigError(f"{name}: {error}") from error
    if pipeline.semantics != "sync" or pipeline.semantics_schedule:
        raise ConfigError(
            f"{name} with pipeline.semantics={pipeline.semantics}, pipeline.semantics_schedule="
            f"{pipeline.semantics_schedule!r}: schedules are searched for batches that are flushed. Use "
            "pipeline.semantics=sync, or pipeline.schedule=1f1b, which has no bubble under 2bw from 2(p − 1) "
            "microbatches on."
        )
    fixed = {"order": "auto", "stash_memory": "device", "weights_memory": "device"}
    for field, value in fixed.items():
        if getattr(pipeline, field) != value:
            raise ConfigError(
                f"{name} with pipeline.{field}={getattr(pipeline, field)}: schedules are searched with everything on "
                f"the devices, and have an order of their own. Use pipeline.{field}={value}, or name a schedule."
            )


def _find(config: Config, times: MicrobatchTimes, cap: float) -> Found:
    """The best schedule of all placements under a cap in microbatches of the whole rank, in lockstep."""
    pipeline, problems = config.pipeline, list[Problem]()
    for ranks in placements(config.mesh.pipe, pipeline.num_chunks):
        costs = times.costs(place_layers(ranks, config.model.num_layers, pipeline.layers_per_stage))
        try:
            problems.append(Problem.in_microbatches(ranks, pipeline.num_microbatches, costs, cap))
        except ScheduleError as error:
            raise ConfigError(f"pipeline.schedule={AUTO}: {error}") from error
    return find_among(problems, effort=EFFORT * len(problems), with_bound=False)


def _bubble(config: Config, times: MicrobatchTimes, found: Found) -> float:
    layers = config.pipeline.layers_per_stage
    costs = times.costs(place_layers(found.schedule.placement, config.model.num_layers, layers))
    return lockstep(lower(found.schedule), costs).bubble_fraction


def _applied(config: Config, found: Found) -> Config:
    path = _written(to_csv(found.schedule))
    order = "ahead" if fills_pairs(found.schedule) else "auto"  # of a file, which is strict
    return replaced(config, {"pipeline.schedule": f"file:{path}", "pipeline.order": order})


def _written(table: str) -> Path:
    """Writes a table to a file, whose name has the table's checksum."""
    name = f"{AUTO}-{hashlib.sha256(table.encode()).hexdigest()[:16]}.csv"
    folders = [Path(tempfile.gettempdir()) / f"fiddlex-{os.getuid()}"]
    with contextlib.suppress(FileNotFoundError):  # the user has no home
        folders.insert(0, cache_folder() / FOLDER)
    return _first_writable(folders, name, table)


def _first_writable(folders: Sequence[Path], name: str, table: str) -> Path:
    errors = []
    for each in folders:
        try:
            each.mkdir(parents=True, exist_ok=True)
            with replacing(each / name, shared=True) as file:
                file.write(table.encode())
        except OSError as error:
            errors.append(str(error))
            continue
        return each / name
    raise ConfigError(
        f"pipeline.schedule={AUTO}: the table that was found can be kept in no folder ({'; '.join(errors)}). Set "
        "XDG_CACHE_HOME to a folder that you may write."
    )
