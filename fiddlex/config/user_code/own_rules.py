"""Update rules that a function in a user's Python file gives, `optimizer.name=PATH.py:FUNCTION`.

The function takes the section `optimizer` of the config as `config`, and returns a transform of optax
(`fiddlex.train.step.own_rule`). Its attribute `moments` says how many numbers the rule keeps for each weight, so that
memory is predicted without jax.
"""

from collections.abc import Callable
from typing import Any

from fiddlex.config.user_code.own_functions import Own
from fiddlex.config.values.schedule_source import source_of
from fiddlex.errors import ConfigError

OWN = Own("optimizer.name", "(*, config)", ConfigError)


def rule_function(name: str) -> tuple[Callable[..., Any], int]:
    """The function that a text names, and its `moments`; ConfigError when either is missing or `moments` is below 0."""
    source = source_of(name)
    function = OWN.load(source.path, source.function)
    moments = getattr(function, "moments", None)
    if not (type(moments) is int and moments >= 0):
        problem = "does not say how many float32 numbers its rule keeps" if moments is None else f"has {moments=}"
        raise ConfigError(
            f"optimizer.name {name}: the function {problem} for each weight, an integer from 0. Write it below the "
            f"function, as in {source.function}.moments = 2 (Adam keeps two)."
        )
    return function, moments
