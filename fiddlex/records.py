"""Typed dataclasses read from plain mappings, such as JSON and TOML give.

Every field is checked against its declared type: a dataclass, `float` (which takes integers too), any other plain type,
`tuple[X, ...]`, `Mapping[str, X]`, or one of these `| None`. Fields with a default may be left out. A message names the
field in full, what stands there and what may. Imports no jax.
"""

import dataclasses
import datetime
import types
import typing
from collections.abc import Mapping
from typing import Any

from fiddlex import rules
from fiddlex.errors import ConfigError

_REMEDIES = {datetime.date: ", written as 2026-11-22 without quotes"}


def from_mapping(cls: type, values: Any, prefix: str, **known: Any) -> Any:
    """Builds a `cls` out of `values`, and whatever it holds out of what they hold.

    Args:
      cls: a dataclass whose annotations are types, not strings.
      values: a mapping of field names to values.
      prefix: what field names are given after in messages: `config.` or `gpus.toml: chip.`.
      **known: fields that are not read from `values`, and may not stand there.

    Raises:
      ConfigError: on an unknown field (with the nearest name), a missing one, or a value of the wrong type.
    """
    where = prefix.rstrip(".: ")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object with fields, not {values!r}.")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in known}
    kwargs = dict(known)
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(f"{where} has no field {name!r}. {rules.nearest(name, fields)}")
        kwargs[name] = _typed(fields[name].type, value, f"{prefix}{name}")
    missing = [name for name, field in fields.items() if name not in kwargs and _is_required(field)]
    if missing:
        needed = [name for name, field in fields.items() if _is_required(field)]
        raise ConfigError(f"{where} lacks {', '.join(missing)}. It needs {', '.join(needed)}.")
    return cls(**kwargs)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _typed(kind: Any, value: Any, name: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # X | None; the formats read here have no way to write None
        return _typed(arguments[0], value, name)
    if dataclasses.is_dataclass(kind):
        return from_mapping(typing.cast(type, kind), value, f"{name}.")
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} must be a list, not {value!r}.")
        return tuple(_typed(arguments[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be an object with fields, not {value!r}.")
        return {key: _typed(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is an integer too large for a float, which holds at most 1.8e308.") from None
    if type(value) is not kind:
        raise ConfigError(
            f"{name}={value!r} is a {type(value).__name__}; it must be of type {kind.__name__}"
            f"{_REMEDIES.get(kind, '')}."
        )
    return value
