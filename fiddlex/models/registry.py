"""Finds the description of a config's network, and the model that computes it (`fiddlex.config.families`).

Imports no model until a caller asks for one, so that descriptions are available without jax.
"""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES, family
from fiddlex.config.user_code.python_files import errors_of, is_of_user
from fiddlex.errors import ConfigError
from fiddlex.models.checks import check
from fiddlex.models.spec import Network

if TYPE_CHECKING:
    from fiddlex.models.model import Model


_MOST_KEPT = 1024  # descriptions; a planner asks for that of a few meshes thousands of times
_kept: dict[tuple[object, ...], Network] = {}


def network_of(config: Config) -> Network:
    """The description of a config's network, which depends on the sections `model`, `mesh` and `data` alone.

    Raises:
      ConfigError: when the family has no description, or its description breaks a rule (`fiddlex.models.checks`).
    """
    function = _function(config.model.family, "network", family(config.model.family).network)
    sections = config.model, config.mesh, config.data
    key = (function, *(tuple(vars(section).values()) for section in sections))
    network = _kept.get(key)
    if network is None:
        network = _made(function, config)
        check(network, config)
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        _kept[key] = network
    return network


def make_model(config: Config) -> "Model":
    """The model that computes the network of a config.

    Raises:
      ConfigError: as `network_of`, or when the family has no model that computes its network.
    """
    model: Model = _made(model_function(config), config)
    return model


def model_function(config: Config) -> "Callable[[Config], Model]":
    """The function or class that makes the model of a config's family; raises as `make_model` does."""
    return _function(config.model.family, "model", family(config.model.family).model)


def errors_of_family(name: str, made: Callable[..., Any]) -> contextlib.AbstractContextManager[None]:
    """A context in which an error of a user's family names the line where its code, that of `made`, fails.

    `made` is a function or a class, or wraps one. What code of fiddlex's own families raises is passed on.
    """
    made = inspect.unwrap(made)
    members = [each for base in made.__mro__ for each in vars(base).values()] if isinstance(made, type) else []
    # Flax wraps the methods of modules of Linen.
    codes = (getattr(inspect.unwrap(each), "__code__", None) for each in (made, *members) if callable(each))
    paths = [code.co_filename for code in codes if code]
    path = next(filter(is_of_user, paths), paths[0] if paths else None)
    return errors_of(path) if path and name not in FAMILIES.built_in else contextlib.nullcontext()


def _made(function: Callable[[Config], Any], config: Config) -> Any:
    with errors_of_family(config.model.family, function):
        return function(config)


def _function(name: str, field: str, value: Any) -> Callable[[Config], Any]:
    """A function that a `Family` has in one of its fields, or names there by its import path."""
    try:
        function = pkgutil.resolve_name(value) if isinstance(value, str) else value
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.family={name}: its {field} {value!r} cannot be imported ({error}).") from error
    if not callable(function):
        raise ConfigError(f"model.family={name}: its {field} is {value!r}; it must be a function of a config.")
    found: Callable[[Config], Any] = function
    return found
