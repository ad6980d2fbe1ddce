"""Of which weights each rank has a part: of a layer by rules for logical axes, or as a search finds it.

Of embedding and head by the vocabulary: a dimension of its size, as modules that are made for a larger one show.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.flax.alone import Trace
from fiddlex.flax.model import Functions, Keys, plain_functions
from fiddlex.flax.operations import Cut, Place
from fiddlex.flax.partition import choose
from fiddlex.flax.parts import Part, Path, flat
from fiddlex.flax.traced import call_types, weight_types
from fiddlex.models.weights import Weights
from fiddlex.pipeline import layer_losses

Tree = Any
Rules = Mapping[str, str | None]  # from a logical axis to "tensor", or to None
logger = logging.getLogger(__name__)


def places_of(config: Config, parts: dict[str, Part], rules: Rules | None) -> list[Place]:
    """What a tensor rank has of each weight of a layer: by the rules for its logical axes, or as a search finds it.

    Raises:
      ConfigError: when there are rules, and none for an axis, or a dimension does not have equal parts for all ranks.
    """
    block, shapes = plain_functions(parts)["block"], call_types(config, num_sequences=1)
    weights, keys = (
        weight_types(parts["layers"].init, config.model.dtype),
        shapes.keys if config.model.dropout else None,
    )
    if rules is not None:
        return [
            _by_rules(path, leaf.shape, parts["layers"].axes.get(path, ()), rules, config.mesh.tensor)
            for path, leaf in flat(weights)
        ]

    def step(weights: Weights, x: jax.Array, keys: Keys, dy: jax.Array) -> Tree:
        result, vjp = jax.vjp(lambda weights, x: block(weights, x, keys), weights, x)
        y, losses = layer_losses.split(result)
        return y, losses, *vjp((dy, *map(jnp.ones_like, losses)) if losses else dy)

    number = len(jax.tree.leaves(weights))
    if config.mesh.tensor == 1:
        return [None] * number
    jaxpr = Trace.of(step, weights, shapes.activations, keys, shapes.activations).jaxpr
    # An element of the residual stream costs as much to exchange as to multiply with the weights of a square product.
    return choose(jaxpr, number, config.mesh.tensor, exchange=2.0 * config.model.hidden_size)


def _by_rules(path: Path, shape: Sequence[int], axes: Sequence[Any], rules: Rules, ranks: int) -> Place:
    name = f"the parameter {'.'.join(path)} of block"
    if len(axes) > len(shape):
        raise ConfigError(
            f"{name} is {list(shape)}, and has names for {len(axes)} dimensions: {', '.join(map(str, axes))}."
        )
    if unknown := [axis for axis in axes if axis is not None and axis not in rules]:
        raise ConfigError(
            f"{name} has the logical axis {unknown[0]!r}, which no rule of its family maps: there are rules for "
            f"{', '.join(map(repr, rules)) or 'none'}. Give family(…, rules=…) {{{unknown[0]!r}: 'tensor'}} for a "
            f"dimension that tensor ranks share, or {{{unknown[0]!r}: None}}."
        )
    shared = [i for i, axis in enumerate(axes) if axis is not None and rules[axis] == "tensor"]
    if not shared:
        return None
    if shape[shared[0]] % ranks:
        raise ConfigError(
            f"{name} is {list(shape)}, and mesh.tensor={ranks} does not divide the size of its logical axis "
            f"{axes[shared[0]]!r}. Use another mesh.tensor, or map the axis to None (family(…, rules=…))."
        )
    return Cut(shared[0])


def vocabulary_of(parts: dict[str, Part], larger: dict[str, Part], sizes: tuple[int, int]) -> dict[str, list[Place]]:
    """What a rank has of each weight of `embedding` and `head`: a part of a dimension of the size of the vocabulary.

    Args:
      parts: the modules.
      larger: those that are made for a larger vocabulary.
      sizes: of the two vocabularies.

    All are whole where sizes grow with the vocabulary in another way.
    """
    found = {part: _grown(parts[part], larger[part], sizes) for part in ("embedding", "head")}
    if any(places is None for places in found.values()):
        return {part: [None] * len(list(flat(_types(parts[part])))) for part in found}
    return {part: places or [] for part, places in found.items()}


def _grown(part: Part, larger: Part, sizes: tuple[int, int]) -> list[Place] | None:
    before, after = (dict(flat(_types(each))) for each in (part, larger))
    if before.keys() != after.keys():
        return None
    places: list[Place] = []
    for path, leaf in before.items():
        if leaf.ndim != after[path].ndim:
            return None
        pairs = enumerate(zip(leaf.shape, after[path].shape, strict=True))
        grown = {i: pair for i, pair in pairs if pair[0] != pair[1]}
        if len(grown) > 1 or set(grown.values()) - {sizes}:
            return None
        places.append(next(map(Cut, grown), None))
    return places


def _types(part: Part) -> Any:
    return jax.eval_shape(part.init, jax.random.key(0))


def warn_of_whole(config: Config, functions: Functions, rules: Rules | None) -> None:
    """Says which kernels of a layer every tensor rank has whole, and of a vocabulary that ranks do not share."""
    if config.mesh.vocab_shards > 1 and not functions.shares_vocabulary:
        size, padded = config.model.vocab_size, config.padded_vocab_size
        logger.warning(
            "model.family=%s with mesh.pipe=%d and mesh.tensor=%d: each device has all of embedding and head, and "
            "computes all logits, since %s (docs/flax.md).",
            config.model.family,
            config.mesh.pipe,
            config.mesh.tensor,
            f"model.vocab_size={size} has no equal parts for them; model.vocab_size={padded} has, and its further "
            "tokens never occur"
            if padded != size
            else "no weight of theirs has a dimension that is config.vocab_size, or sizes depend on it in another way",
        )
    part = functions.parts["layers"]
    leaves = list(flat(jax.eval_shape(part.init, jax.random.key(0))))
    whole = {
        ".".join(path): leaf.size
        for (path, leaf), place in zip(leaves, functions.places, strict=True)
        if place is None and leaf.ndim > 1
    }
    if config.mesh.tensor > 1 and whole:
        share = sum(whole.values()) / sum(leaf.size for _, leaf in leaves)
        logger.warning(
            "model.family=%s with mesh.tensor=%d: each tensor rank has all of %s, %.0f%% of a layer's weights%s. %s "
            "(docs/flax.md).",
            config.model.family,
            config.mesh.tensor,
            ", ".join(whole),
            100 * share,
            "" if config.mesh.sequence_parallel else ", and computes what the other ranks compute with them",
            "Logical axes and rules can say how to cut them"
            if rules is None
            else "Its rules cut what has a logical axis that they map to 'tensor'; without rules a search decides",
        )
