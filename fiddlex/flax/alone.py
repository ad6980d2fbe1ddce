"""Evaluates a function, and its derivative, as it is traced without mesh axes, on the devices of a mesh.

Code that knows no mesh mixes arrays that are the same on all devices, such as the zeros that a scan starts from, with
arrays that vary over mesh axes. Inside `shard_map` the types of both must agree: jax refuses such a scan, and since
0.11 the derivative of the error function too. So the function is traced with the types that it has on one device, and
each operation of the trace runs on arrays that are marked as varying over all axes over which any argument varies. It
must hold no collectives.

The ranks of some mesh axes, `tensor` or for a vocabulary `pipe` and `tensor`, may each have a part of a weight: then
the operations run as `fiddlex.flax.partition` plans them. An array varies over these axes exactly where a rank has not
the whole of it, so jax's check of varying axes checks the plan. With sequence parallelism a rank has a part of the
input of a layer too. Then all arrays vary, and gradients of whole weights are terms that ranks add up once per batch.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from fiddlex.flax.moves import moved_to
from fiddlex.flax.operations import SUM, Cut, Place, Rule, stored_whole
from fiddlex.flax.partition import Plan, Step, of_gradient, plan, scan_sizes
from fiddlex.flax.saved import passes
from fiddlex.parallel.collectives import as_varying_over, axes_of

Tree = Any


class _Axes(NamedTuple):
    """Mesh axes: those over which whole arrays vary, and those whose ranks have parts of the others."""

    whole: frozenset[str]
    parts: tuple[str, ...]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weights", "again", "arrays"], meta_fields=["second"])
@dataclasses.dataclass(frozen=True)
class _Saved:
    """What a forward pass saves, and the backward pass that takes it."""

    second: "_Inlined"
    weights: Tree
    again: Tree
    arrays: list[Any]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["place"])
@dataclasses.dataclass(frozen=True)
class _Part:
    """A rank's part of an array."""

    array: jax.Array
    place: Cut


def alone(
    function: Callable[[Tree, jax.Array, Tree], Tree],
    places: Sequence[Place] = (),
    *,
    axes: tuple[str, ...] = ("tensor",),
    given: Place = None,
    result: Place = None,
) -> Callable[[Tree, jax.Array, Tree], Tree]:
    """`function(weights, x, again)` of arrays on the devices of a mesh.

    Args:
      function: must not close over traced values; `again` is not differentiated.
      places: what a rank has of each weight; none: the whole. Of `again` it has the whole.
      axes: those of the mesh whose ranks have parts.
      given: what a rank has of `x`. If that is a part, a gradient of a whole weight is a term.
      result: what a rank is to have of the first result; of others it is to have the whole.
    """
    return _Alone(function, places, axes, given, result)


class _Alone:
    """What `alone` makes of its arguments."""

    def __init__(self, function: Any, places: Sequence[Place], axes: tuple[str, ...], given: Place, result: Place):
        self._function, self._places, self._axes = function, places, axes
        self._given, self._result, self._terms = given, result, given is not None
        self._value = _Inlined(function, self._results, axes, terms=self._terms)
        self._halves = dict[Any, tuple[_Inlined, _Inlined]]()
        self._evaluated = jax.custom_vjp(self._evaluate)
        self._evaluated.defvjp(self._forward, self._backward)

    def __call__(self, weights: Tree, x: jax.Array, again: Tree) -> Tree:
        # A gradient is a sum over the axes that are added here.
        varying = frozenset[str]().union(*map(axes_of, jax.tree.leaves((weights, x, again))))
        varying -= set(self._axes) if self._places else set()
        weights, x = jax.tree.map(lambda leaf: as_varying_over(leaf, varying), (weights, x))
        # Of these each rank computes a term of the gradient.
        leaves, structure = jax.tree.flatten(weights)
        wider = [
            varying.union(self._axes) if self._terms or stored_whole(place) else varying for place in self._of(leaves)
        ]
        return self._evaluated(jax.tree.unflatten(structure, map(as_varying_over, leaves, wider)), x, again)

    def _evaluate(self, weights: Tree, x: jax.Array, again: Tree) -> Tree:
        return self._value(self._parts(weights), _as_part(x, self._given), again)

    def _forward(self, weights: Tree, x: jax.Array, again: Tree) -> tuple[Tree, Tree]:
        args = self._parts(weights), _as_part(x, self._given), again
        first, second = self._passes(*args)
        y, saved = first(*args)
        return y, _Saved(second, weights, again, saved)

    def _backward(self, saved: _Saved, dy: Tree) -> tuple[Tree, Tree, None]:
        leaves, structure = jax.tree.flatten(dy)
        dy = jax.tree.unflatten(structure, map(_as_part, leaves, self._results(structure)))
        dweights, dx = saved.second(self._parts(saved.weights), saved.again, saved.arrays, dy)
        return dweights, dx, None

    def _passes(self, *args: Tree) -> "tuple[_Inlined, _Inlined]":
        """The forward pass and the backward pass of arguments of such types."""
        key, types, known, ranks = _described(args, self._axes)
        if key not in self._halves:
            trace, pulled = derivative(self._function, *types)
            planned = plan(trace.jaxpr, known, self._results(trace.results.children()[0]), ranks)
            structures = trace.results.children()[0], pulled.results
            sizes = [len(jax.tree.leaves(each)) for each in types]
            first, second = passes(trace.closed, pulled.closed, structures, planned, sizes, ranks)
            self._halves[key] = (
                _Inlined(first, lambda made: self._results(made.children()[0]), self._axes, terms=self._terms),
                _Inlined(second, lambda made: self._gradients(), self._axes, terms=self._terms),
            )
        return self._halves[key]

    def _parts(self, weights: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(weights)
        used = [
            moved_to(x, None, place, self._axes) if stored_whole(place) else x
            for x, place in zip(leaves, self._of(leaves), strict=True)
        ]
        return jax.tree.unflatten(structure, map(_as_part, used, self._of(leaves)))

    def _of(self, leaves: list[Any]) -> Sequence[Place]:
        return self._places or [None] * len(leaves)

    def _results(self, structure: Any) -> list[Place]:
        return [self._result, *[None] * (structure.num_leaves - 1)]

    def _gradients(self) -> list[Place]:
        """What a rank is to have of the gradients of the weights and of the input; none: all are whole."""
        if not self._places and not self._terms:
            return []
        return [*(of_gradient(place, terms=self._terms) for place in self._places), self._given]


def _as_part(array: jax.Array, place: Place) -> Any:
    return _Part(array, place) if isinstance(place, Cut) else array


def _is_part(leaf: Any) -> bool:
    return isinstance(leaf, _Part)


class Trace(NamedTuple):
    """A trace of a function without inner `jit`s, and the structure of its results."""

    closed: core.ClosedJaxpr
    results: Any

    @classmethod
    def of(cls, function: Callable[..., Tree], *args: Tree) -> "Trace":
        """A trace of `function(*args)`, of arrays or their types."""
        closed, made = jax.make_jaxpr(function, return_shape=True)(*args)
        flat = jax.make_jaxpr(lambda *leaves: _run(closed, leaves, _Axes(frozenset(), ())))(*jax.tree.leaves(args))
        return cls(flat, jax.tree.structure(made))

    @property
    def jaxpr(self) -> core.Jaxpr:
        return self.closed.jaxpr


def derivative(function: Callable[..., Tree], *types: Tree) -> tuple[Trace, Trace]:
    """Traces of `function(weights, x, again)` with its vjp, and of the vjp, a function of itself and the gradient."""

    def forward(weights: Tree, x: jax.Array, again: Tree) -> tuple[Tree, Tree]:
        return jax.vjp(lambda weights, x: function(weights, x, again), weights, x)

    trace = Trace.of(forward, *types)
    y, vjp = jax.tree.unflatten(trace.results, [name.aval for name in trace.jaxpr.outvars])
    return trace, Trace.of(lambda vjp, dy: vjp(dy), vjp, y)


class _Inlined:
    """A function as its trace says; one trace serves arguments of the same types on a mesh.

    Args:
      function: takes trees of arrays, where a rank's part of an array stands for the whole.
      wanted: what a rank is to have of the first results, from their structure; it has parts of the others, or the
        whole.
      axes: those whose ranks have parts.
      terms: whether the gradient of a whole array is a term: then whole arrays vary over `axes` too.
    """

    def __init__(
        self,
        function: Callable[..., Tree],
        wanted: Callable[[Any], Sequence[Place]],
        axes: tuple[str, ...],
        *,
        terms: bool,
    ):
        self._function, self._wanted, self._axes, self._terms = function, wanted, axes, terms
        self._traces: dict[Any, tuple[Trace, Plan]] = {}

    def __call__(self, *args: Tree) -> Tree:
        key, types, places, ranks = _described(args, self._axes)
        arrays, in_parts = jax.tree.leaves(args), any(isinstance(place, Cut) for place in places)
        if key not in self._traces:
            trace = Trace.of(self._function, *types)
            self._traces[key] = trace, plan(trace.jaxpr, places, self._wanted(trace.results), ranks)
        trace, planned = self._traces[key]
        whole = frozenset[str]().union(*map(axes_of, arrays))
        whole = whole.union(self._axes) if self._terms else whole - (set(self._axes) if in_parts else set())
        results = _run(trace.closed, arrays, _Axes(whole, self._axes), planned)
        asked = len(self._wanted(trace.results))
        if self._terms:  # for jax's check, ranks agree on what each of them has
            results = [
                lax.pmax(x, self._axes) if i < asked and place is None else x
                for i, (x, place) in enumerate(zip(results, planned.places, strict=True))
            ]
        kept = map(_as_part, results[asked:], planned.places[asked:])
        return jax.tree.unflatten(trace.results, [*results[:asked], *kept])


def _described(args: Tree, axes: tuple[str, ...]) -> tuple[Any, Tree, list[Place], int]:
    """What distinguishes arguments that share a trace, their types as wholes, what ranks have, and how many ranks."""
    parts, structure = jax.tree.flatten(args, is_leaf=_is_part)
    places = [each.place if _is_part(each) else None for each in parts]
    arrays = [each.array if _is_part(each) else each for each in parts]
    ranks = lax.axis_size(axes) if any(map(_is_part, parts)) else 1
    types = list(map(functools.partial(_whole, ranks=ranks), arrays, places))
    key = jax.sharding.get_abstract_mesh(), structure, *places, *types
    return key, jax.tree.unflatten(structure, types), places, ranks


def _whole(array: jax.Array, place: Place, *, ranks: int) -> jax.ShapeDtypeStruct:
    """The type of the array of which this is a rank's part."""
    leaf = jax.typeof(array)
    dimension = place.dimension if isinstance(place, Cut) else None
    shape = tuple(size * ranks if i == dimension else size for i, size in enumerate(leaf.shape))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)


def _run(closed: core.ClosedJaxpr, arguments: Sequence[Any], axes: _Axes, planned: Plan | None = None) -> list[Any]:
    """Evaluates a trace by its plan; None: on whole arrays."""

    def varying(x: Any) -> Any:
        return as_varying_over(x, axes.whole)

    def read(name: Any) -> Any:
        return name.val if isinstance(name, core.Literal) else values[name]

    def moved(name: Any, move: tuple[Place, Place]) -> Any:
        given, wanted = move
        if given == wanted:
            return varying(read(name))
        if name in gathered and wanted is None:
            return gathered[name]
        x = varying(moved_to(varying(read(name)), *move, axes.parts))
        if wanted is None:
            gathered[name] = x
        if given == SUM:
            values[name] = x
        return x

    jaxpr, gathered = closed.jaxpr, dict[Any, Any]()
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    for equation, step in zip(jaxpr.eqns, planned.steps if planned else [None] * len(jaxpr.eqns), strict=True):
        moves = step.moves if step else [_STAYS] * len(equation.invars)
        inputs = list(map(moved, equation.invars, moves))
        results = _INNER.get(equation.primitive.name, _bound)(equation, inputs, axes, step)
        values |= dict(zip(equation.outvars, map(varying, results), strict=True))
    return list(map(moved, jaxpr.outvars, planned.results if planned else [_STAYS] * len(jaxpr.outvars)))


_STAYS: tuple[Place, Place] = None, None
_Arrays = list[Any]


def _bound(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    params = equation.params | dict(step.rule.params if step else {})
    if step and any(place is not None for _, place in step.moves):
        inputs = [as_varying_over(x, axes.whole.union(axes.parts)) for x in inputs]
    if step and step.rule.indexed:
        return [_indexed(equation, inputs, axes, step.rule, params)]
    result = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(params))
    return result if equation.primitive.multiple_results else [result]


def _indexed(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, rule: Rule, params: Any) -> jax.Array:
    """A lookup in parts of a table, or an addition to them; of numbers beyond the table as jax does it."""
    place, mode = next(place for place in rule.wanted if isinstance(place, Cut)), equation.params["mode"]
    size, is_lookup = inputs[0].shape[place.dimension], equation.primitive.name == "gather"
    last, indices = size * lax.axis_size(axes.parts) - 1, inputs[1].astype(jnp.int32)
    fills = is_lookup and mode == lax.GatherScatterMode.FILL_OR_DROP
    if mode == lax.GatherScatterMode.CLIP or (is_lookup and not fills):
        indices = jnp.clip(indices, 0, last)
    inputs[1] = indices - lax.axis_index(axes.parts) * size
    result: jax.Array = equation.primitive.bind(*inputs, **params)
    if not fills:
        return result
    fill, kept = equation.params["fill_value"], equation.params["dimension_numbers"].offset_dims
    fill = jnp.nan if fill is None else fill
    beyond = jnp.expand_dims(((indices < 0) | (indices > last)).any(axis=-1), kept)
    return jnp.where(beyond & (lax.axis_index(axes.parts) == 0), jnp.asarray(fill, result.dtype), result)


def _call(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    """A call of an inner function; rules for its derivative, and what it computes again, are in the trace already."""
    del step
    inner: Any = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    return _run(closed, inputs, axes)


def _solve(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    """A linear system, solved by its own function; rules for its derivative are in the trace already."""
    del step
    lengths, functions = (equation.params[name] for name in ("const_lengths", "jaxprs"))
    first = lengths.matvec + lengths.vecmat
    constants, right = inputs[first : first + lengths.solve], inputs[sum(lengths) :]
    return _run(functions.solve, [*constants, *right], axes)


def _barrier(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    """A barrier for the whole arrays, and one for the parts: the arrays of one vary over the same axes."""
    del axes
    places = [place for _, place in step.moves] if step else [None] * len(equation.invars)
    results = list(inputs)
    for parts in (False, True):
        chosen = [i for i, place in enumerate(places) if (place is not None) == parts]
        for i, x in zip(chosen, lax.optimization_barrier([inputs[i] for i in chosen]), strict=True):
            results[i] = x
    return results


def _scan(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    params, (first, num_carry, _) = equation.params, scan_sizes(equation)
    last = first + num_carry

    def body(carry: _Arrays, xs: _Arrays) -> tuple[_Arrays, _Arrays]:
        results = _run(params["jaxpr"], [*inputs[:first], *carry, *xs], axes, step.body if step else None)
        return results[:num_carry], results[num_carry:]

    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, inputs[first:last], inputs[last:], **settings)
    return [*carry, *ys]


def _while(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    del step
    params = equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]

    def goes_on(carry: _Arrays) -> jax.Array:
        found: jax.Array = _run(params["cond_jaxpr"], [*inputs[:first], *carry], axes)[0]
        return found

    def body(carry: _Arrays) -> _Arrays:
        # Under vmap each example has a predicate, along the first dimensions, and stays as it is once that is false.
        new, lasts = _run(params["body_jaxpr"], [*inputs[first:last], *carry], axes), goes_on(carry)
        if not lasts.ndim:
            return new
        lasting = [lasts.reshape(*lasts.shape, *[1] * (x.ndim - lasts.ndim)) for x in new]
        return list(map(jnp.where, lasting, new, carry))

    results: _Arrays = lax.while_loop(lambda carry: jnp.any(goes_on(carry)), body, inputs[last:])
    return results


def _cond(equation: core.JaxprEqn, inputs: _Arrays, axes: _Axes, step: Step | None) -> _Arrays:
    del step
    branches = [functools.partial(_run, branch, axes=axes) for branch in equation.params["branches"]]
    results: _Arrays = lax.switch(inputs[0], branches, inputs[1:])
    return results


# Operations that hold functions, whose types follow from those of the arguments, as above; and barriers.
_INNER = {
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "optimization_barrier": _barrier,
    "custom_linear_solve": _solve,
}
_CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call")
_INNER |= dict.fromkeys(_CALLS, _call)
