"""Update rules and learning rates that functions in a user's Python file give, as `PATH.py:FUNCTION`.

The function of `optimizer.name` takes the section `optimizer` of the config as `config`, and returns a transform of
optax (`fiddlex.train.step.own_rule`). Its attribute `moments` says how many numbers the rule keeps for each weight, so
that memory is predicted without jax, and `elementwise` whether the rule treats each element of a weight by itself. The
function of `optimizer.schedule` returns a schedule of optax (`fiddlex.train.step.own_rate`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from fiddlex.config.user_code.own_functions import Own
from fiddlex.config.values.schedule_source import source_of
from fiddlex.errors import ConfigError

RULE = Own("optimizer.name", "(*, config)", ConfigError)
RATE = Own("optimizer.schedule", "(*, config, num_steps)", ConfigError)


class RuleFunction(NamedTuple):
    """A function that makes an update rule, with what it says of the rule."""

    function: Callable[..., Any]
    moments: int  # float32 numbers that the rule keeps for each weight
    elementwise: bool  # whether the update of an element depends on that element alone


def rule_function(name: str) -> RuleFunction:
    """The function that a text names; ConfigError when it is missing, or does not say what it must."""
    source = source_of(name)
    function = RULE.load(source.path, source.function)
    moments, elementwise = getattr(function, "moments", None), getattr(function, "elementwise", None)
    if not (type(moments) is int and moments >= 0):
        problem = "does not say how many float32 numbers its rule keeps" if moments is None else f"has {moments=}"
        raise ConfigError(
            f"optimizer.name {name}: the function {problem} for each weight, an integer from 0. Write it below the "
            f"function, as in {source.function}.moments = 2 (Adam keeps two)."
        )
    if type(elementwise) is not bool:
        problem = "does not say" if elementwise is None else f"has {elementwise=}, which does not say"
        raise ConfigError(
            f"optimizer.name {name}: the function {problem} whether its rule treats each element of a weight by "
            f"itself. Write {source.function}.elementwise = True below the function if it does, as Adam; or False if "
            "it uses shapes of weights, statistics over them or their names, as LAMB: then it gets whole weights."
        )
    return RuleFunction(function, moments, elementwise)
