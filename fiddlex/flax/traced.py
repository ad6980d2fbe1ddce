"""The description of three Flax modules, counted in traces of the functions that compute them.

Sizes are those of a trace with one sequence and of one with two: what a microbatch of B sequences takes is linear in B,
since modules treat examples alike.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from fiddlex.config import Config
from fiddlex.errors import ConfigError
from fiddlex.flax.counted import Counted, Sizes, products
from fiddlex.flax.model import Functions, Keys, plain_functions
from fiddlex.flax.operations import SUM, Cut, Place
from fiddlex.flax.partition import of_gradient
from fiddlex.flax.parts import Part
from fiddlex.models.spec import (
    InnerProduct,
    Matrix,
    Network,
    Parameter,
    Parameters,
    Product,
)
from fiddlex.models.task_sizes import task_of
from fiddlex.models.traced_layer import PerSequence, Traced, TracedArray
from fiddlex.models.weights import Weights
from fiddlex.pipeline import layer_losses

Tree = Any
_UNDECAYED = ("bias", "scale")  # names of parameters without weight decay, whatever their shape
_DRAWS = ("random_bits", "threefry2x32", "rng_bit_generator")


class Shapes(NamedTuple):
    """What the modules of a config are called with."""

    tokens: jax.ShapeDtypeStruct
    activations: jax.ShapeDtypeStruct
    keys: Keys  # of each sequence


def call_types(config: Config, num_sequences: int) -> Shapes:
    model, sizes = config.model, (num_sequences, config.model.seq_len)
    return Shapes(
        jax.ShapeDtypeStruct(sizes, jnp.int32),
        jax.ShapeDtypeStruct((*sizes, model.hidden_size), model.dtype),
        jax.eval_shape(lambda: jax.random.split(jax.random.key(0), num_sequences)),
    )


def check(config: Config, parts: dict[str, Part]) -> bool:
    """Calls three modules, for types only; returns whether the block adds a loss.

    Raises:
      ConfigError: when a module returns what the pipeline cannot take, or draws numbers that no key decides.
    """
    model, one = config.model, call_types(config, num_sequences=1)
    logits = jax.ShapeDtypeStruct((1, model.seq_len, model.vocab_size), model.dtype)
    results = {"embed": one.activations, "block": one.activations, "head": logits}
    key = jax.eval_shape(lambda: jax.random.key(0))
    silent, drawn, by_example = (_arguments(config, parts, keys) for keys in (None, key, one.keys))
    functions = plain_functions(parts)
    for name, function in functions.items():
        made = jax.eval_shape(function, *silent[name])
        if model.dropout:
            made = _dropped(name, function, by_example[name])
        _check_result(name, layer_losses.split(made)[0] if name == "block" else made, results[name], config)
        _check_draws(name, function, silent=silent[name], drawn=drawn[name], config=config)
    return _adds_loss(functions["block"], silent["block"], drawn["block"])


def _dropped(role: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """What a function, which is known to run where nothing is dropped, makes of each example by itself."""
    try:
        return jax.eval_shape(function, *arguments)
    except NotImplementedError as error:
        raise ConfigError(
            f"{role} cannot be called for one example at a time, as under model.dropout, so that no layout changes "
            f"what it draws: jax.vmap says {error}. Use model.dropout=0, or another operation."
        ) from error


def _adds_loss(block: Callable[..., Any], silent: tuple[Any, ...], drawn: tuple[Any, ...]) -> bool:
    """Whether a block returns or sows a loss; ConfigError when it does so in training only, or only outside."""
    outside, training = (isinstance(jax.eval_shape(block, *each), tuple) for each in (silent, drawn))
    if outside != training:
        raise ConfigError(
            f"block adds a loss only where it is to drop {'something' if training else 'nothing'}. Let it add the loss "
            "in every call: fiddlex counts losses of blocks in training alone, also where nothing is dropped."
        )
    return outside


def _arguments(config: Config, parts: dict[str, Part], keys: Keys) -> dict[str, tuple[Any, ...]]:
    """Types of the arguments of `plain_functions` for one sequence."""
    weights = {name: weight_types(part.init, config.model.dtype) for name, part in parts.items()}
    outer = {name: weights[name] for name in ("embedding", "head")}
    one, like = call_types(config, num_sequences=1), jax.ShapeDtypeStruct((), config.model.dtype)
    return {
        "embed": (weights["embedding"], like, (one.tokens, keys)),
        "block": (weights["layers"], one.activations, keys),
        "head": (outer, one.activations, keys),
    }


def describe(config: Config, functions: Functions) -> Network:
    """The description of three modules that `check` has passed."""
    model, parts = config.model, functions.parts
    arguments = _arguments(config, parts, call_types(config, num_sequences=1).keys if model.dropout else None)
    outside = [each for name in ("embed", "head") for each in products(functions.plain[name], *arguments[name])]
    return Network(
        task=task_of(config),
        embedding=_parameters(parts["embedding"].init, functions.vocabulary["embedding"], "vocab"),
        layer=_parameters(parts["layers"].init, functions.places, "features", terms=config.mesh.sequence_parallel),
        head=_parameters(parts["head"].init, functions.vocabulary["head"], "vocab"),
        num_layers=model.num_layers,
        hidden=model.hidden_size,
        branches=((_traced(config, functions, arguments["block"][0]),),),
        scoring=tuple(_scoring(each, config, functions) for each in outside),
        pads=False,
    )


def weight_types(init: Callable[[jax.Array], Weights], dtype: str) -> Weights:
    """The types of a module's weights as it computes with them."""
    shapes = jax.eval_shape(init, jax.random.key(0))
    return jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, dtype), shapes)


def _parameters(
    init: Callable[[jax.Array], Weights], places: Sequence[Place], axis: str, *, terms: bool = False
) -> Parameters:
    """The parameters of a module.

    Ranks have parts of them along the logical axis `axis`. With `terms`, gradients of whole weights are terms.
    """
    shapes = jax.eval_shape(init, jax.random.key(0))
    number = itertools.count()

    def parameter(path: Any, shape: jax.ShapeDtypeStruct) -> Parameter:
        decays = len(shape.shape) > 1 and path[-1].key not in _UNDECAYED
        matrix = Matrix((0,), (1,)) if path[-1].key == "kernel" and len(shape.shape) == 2 else None
        place = places[next(number)]
        axes = tuple(axis if Cut(i) == place else None for i in range(len(shape.shape)))
        partial = ("tensor",) if of_gradient(place, terms=terms) == SUM else ()
        return Parameter(shape.shape, axes, decays=decays, matrix=matrix, partial=partial)

    return jax.tree_util.tree_map_with_path(parameter, shapes)


def _check_result(role: str, made: Any, expected: jax.ShapeDtypeStruct, config: Config) -> None:
    shape, dtype = getattr(made, "shape", None), getattr(made, "dtype", jnp.dtype(bool))
    if shape == expected.shape and (
        dtype == expected.dtype or (role == "head" and jnp.issubdtype(dtype, jnp.floating))
    ):
        return
    found = f"{dtype}{list(shape)}" if shape is not None else type(made).__name__
    what = {"head": "logits of model.vocab_size tokens at each position"}.get(role, "activations of model.hidden_size")
    hint = ""
    if shape == expected.shape and jnp.issubdtype(dtype, jnp.floating):
        hint = (
            " Give its modules dtype=config.dtype, above all nnx.Embed, which without it computes in the dtype of "
            "the table that it made."
        )
    elif isinstance(made, tuple):
        hint = " Wrap it in a module that returns the first of these alone."
    raise ConfigError(
        f"{role} returns {found} for one sequence of {config.model.seq_len} tokens; it must return "
        f"{expected.dtype}{list(expected.shape)}, {what}.{hint}"
    )


def _check_draws(role: str, function: Any, *, silent: Any, drawn: Any, config: Config) -> None:
    """Checks that a module draws random numbers by the keys that it is given, and only where a config drops."""
    if _draws(jax.make_jaxpr(function)(*silent).jaxpr):
        raise ConfigError(
            f"{role} draws random numbers where it is to drop nothing, by a key of its own. Every microbatch and step "
            "would get the same ones: let it draw by `rngs` in training only, as nnx.Dropout and linen.Dropout do."
        )
    if not config.model.dropout and _draws(jax.make_jaxpr(function)(*drawn).jaxpr):
        raise ConfigError(
            f"{role} drops activations at a rate of its own, and model.dropout=0: nothing would be dropped. Let it "
            "take the rate from config.dropout, and set model.dropout."
        )


def _draws(jaxpr: core.Jaxpr) -> bool:
    inner = (getattr(each, "jaxpr", each) for eqn in jaxpr.eqns for each in core.jaxprs_in_params(eqn.params))
    return any(eqn.primitive.name in _DRAWS for eqn in jaxpr.eqns) or any(map(_draws, inner))


def _as_product(counted: Counted, rows: int) -> Product | InnerProduct:
    """A product of one sequence: one with weights if it takes every position once, as a `Product` does."""
    of_weight = counted.of_weight and (counted.rows, counted.number) == (rows, 1)
    if of_weight and counted.split != "others":
        return Product(counted.inputs, counted.outputs, split=counted.split)
    return InnerProduct(*counted[:4], is_shared=bool(counted.split))


def _scoring(counted: Counted, config: Config, functions: Functions) -> Product | InnerProduct:
    found = _as_product(counted, config.model.seq_len)
    if not isinstance(found, Product):
        return found
    shared = functions.shares_vocabulary and found.outputs == config.model.vocab_size
    return dataclasses.replace(found, positions="scored", split="vocab" * shared)


def _traced(config: Config, functions: Functions, weights: Weights) -> Traced:
    def sizes(number: int) -> Sizes:
        shapes = call_types(config, number)
        keys = shapes.keys if config.model.dropout else None
        return Sizes.of(functions, config.mesh.tensor, weights, shapes.activations, keys)

    one, two = sizes(1), sizes(2)

    def size(of_one: int, of_two: int) -> PerSequence:
        return PerSequence(2 * of_one - of_two, of_two - of_one)

    counted = [_as_product(each, config.model.seq_len) for each in one.products]
    # Of one sequence a layer may save other arrays than of two: then those of two, which grow with the number.
    alike = [each.ndim for each in one.saved] == [each.ndim for each in two.saved]
    sequences = [each.size for each in one.saved] if alike else [each.size // 2 for each in two.saved]
    saves = tuple(
        TracedArray(size(of_one, each.size), (*each.shape, 1)[-2 if each.ndim else 0], each.dtype.itemsize, encodes)
        for of_one, each, encodes in zip(sequences, two.saved, two.encoded, strict=True)
    )
    return Traced(
        with_weights=tuple(each for each in counted if isinstance(each, Product)),
        without_weights=tuple(each for each in counted if isinstance(each, InnerProduct)),
        moves=size(one.moved, two.moved),
        holds=size(one.held, two.held),
        saves=saves,
        remakes=size(one.remade, two.remade),
        leaves=size(one.left, two.left),
        leaves_again=size(one.left_again, two.left_again),
        exchanges=one.exchanged,
    )
