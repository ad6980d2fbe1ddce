"""Fields of a config that change nothing, given the values of other fields.

A field that another field may make the run ignore says so where it is declared (`fiddlex.config.fields`).
`Config.validate` refuses such a field if it is set all the same, since whoever sets it expects it to do something.
`unused_fields` names the fields that change nothing in a config's schedule and are legitimate:
`pipeline.stash_memory=host` depends on the schedule, which a plan may replace, and one list of `pipeline.recompute` may
serve models with dropout and without.
"""

import dataclasses
import typing
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from fiddlex.config.fields import facts_of
from fiddlex.config.values.schedule_source import is_function

if typing.TYPE_CHECKING:
    from fiddlex.config.config import Config

OWN = "PATH.py:FUNCTION"  # stands for all functions of the user's


@dataclasses.dataclass(frozen=True)
class Other:
    """Stands for all values of a field but its default; `example` is one of them, for messages."""

    example: Any


class Unused(NamedTuple):
    """A field that is set to something else than its default, and that other fields make the run ignore."""

    path: str
    by: Collection[str]  # paths of the other fields
    message: str  # what to tell who has set it


def unused(config: "Config") -> Iterator[Unused]:
    for section in dataclasses.fields(config):
        holder = getattr(config, section.name)
        for field in dataclasses.fields(holder):
            value, name = getattr(holder, field.name), f"{section.name}.{field.name}"
            for need in facts_of(field).needs if value != field.default else ():
                if not any(_is_one(config, path, values) for path, values in need.items()):
                    having = " and ".join(f"{path}={_shown(_value(config, path))}" for path in need)
                    remedies = [f"{path} to {_listed(values)}" for path, values in need.items()]
                    remedy = ", or ".join([*remedies, f"{name} to {_shown(field.default)}"])
                    yield Unused(name, need, f"{name}={_shown(value)} with {having}: it changes nothing. Set {remedy}.")
                    break


def reset_unused(config: "Config", *, by: Collection[str] | None = None) -> None:
    """Sets fields that other fields make the run ignore to their defaults.

    `by` has the paths of fields that were set last. Only what these make the run ignore is reset, and never they
    themselves; None resets all that is ignored.
    """
    paths = None if by is None else {*by, *(["model.objective"] if "model.family" in by else [])}
    while found := [
        each for each in unused(config) if paths is None or (each.path not in paths and not paths.isdisjoint(each.by))
    ]:
        for section, _, name in (each.path.partition(".") for each in found):
            holder = getattr(config, section)
            setattr(holder, name, getattr(type(holder), name))


def _is_one(config: "Config", path: str, values: tuple[Any, ...]) -> bool:
    value = _value(config, path)
    for each in values:
        if isinstance(each, Other):
            section, _, name = path.partition(".")
            found = value != getattr(type(getattr(config, section)), name)
        elif each == OWN:
            found = is_function(value)
        else:
            kind, colon, _ = str(each).partition(":")
            found = each in (value, str(value)) or bool(colon and str(value).startswith(f"{kind}:"))
        if found:
            return True
    return False


def _value(config: "Config", path: str) -> Any:
    section, _, name = path.partition(".")
    return config.model.task if path == "model.objective" else getattr(getattr(config, section), name)


def _listed(values: tuple[Any, ...]) -> str:
    *others, last = (f"{each.example}, for example" if isinstance(each, Other) else _shown(each) for each in values)
    return f"{', '.join(others)} or {last}" if others else last


def _shown(value: Any) -> str:
    return '""' if value == "" else str(value)


def unused_fields(config: "Config", *, host_stash_slots: int, has_whole: bool) -> list[str]:
    """A sentence for each field of a valid config that changes nothing.

    The config's schedule has `host_stash_slots` slots of the stash in the memory of the host
    (`fiddlex.schedules.buffers.Slots`), and a whole backward pass (B) if `has_whole` is true.
    """
    pipeline, mesh = config.pipeline, config.mesh
    found = []
    if pipeline.spills and not host_stash_slots:
        found.append(
            f"pipeline.stash_memory=host changes nothing with pipeline.schedule={pipeline.schedule}, "
            f"pipeline.num_chunks={pipeline.num_chunks}, pipeline.num_microbatches={pipeline.num_microbatches} and "
            f"mesh.pipe={mesh.pipe}: copies to the host, which take a slot of the stash themselves, would save no "
            "memory there, so nothing is copied."
        )
    if pipeline.order != "auto" and not has_whole:
        found.append(
            f"pipeline.order={pipeline.order} changes nothing with pipeline.schedule={pipeline.schedule}: it splits "
            "all backward passes into I and W, and each rank then runs one action per tick in the schedule's order."
        )
    if "masks" in pipeline.recomputed and not config.model.dropout:
        found.append(
            f"masks in pipeline.recompute={pipeline.recompute} changes nothing with model.dropout=0: without dropout "
            "there are no masks to recompute."
        )
    return found
