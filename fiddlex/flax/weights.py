"""The weights of a run by the names that the modules of `fiddlex.flax.models` have for them, and back.

A run's weights are a nested dictionary with `embedding`, `layers`, whose arrays have a row for each layer, and `head`
(docs/models.md). A module's state has a part for each layer, the queries, keys and values of GPT and BERT apart, and
the names of `PREFIXES`. Both ways follow from one list of places, which depends on names and shapes alone.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fiddlex.models.spec import Network, Parameter
from fiddlex.models.weights import Weights

Tree = Any
Keys = tuple[str, ...]
Shapes = Mapping[Keys, tuple[int, ...]]  # of a run's weights; those of the layers begin with the number of layers

PREFIXES = (  # a module's names, and those of a run
    ("tokens.embedding", "embedding.tokens"),
    ("positions.embedding", "embedding.positions"),
    ("token_types.embedding", "embedding.token_types"),
    ("embedding_norm", "embedding.norm"),
    ("layers", "layers"),
    ("norm", "head.norm"),
    ("output.embedding", "head.output"),
    ("masked", "head.masked"),
    ("label.score.kernel", "head.label.score"),
    ("label", "head.label"),
)
FUSED, FUSED_DIM = {"qkv": ("q", "k", "v")}, -3  # products that a run has as one array, [..., 3, heads, head size]


class Location(NamedTuple):
    """Where an array of a module is among a run's weights."""

    path: Keys  # in the module's state; the number of a layer is a text
    name: Keys  # of the weight
    layer: int | None  # its row of the weight; None outside the layers
    part: int | None  # its index along `FUSED_DIM`; None where the weight is no fused product
    shape: tuple[int, ...]

    def of(self, weight: Any) -> Any:
        """The module's array, from the weight of the name."""
        row = weight if self.layer is None else weight[self.layer]
        return row if self.part is None else row.take(self.part, axis=FUSED_DIM)

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether an array of this shape is the module's; of learned positions, a model may use the first ones."""
        if self.name == ("embedding", "positions") and len(shape) == len(self.shape) == 2:
            return shape[1] == self.shape[1] and shape[0] >= self.shape[0]
        return shape == self.shape


def module_locations(shapes: Shapes) -> list[Location]:
    """The places of all arrays of a module of GPT, Llama or BERT, whose run has weights of these shapes."""
    found = []
    for name, shape in shapes.items():
        path = _renamed(name)
        layers = range(shape[0]) if name[0] == "layers" else (None,)
        for layer in layers:
            own = path if layer is None else (path[0], str(layer), *path[1:])
            sizes = shape if layer is None else shape[1:]
            parts = FUSED.get(own[-2], ()) if len(own) > 1 else ()
            for part, part_name in enumerate(parts):
                split = (*sizes[:FUSED_DIM], *sizes[FUSED_DIM + 1 :])
                found.append(Location((*own[:-2], part_name, own[-1]), name, layer, part, split))
            if not parts:
                found.append(Location(own, name, layer, None, sizes))
    return found


def state_of(weights: Weights, layers: Sequence[int]) -> Tree:
    """The state of a module of GPT, Llama or BERT, for `nnx.update(module, state)`: a pure dictionary of its arrays.

    Args:
      weights: those of a run as nested dictionaries, without rows that pad the vocabulary.
      layers: the number of the layer in each row of `weights["layers"]`, −1 for an empty row: `layers` in the file
        `meta/metadata` of a checkpoint.
    """
    rows = np.argsort(layers)[np.count_nonzero(np.less(layers, 0)) :]
    leaves = flatten_dict(weights | {"layers": jax.tree.map(lambda weight: weight[rows], weights["layers"])})
    places = module_locations({name: jnp.shape(leaf) for name, leaf in leaves.items()})
    # Flax's lists have numbers in place of texts.
    return unflatten_dict(
        {
            tuple(int(key) if key.isdecimal() else key for key in each.path): each.of(leaves[each.name])
            for each in places
        }
    )


def weights_of(arrays: Mapping[Keys, Any], places: list[Location]) -> Weights:
    """A run's weights on the host, float32, from arrays by their paths in a state; the inverse of `Location.of`."""
    rows: dict[Keys, dict[int | None, list[np.ndarray]]] = {}
    for each in places:
        host = np.asarray(jax.device_get(arrays[each.path]), np.float32)[tuple(map(slice, each.shape))]
        rows.setdefault(each.name, {}).setdefault(each.layer, []).append(host)
    fused = {each.name for each in places if each.part is not None}

    def whole(name: Keys) -> np.ndarray:
        made = [np.stack(parts, FUSED_DIM) if name in fused else parts[0] for parts in rows[name].values()]
        return made[0] if None in rows[name] else np.stack(made)

    return unflatten_dict({name: whole(name) for name in rows})


def shapes_of(network: Network) -> dict[Keys, tuple[int, ...]]:
    """The shapes of a network's weights by name, without rows that pad the vocabulary."""

    def shape(name: Keys, parameter: Parameter) -> tuple[int, ...]:
        return (network.num_layers, *parameter.shape) if name[0] == "layers" else parameter.shape

    return {name: shape(name, each) for name, each in flatten_dict(network.parts).items()}


def _renamed(name: Keys) -> Keys:
    """The path in a module's state of a weight outside the layers, and of one of them without the layer's number."""
    text = ".".join(name)
    for ours, theirs in PREFIXES:
        if f"{text}.".startswith(f"{theirs}."):
            return tuple(f"{ours}{text[len(theirs) :]}".split("."))
    raise KeyError(name)
