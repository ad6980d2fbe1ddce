"""NNX modules as pure functions of a plain dictionary of weights.

Modules are written in ordinary NNX style, with global shapes. Training wants their weights as a nested dictionary of
arrays (to shard, differentiate, optimize and save) and the same code applied to a device's local shard of them, which
is what `bind` gives: layers take their sizes from the arrays they hold, never from the config.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from fiddlex.parallel.sharding import LogicalAxes

Weights = dict[str, Any]
Module = TypeVar("Module", bound=nnx.Module)


class Functional(Generic[Module]):
    """A module's structure, apart from its weights.

    Args:
      build: makes the module from its random streams.
    """

    def __init__(self, build: Callable[[nnx.Rngs], Module]):
        self._build = build
        self._graphdef, self._state = nnx.split(nnx.eval_shape(lambda: build(nnx.Rngs(0))))

    def init(self, key: jax.Array) -> Weights:
        """Fresh weights, float32."""
        return nnx.to_pure_dict(nnx.state(self._build(nnx.Rngs(key))))

    def axes(self) -> Weights:
        """The logical axes of every weight, in the structure of the weights."""
        return nnx.to_pure_dict(nnx.map_state(lambda path, variable: variable.axes, self._state))

    def bind(self, weights: Weights) -> Module:
        """The module holding `weights`, which may be a device's local shards."""
        state = nnx.map_state(lambda path, variable: variable.copy(), self._state)
        nnx.replace_by_pure_dict(state, weights)
        return nnx.merge(self._graphdef, state)


def param(value: jax.Array, axes: LogicalAxes) -> nnx.Param:
    """A float32 weight with the logical axis of each of its dimensions (`fiddlex.parallel.sharding.MESH_AXES`)."""
    return nnx.Param(value.astype(jnp.float32), axes=axes)
