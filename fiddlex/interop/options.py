"""The options of a `config.json`, read with their types.

An option that is missing has the default of its class in transformers. An option that is null, or of another type than
its class has, is an error, unless the class takes null. So an empty text, list or object, 0 and false never pass for a
missing option.
"""

import math
from collections.abc import Mapping
from typing import Any

from fiddlex.config.rules import INTEGER_LIMIT
from fiddlex.errors import ConfigError
from fiddlex.terminal.readable import shortened, shown

Json = dict[str, Any]

_SIZE = f"a whole number from 1 to {INTEGER_LIMIT - 1}"


class Options:
    """The options of one object of a `config.json`; messages put `prefix`, such as `rope_scaling.`, before a name."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any] | None = None, prefix: str = ""):
        self.values: Json = {**(defaults or {}), **values}
        self._prefix = prefix

    def __len__(self) -> int:
        return len(self.values)

    def __contains__(self, name: str) -> bool:
        """Whether the option is there, or has a default."""
        return name in self.values

    def size(self, name: str) -> int:
        """A whole number of at least 1."""
        if not _is_size(value := self._value(name)):
            raise self._error(name, _SIZE)
        return int(value)

    def optional_size(self, name: str) -> int | None:
        """A whole number of at least 1; None where the option is null, or missing without a default."""
        value = self.values.get(name)
        if value is not None and not _is_size(value):
            raise self._error(name, f"{_SIZE}, or null")
        return value

    def number(self, name: str) -> float:
        """A finite number."""
        value = self._value(name)
        try:
            found = float(value) if type(value) in (int, float) else math.nan
        except OverflowError:  # of an integer with more than 308 digits
            found = math.inf
        if not math.isfinite(found):
            raise self._error(name, "a finite number")
        return found

    def flag(self, name: str) -> bool:
        value = self._value(name)
        if not isinstance(value, bool):
            raise self._error(name, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self._value(name)
        if not isinstance(value, str):
            raise self._error(name, "a text")
        return value

    def object(self, name: str) -> "Options":
        """The options of an object; none where it is null or missing."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, dict):
            raise self._error(name, "an object or null")
        return Options(value or {}, prefix=f"{self._prefix}{name}.")

    def named(self, name: str) -> str:
        """An option and its value, as messages show them."""
        return f"{self._prefix}{shortened(name)}={shown(self.values.get(name))}"

    def _value(self, name: str) -> Any:
        if name not in self.values:
            raise ConfigError(f"{self._prefix}{name} is missing, which the model needs. Add it to config.json.")
        return self.values[name]

    def _error(self, name: str, rule: str) -> ConfigError:
        return ConfigError(f"{self.named(name)} must be {rule}. Correct it in config.json.")


def _is_size(value: Any) -> bool:
    return type(value) is int and 1 <= value < INTEGER_LIMIT  # bool is no number here
