"""Weights as nested dictionaries of arrays, made from a description (`fiddlex.models.spec`)."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from fiddlex.models.spec import Parameter, Parameters
from fiddlex.parallel.axes import LogicalAxes

Weights = dict[str, Any]


def initial_weights(parameters: Parameters, key: jax.Array, *, vocab_rows: int) -> Weights:
    """Initial float32 weights with global shapes; rows that pad the vocabulary to `vocab_rows` are zero.

    The n-th parameter that is drawn uses `fold_in(key, n)`.
    """
    numbers = itertools.count()

    def make(parameter: Parameter) -> jax.Array:
        values = jnp.full(parameter.shape, parameter.value, jnp.float32)
        if parameter.std:
            drawn = jax.random.normal(jax.random.fold_in(key, next(numbers)), parameter.shape, jnp.float32)
            values = parameter.std * drawn
        padded = zip(parameter.shape, parameter.padded(vocab_rows), strict=True)
        return jnp.pad(values, [(0, after - before) for before, after in padded])

    def made(parameters: Parameters) -> Weights:
        return {name: make(each) if isinstance(each, Parameter) else made(each) for name, each in parameters.items()}

    return made(parameters)


def logical_axes(parameters: Parameters, *, before: LogicalAxes = ()) -> Weights:
    """The logical axes of every weight, after the axes `before`, such as `layers` in stacked weights."""
    return {
        name: (*before, *each.axes) if isinstance(each, Parameter) else logical_axes(each, before=before)
        for name, each in parameters.items()
    }
