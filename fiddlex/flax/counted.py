"""What a trace of modules takes on one tensor rank: products, elementwise work, and what a layer saves.

Of elementwise work it counts what a compiler that fuses it reads and writes: arrays that products, saved activations or
results are made of, or make.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fiddlex.flax.alone import Trace, derivative
from fiddlex.flax.model import Functions, Keys
from fiddlex.flax.operations import Cut, Place, cut, stored_whole
from fiddlex.flax.partition import Plan, Step, of_gradient, plan
from fiddlex.models.weights import Weights
from fiddlex.pipeline import layer_losses
from fiddlex.pipeline.elementwise import COSTLY, FUSED
from fiddlex.pipeline.residuals import SplitVjp

Tree = Any


class Counted(NamedTuple):
    """Matrix products of a trace."""

    rows: int
    inputs: int
    outputs: int
    number: int
    of_weight: bool  # whether one of the factors is made of weights alone
    split: str  # what tensor ranks share: "inputs", "outputs" or "others"; "": nothing


def products(function: Callable[..., Tree], weights: Tree, *others: Tree) -> list[Counted]:
    """The matrix products of `function(weights, *others)` on whole arrays, also those in loops."""
    num_weights = len(jax.tree.leaves(weights))
    return _Forward.of(function, [None] * num_weights, 1, num_weights, weights, *others).products()


class _Forward(NamedTuple):
    """A trace of a function of weights and other arrays, and how tensor ranks share it."""

    jaxpr: core.Jaxpr
    plan: Plan
    num_weights: int
    ranks: int

    @classmethod
    def of(
        cls, function: Callable[..., Tree], places: Sequence[Place], ranks: int, num_weights: int, *arguments: Tree
    ) -> "_Forward":
        """Of arguments of which ranks have `places`, first of all the weights; of the others they have the whole."""
        jaxpr = Trace.of(function, *arguments).jaxpr
        planned = plan(jaxpr, places, [None] * len(jaxpr.outvars), ranks)
        return cls(jaxpr, planned, num_weights, ranks)

    def products(self) -> list[Counted]:
        flags = [position < self.num_weights for position in range(len(self.jaxpr.invars))]
        return list(_products(self.jaxpr, self.plan, flags, self.ranks))

    def moved(self) -> int:
        """Elements that elementwise work, fused, reads and writes: what comes from products, and what goes to them."""
        pairs = list(zip(self.jaxpr.eqns, self.plan.steps, strict=True))
        of_products = [equation for equation in self.jaxpr.eqns if equation.primitive.name == "dot_general"]
        others = [equation for equation in self.jaxpr.eqns if equation.primitive.name != "dot_general"]
        made = {name for each in others for name in each.outvars}
        read = {name for each in others for name in _names(each.invars)} - made
        written = made.intersection(_names(self.jaxpr.outvars)) | made.intersection(
            name for each in of_products for name in _names(each.invars)
        )
        places = dict[Any, Place]()
        for equation, step in pairs:
            places |= dict(zip(equation.outvars, step.rule.outputs, strict=True))
            taken = zip(equation.invars, step.moves, strict=True)
            places |= {name: place for name, (_, place) in taken if not isinstance(name, core.Literal)}
        return sum(math.prod(cut(name.aval.shape, places.get(name), self.ranks)) for name in (*read, *written))


def _products(
    jaxpr: core.Jaxpr, planned: Plan | None, of_weights: Sequence[bool], ranks: int, times: int = 1
) -> Iterator[Counted]:
    known = {name for name, is_weight in zip(jaxpr.invars, of_weights, strict=True) if is_weight}
    steps = planned.steps if planned else itertools.repeat(None)
    for equation, step in zip(jaxpr.eqns, steps, strict=False):
        named = _names(equation.invars)
        if named and known.issuperset(named):
            known.update(equation.outvars)
        flags = [not isinstance(name, core.Literal) and name in known for name in equation.invars]
        if equation.primitive.name == "dot_general":
            yield _counted(equation, step, flags, ranks, times)
        repeated = times * equation.params["length"] if equation.primitive.name == "scan" else times
        for inner in core.jaxprs_in_params(equation.params):
            body = getattr(inner, "jaxpr", inner)
            # Where an inner function has other arguments than the operation, none is known to be a weight.
            aligned = flags if len(flags) == len(body.invars) else [False] * len(body.invars)
            yield from _products(body, step.body if step else None, aligned, ranks, repeated)


def _counted(equation: core.JaxprEqn, step: Step | None, of_weights: Sequence[bool], ranks: int, times: int) -> Counted:
    ((contracted, _), (batch, _)) = equation.params["dimension_numbers"]

    def sizes(places: Sequence[Place]) -> tuple[int, ...]:
        """Rows, inputs, outputs and number of a product of parts."""
        avals: list[Any] = [name.aval for name in equation.invars]
        shapes = [cut(aval.shape, place, ranks) for aval, place in zip(avals, places, strict=True)]
        number, inputs = (math.prod(shapes[0][i] for i in axes) for axes in (batch, contracted))
        free = [math.prod(shape) // (number * inputs) for shape in shapes]
        if of_weights[0] and not of_weights[1]:
            free.reverse()
        return free[0], inputs, free[1], number

    whole = sizes([None, None])
    mine = sizes([place for _, place in step.moves]) if step else whole
    differing = [
        name for name, a, b in zip(("others", "inputs", "outputs", "others"), whole, mine, strict=True) if a != b
    ]
    rows, inputs, outputs, number = whole
    return Counted(rows, inputs, outputs, number * times, any(of_weights), "".join(differing))


class Sizes(NamedTuple):
    """What a layer takes for a microbatch on one tensor rank."""

    products: list[Counted]
    moved: int  # elements
    exchanged: tuple[float, float]  # in the forward and the backward pass, in sums of the input over the ranks
    remade: int  # bytes that a backward pass holds beside what is saved, if no product fuses with elementwise work
    saved: list[jax.core.ShapedArray]
    encoded: list[bool]
    left: int  # bytes
    left_again: int  # bytes

    @classmethod
    def of(cls, functions: Functions, ranks: int, weights: Weights, x: jax.ShapeDtypeStruct, keys: Keys) -> "Sizes":
        """Of the function `functions.layer` of weights, input and keys, given as types of whole arrays."""
        found: list[Any] = []

        def layer(weights: Weights, x: jax.Array, again: tuple[Keys, jax.Array]) -> Any:
            result = functions.layer(weights, x, again[0])
            return layer_losses.weighted(result, again[1]) if functions.adds_losses else result

        def counted(weights: Weights, x: jax.Array, keys: Keys) -> jax.Array:
            vjp, again = SplitVjp(layer), (keys, jnp.ones((len(x), 2)))
            y, saved, _ = vjp.forward(weights, x, again)
            left = [_left(each, weights, x, again) for each in (vjp, SplitVjp(layer, recompute=True))]
            found.extend([list(map(jax.typeof, saved)), vjp.encodes(weights, x, again), *left])
            return y

        # `functions.layer` exchanges arrays over `tensor`.
        mesh = AbstractMesh((ranks,), ("tensor",), axis_types=(AxisType.Auto,))
        leaves, structure = jax.tree.flatten(weights)

        def spec(leaf: jax.ShapeDtypeStruct, place: Place) -> P:
            dimension = place.dimension if isinstance(place, Cut) and not stored_whole(place) else None
            return P(*("tensor" if i == dimension else None for i in range(leaf.ndim)))

        of_x = spec(x, functions.stream)
        in_specs = jax.tree.unflatten(structure, map(spec, leaves, functions.places)), of_x, P()
        jax.eval_shape(jax.shard_map(counted, mesh=mesh, in_specs=in_specs, out_specs=of_x), weights, x, keys)
        places = [*functions.places, functions.stream]
        forward = _Forward.of(functions.plain["block"], places, ranks, len(leaves), weights, x, keys)
        made = _Derivative.of(functions.plain["block"], places, functions.stream, ranks, weights, x, keys)
        forward_sums, backward_sums = (each / (2 * x.size) for each in made.exchanged)
        remade = max(0, made.held - sum(each.size * each.dtype.itemsize for each in found[0]))
        return cls(forward.products(), forward.moved(), (forward_sums, backward_sums), remade, *found)

    @property
    def held(self) -> int:
        """Elements of the gradients of the widest activation and of what it was made of."""
        return 2 * max((each.size for each in self.saved), default=0)


class _Derivative(NamedTuple):
    """What a rank exchanges in a call of `alone(function, …)` and in its derivative, and what the derivative holds."""

    exchanged: tuple[int, int]  # elements that a rank sends, about, in the call and in its derivative
    held: int  # bytes of the arrays of the call that the derivative holds if no product fuses with elementwise work

    @classmethod
    def of(
        cls, function: Callable[..., Tree], places: Sequence[Place], result: Place, ranks: int, *arguments: Tree
    ) -> "_Derivative":
        """Of whole arguments, of which a rank has `places` of weights and input; it is to have `result` first."""
        terms = places[-1] is not None

        forward, backward = derivative(function, *arguments)
        results = [result, *[None] * (forward.results.children()[0].num_leaves - 1)]
        made = plan(forward.jaxpr, places, results, ranks)
        gradients = [*(of_gradient(place, terms=terms) for place in places[:-1]), places[-1]]
        pulled = plan(backward.jaxpr, [*made.places[len(results) :], *results], gradients, ranks)
        taken = list(zip(forward.jaxpr.outvars[len(results) :], backward.jaxpr.invars, strict=False))
        read = _operands(backward.jaxpr)
        operands = _names([name for name, after in taken if after in read])
        held = _held(forward.jaxpr, made, operands, _names([name for name, _ in taken]), ranks)
        return cls((made.exchanged, pulled.exchanged), held)


def _operands(jaxpr: core.Jaxpr) -> set[Any]:
    """The arguments that are operands of other than elementwise work, in another shape or dtype perhaps."""
    found = set[Any]()
    for equation in reversed(jaxpr.eqns):
        moves = equation.primitive.name in _SHAPED and found.intersection(equation.outvars)
        if equation.primitive.name not in FUSED or moves:
            found.update(_names(equation.invars))
    return found.intersection(jaxpr.invars)


_SHAPED = {"broadcast_in_dim", "reshape", "transpose", "squeeze", "convert_element_type"}


def _held(jaxpr: core.Jaxpr, planned: Plan, operands: Sequence[Any], others: Sequence[Any], ranks: int) -> int:
    """Bytes of the operands, and of those arrays from which elementwise work that costs little makes the others."""
    makers = {name: pair for pair in zip(jaxpr.eqns, planned.steps, strict=True) for name in pair[0].outvars}
    waiting, seen, size = [*others, *operands], set[Any](), 0
    while waiting:
        name = waiting.pop()
        if name in seen or name not in makers:
            continue
        seen.add(name)
        equation, step = makers[name]
        if equation.primitive.name in FUSED - COSTLY and name not in operands:
            waiting += _names(equation.invars)
        else:
            place, number = step.rule.outputs[equation.outvars.index(name)], _EXPANDED.get(equation.primitive.name, 1)
            size += number * math.prod(cut(name.aval.shape, place, ranks)) * name.aval.dtype.itemsize
    return size


_EXPANDED = {"erfc": 3}  # XLA makes it of two quotients and an exponential, and holds them


def _left(vjp: SplitVjp, weights: Weights, x: Any, again: Tree) -> int:
    """Bytes that the first part of a backward pass saves for the second."""

    def left(weights: Weights, x: jax.Array, again: Tree) -> list[jax.Array]:
        y, stashed, _ = vjp.forward(weights, x, again)
        return vjp.backward_input(weights, again, stashed, y).left

    return sum(each.size * each.dtype.itemsize for each in jax.eval_shape(left, weights, x, again))


def _names(variables: Sequence[Any]) -> list[Any]:
    return [each for each in variables if not isinstance(each, core.Literal)]
