"""Sets fields of a config by their paths, such as `mesh.pipe`, to given values or from texts such as `mesh.pipe=4`.

What-if questions and lists of cases use these texts. The texts of the command line, `--config.mesh.pipe=4`, are parsed
by ml_collections (`fiddlex.terminal.command_line`).
"""

import copy
import operator
from collections.abc import Mapping
from typing import Any

from fiddlex.config.config import Config, check_field
from fiddlex.config.fields import UPDATES, paths
from fiddlex.config.records import type_name
from fiddlex.config.unused import reset_unused
from fiddlex.errors import ConfigError

# The settings of a run that flushes its pipeline and has its weights on the devices, for uses of a run's weights that
# update none.
FLUSHED: Mapping[str, Any] = {path: operator.attrgetter(path)(Config()) for path in paths(Config, UPDATES)}

_BOOLS = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}  # as on the command line


def replaced(config: Config, values: Mapping[str, Any]) -> Config:
    """A copy of a config with some fields set, by path, not yet validated; ConfigError for a wrong path or type."""
    config = copy.deepcopy(config)
    for path, value in values.items():
        check_field(path)
        section, _, name = path.partition(".")
        setattr(getattr(config, section) if name else config, name or section, value)
    return config


def overridden(config: Config, values: Mapping[str, Any]) -> Config:
    """Like `replaced`; other fields that the values make a run ignore get their defaults."""
    config = replaced(config, values)
    reset_unused(config, by=values)
    return config


def override(config: Config, *assignments: str) -> Config:
    """A copy of a config with fields set by texts `section.field=value`, not yet validated.

    A bool is written `true` or `false`. Other fields that these make a run ignore have their defaults. Raises
    ConfigError for a text of another form, of no field or of a wrong type.
    """
    values = {}
    for assignment in assignments:
        path, sign, text = (part.strip() for part in assignment.partition("="))
        if not sign or not is_field(path):
            check_field(path)
            raise ConfigError(f"{assignment!r}: write section.field=value, as in mesh.pipe=4.")
        section, _, name = path.partition(".")
        values[path] = _read(path, getattr(getattr(config, section), name), text)
    return overridden(config, values)


def is_field(path: str) -> bool:
    """Whether a section of a config has a field of this path."""
    try:
        check_field(path)
    except ConfigError:
        return False
    return "." in path


def _read(path: str, present: Any, text: str) -> Any:
    """The value that `text` gives, in the type of `present`, the field's present value."""
    if isinstance(present, bool):
        if text.lower() not in _BOOLS:
            raise ConfigError(f"{path}={text}: write true or false.")
        return _BOOLS[text.lower()]
    try:
        return type(present)(text)
    except ValueError:
        raise ConfigError(f"{path}={text} must be of type {type_name(type(present))}.") from None
