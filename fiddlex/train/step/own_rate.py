"""The learning rate that a function of the user's gives, `optimizer.schedule=PATH.py:FUNCTION`.

The function takes the section `optimizer` of the config and the number of steps, and returns a schedule of optax. The
schedule takes the number of updates so far and returns the learning rate itself. `optimizer.learning_rate` and
`optimizer.warmup_steps` are what the function makes of them.
"""

import copy
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fiddlex.config import OptimizerConfig
from fiddlex.config.user_code.own_rules import RATE
from fiddlex.config.user_code.python_files import errors_of
from fiddlex.config.values.schedule_source import source_of
from fiddlex.errors import ConfigError

_TRIED = 1000  # updates at most whose rate is computed before a run starts


def own_rate(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """The schedule of a config whose `schedule` is a function: from an int or int32 scalar to a float32 scalar."""
    source = source_of(config.schedule)
    function = RATE.load(source.path, source.function)
    with RATE.naming(config.schedule):
        arguments = {"config": copy.deepcopy(config), "num_steps": config.decay_steps or num_steps}
        schedule = RATE.call(function, source.path, arguments)
        if not callable(schedule):
            raise ConfigError(
                f"it returned {schedule!r}; it must return a schedule of optax, a function of the number of updates so "
                "far. For a rate that stays, use optax.constant_schedule."
            )
    return lambda count: jnp.asarray(schedule(count), jnp.float32)


def check_own_rate(config: OptimizerConfig, num_steps: int) -> None:
    """Raises ConfigError unless the schedule of a config whose `schedule` is a function gives a rate for each update.

    Of a long run, 1,000 updates are tried.
    """
    schedule, length = own_rate(config, num_steps), max(num_steps, 1)
    counts = np.unique(np.linspace(0, length - 1, min(length, _TRIED)).astype(np.int32))
    with RATE.naming(config.schedule), errors_of(source_of(config.schedule).path):
        form = _form(schedule)
        if form.shape != ():
            raise ConfigError(f"the schedule gives an array of shape {form.shape}; it must give one number.")
        rates = np.asarray(jax.jit(jax.vmap(schedule))(counts))
        for count, rate in zip(counts, rates, strict=True):
            if not (np.isfinite(rate) and rate >= 0):
                raise ConfigError(
                    f"the schedule gives the learning rate {rate} after {count} updates. It must be finite and at "
                    "least 0."
                )


def _form(schedule: optax.Schedule) -> Any:
    """Shape and dtype of a rate; ConfigError if the schedule cannot be traced."""
    try:
        return jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
    except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
        raise ConfigError(
            "the schedule cannot be compiled, since it takes the number of updates as a number of Python "
            f"({type(error).__name__}). Choose between rates with jnp.where, and compute with jax.numpy."
        ) from error
