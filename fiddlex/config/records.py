"""Dataclasses whose fields have their declared types, read from plain mappings or checked at every assignment.

`from_mapping` reads what JSON and TOML parsers return. It checks every field against its declared type: a dataclass,
`float` (which also takes integers), any other plain type, `tuple[X, ...]`, `Mapping[str, X]`, or one of these `| None`.
Fields with a default may be left out. `Checked` is the base of dataclasses that Python code fills, such as configs: it
checks every assignment against the same types. A message gives the field's full name, its value and the required type.
"""

import dataclasses
import datetime
import functools
import os
import reprlib
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar

from fiddlex.config import rules
from fiddlex.config.values.every import AUTO, Every
from fiddlex.errors import ConfigError

_REMEDIES = {datetime.date: ", written as 2026-11-22 without quotes"}
_INTEGER_BITS = 63  # the limit of JSON readers and numpy; Python itself cannot print integers of more than 4300 digits
_REPR = reprlib.Repr()
_REPR.maxstring, _REPR.maxother = 200, 60  # shows a whole path, but not a whole file or section


class Checked:
    """Base of dataclasses that check a field's type whenever it is set, by the constructor or by an assignment.

    A section's class is declared as `class MeshConfig(Checked, prefix="config.mesh.")`; messages put the prefix before
    field names. `former` has the names of fields of earlier versions, and what replaced each. A field whose type is a
    dataclass takes an instance of exactly that class. An integer given for a float becomes a float. A value of the
    wrong type, a name that is no field, and deleting a field raise ConfigError. Copying and pickling work as for any
    dataclass.
    """

    _prefix: ClassVar[str]
    _former: ClassVar[Mapping[str, str]] = {}

    def __init_subclass__(
        cls, *, prefix: str | None = None, former: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init_subclass__(**kwargs)
        if prefix is not None:
            cls._prefix = prefix
        if former is not None:
            cls._former = former

    if not typing.TYPE_CHECKING:  # with this in view, mypy would allow names that are no fields

        def __setattr__(self, name: str, value: Any) -> None:
            kinds = _kinds(type(self))
            if name not in kinds:
                raise ConfigError(no_field(type(self), name, kinds, prefix=self._prefix))
            object.__setattr__(self, name, _plain(kinds[name], value, f"{self._prefix}{name}"))

        def __delattr__(self, name: str) -> None:
            raise ConfigError(f"{self._prefix}{name} cannot be deleted; every field has a value. Set it instead.")


def type_name(kind: type) -> str:
    """What messages call the type of a field."""
    return f"int, or {AUTO}" if kind is Every else kind.__name__


def from_mapping(cls: type, values: Any, prefix: str, **known: Any) -> Any:
    """Builds a `cls` from `values`, and its nested dataclasses from the nested mappings.

    The annotations of `cls` must be types, not strings. `prefix` is the text before field names in messages, `config.`
    or `gpus.toml: chip.`. `known` has the values of fields that must not appear in `values`.

    Raises:
      ConfigError: on an unknown field (with the nearest name), a missing one, or a value of the wrong type.
    """
    where = prefix.rstrip(".: ")
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be an object with fields, not {_REPR.repr(values)}.")
    fields = {field.name: field for field in dataclasses.fields(cls) if field.name not in known}
    kwargs = dict(known)
    for name, value in values.items():
        if name not in fields:
            raise ConfigError(no_field(cls, name, fields, prefix=prefix))
        kwargs[name] = _typed(fields[name].type, value, f"{prefix}{name}")
    missing = [name for name, field in fields.items() if name not in kwargs and _is_required(field)]
    if missing:
        needed = [name for name, field in fields.items() if _is_required(field)]
        raise ConfigError(f"{where} lacks {', '.join(missing)}. It needs {', '.join(needed)}.")
    return cls(**kwargs)


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def _kinds(cls: type) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(cls)}


def no_field(cls: type, name: str, fields: Iterable[str], *, prefix: str, meant: str = "") -> str:
    """The message for a `name` that is none of the `fields`; `meant` is a sentence on what was meant, if known."""
    former: Mapping[str, str] = getattr(cls, "_former", {})
    hint = f"It was replaced by {former[name]}." if name in former else meant or rules.nearest(name, fields)
    return f"{prefix.rstrip('.: ')} has no field {_REPR.repr(name)}. {hint}"


def _typed(kind: Any, value: Any, name: str) -> Any:
    """Converts `value` to `kind`, which may contain other types; messages call the field `name`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:  # X | None; the formats read here have no way to write None
        return _typed(arguments[0], value, name)
    if dataclasses.is_dataclass(kind):
        return from_mapping(typing.cast(type, kind), value, f"{name}.")
    if origin is tuple:
        if not isinstance(value, list):
            raise ConfigError(f"{name} must be a list, not {_REPR.repr(value)}.")
        return tuple(_typed(arguments[0], item, f"{name}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be an object with fields, not {_REPR.repr(value)}.")
        return {key: _typed(arguments[1], item, f"{name}.{key}") for key, item in value.items()}
    return _plain(kind, value, name)


def _plain(kind: Any, value: Any, name: str) -> Any:
    """Converts `value` to `kind`, which contains no other types or whose instance `value` already is."""
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is an integer too large for a float, which holds at most 1.8e308.") from None
    if kind is Every and (type(value) is int or value == AUTO):
        return Every(value)
    if type(value) is not kind:
        given = type(value).__name__
        article = "an" if given[0] in "aeiou" else "a"
        raise ConfigError(
            f"{name}={_REPR.repr(value)} is {article} {given}; it must be of type {type_name(kind)}"
            f"{_REMEDIES.get(kind) or _conversion(kind, value)}."
        )
    if kind is int and value.bit_length() > _INTEGER_BITS:
        raise ConfigError(f"{name} is an integer of {value.bit_length()} bits; it must have at most {_INTEGER_BITS}.")
    if kind is str:
        _check_text(value, name)
    return value


def _conversion(kind: type, value: Any) -> str:
    """How to convert a value of another type, such as a numpy scalar, to `kind`; empty when it cannot be converted."""
    is_scalar = type(value).__module__ == "numpy" and kind in (int, float, bool, str)
    return f": write {kind.__name__}(…)" if is_scalar or (kind is str and isinstance(value, os.PathLike)) else ""


def _check_text(value: str, name: str) -> None:
    """Raises ConfigError for a string that no file name or text file can hold."""
    if "\0" in value:
        raise ConfigError(f"{name}={_REPR.repr(value)} contains a NUL character, which no path can have. Remove it.")
    try:
        value.encode("utf-8", "surrogateescape")  # as Python represents file names that are not UTF-8
    except UnicodeEncodeError:
        raise ConfigError(
            f"{name}={_REPR.repr(value)} contains half of a surrogate pair, which is no character. Remove it."
        ) from None
