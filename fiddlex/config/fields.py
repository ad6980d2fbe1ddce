"""What is decided about a field of a config, in one place: where the field is declared.

`field` declares a field's default with facts about it: its roles, and which values of other fields use it
(`fiddlex.config.unused`). Whoever needs all fields of some role asks `paths`, and keeps no list of its own.
"""

import dataclasses
import enum
import functools
import operator
from collections.abc import Iterator, Mapping
from typing import Any

Need = Mapping[str, tuple[Any, ...]]
_KEY = "facts"  # of a dataclass field's metadata


class Role(enum.Flag):
    """What a field of a config decides."""

    SHAPES = enum.auto()  # the shapes of the weights
    MEANING = enum.auto()  # what model given weights are of: with another value they do not fit
    RUN = enum.auto()  # the model that a run trains, or its order of data: a run goes on with the same value
    UPDATES = enum.auto()  # how weights are updated and nothing about the model; it has a default that needs no update
    FAMILY = enum.auto()  # a part of the model that only some families have
    NOT_EXAMPLES = enum.auto()  # of `data`: nothing about the examples to train on
    NOT_SAMPLES = enum.auto()  # of `data`: nothing about the samples, of which examples are made


SHAPES, MEANING, RUN, UPDATES, FAMILY, NOT_EXAMPLES, NOT_SAMPLES = Role
WEIGHTS, _NONE = SHAPES | MEANING, Role(0)


@dataclasses.dataclass(frozen=True)
class Facts:
    """What is known of a field."""

    roles: Role
    # values of other fields that use it; of each need, one path must have one of the values
    needs: tuple[Need, ...] = ()
    value: str = ""  # property of its section that is compared in its place, since several values may mean the same
    short: str = ""  # a name for it that no other field has; empty: its own name, if no other field has that


def field(default: Any, *facts: Role | Need, value: str = "", short: str = "") -> Any:
    """Declares a field: its default and, as in `Facts`, its roles and needs."""
    roles = functools.reduce(operator.or_, (each for each in facts if isinstance(each, Role)), _NONE)
    needs = tuple(each for each in facts if not isinstance(each, Role))
    return dataclasses.field(default=default, metadata={_KEY: Facts(roles, needs, value, short)})


def facts_of(of_section: dataclasses.Field[Any]) -> Facts:
    found: Facts = of_section.metadata.get(_KEY, Facts(_NONE))
    return found


def declared(config: type) -> Iterator[tuple[str, Facts]]:
    """The path, as `mesh.pipe`, and the facts of each field of a class of configs."""
    for section in dataclasses.fields(config):
        for each in dataclasses.fields(section.type):  # type: ignore[arg-type]
            yield f"{section.name}.{each.name}", facts_of(each)


def paths(config: type, role: Role) -> dict[str, str]:
    """The paths of the fields with one of some roles, and for each the path of the value that is compared."""
    found = {path: facts for path, facts in declared(config) if facts.roles & role}
    return {path: f"{path.partition('.')[0]}.{facts.value}" if facts.value else path for path, facts in found.items()}


def short_names(config: type) -> dict[str, str]:
    """The paths of fields by a name without a section, where only one field has it."""
    given = {facts.short: path for path, facts in declared(config) if facts.short}
    names = [path.partition(".")[2] for path, _ in declared(config)]
    unique = {path.partition(".")[2]: path for path, _ in declared(config)}
    return {name: path for name, path in unique.items() if names.count(name) == 1} | given
