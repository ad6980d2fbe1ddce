"""Evaluates a function, and its derivative, as it is traced without mesh axes.

Code that knows no mesh mixes arrays that are the same on all devices, such as the zeros that a scan starts from, with
arrays that vary over mesh axes. Inside `shard_map` the types of both must agree: jax refuses such a scan, and since
0.11 the derivative of the error function too. So the function is traced with the types that it has on one device, and
each operation of the trace runs on arrays that are marked as varying over all axes over which any argument varies. It
must hold no collectives.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend import core

Tree = Any


def alone(function: Callable[[Tree, jax.Array, Tree], Tree]) -> Callable[[Tree, jax.Array, Tree], Tree]:
    """`function(weights, x, again)`, which must not close over traced values; `again` is not differentiated."""
    value, derivative, pulled = inlined(function), inlined(functools.partial(_with_vjp, function)), inlined(_pull)

    @jax.custom_vjp
    def evaluated(weights: Tree, x: jax.Array, again: Tree) -> Tree:
        return value(weights, x, again)

    def backward(vjp: Tree, dy: Tree) -> tuple[Tree, Tree, None]:
        dweights, dx = pulled(vjp, dy)
        return dweights, dx, None

    evaluated.defvjp(derivative, backward)

    def called(weights: Tree, x: jax.Array, again: Tree) -> Tree:
        # A gradient is a sum over the axes that are added here.
        axes = frozenset[str]().union(*map(axes_of, jax.tree.leaves((weights, x, again))))
        weights, x = jax.tree.map(lambda leaf: as_varying_over(leaf, axes), (weights, x))
        return evaluated(weights, x, again)

    return called


def _with_vjp(function: Callable[..., Tree], weights: Tree, x: jax.Array, again: Tree) -> tuple[Tree, Tree]:
    return jax.vjp(lambda weights, x: function(weights, x, again), weights, x)


def _pull(vjp: Callable[[Tree], tuple[Tree, Tree]], dy: Tree) -> tuple[Tree, Tree]:
    return vjp(dy)


def inlined(function: Callable[..., Tree]) -> Callable[..., Tree]:
    """The function as its trace says, without inner `jit`s; one trace serves arguments of the same types on a mesh."""
    traces: dict[Any, tuple[core.ClosedJaxpr, Any]] = {}

    def evaluated(*args: Tree) -> Tree:
        leaves, structure = jax.tree.flatten(args)
        types = [
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type)
            for leaf in map(jax.typeof, leaves)
        ]
        key = jax.sharding.get_abstract_mesh(), structure, *types
        if key not in traces:
            closed, made = jax.make_jaxpr(function, return_shape=True)(*jax.tree.unflatten(structure, types))
            traces[key] = closed, jax.tree.structure(made)
        closed, results = traces[key]
        axes = frozenset[str]().union(*map(axes_of, leaves))
        return jax.tree.unflatten(results, _run(closed, leaves, axes))

    return evaluated


def axes_of(x: jax.Array) -> frozenset[str]:
    """The mesh axes over which an array varies."""
    axes: frozenset[str] = jax.typeof(x).manual_axis_type.varying
    return axes


def _bound(equation: core.JaxprEqn, inputs: list[Any], axes: frozenset[str]) -> list[Any]:
    del axes
    result = equation.primitive.bind(*inputs, **equation.primitive.get_bind_params(equation.params))
    return result if equation.primitive.multiple_results else [result]


def _call(equation: core.JaxprEqn, inputs: list[Any], axes: frozenset[str]) -> list[Any]:
    """A call of an inner function; rules for its derivative, and what it computes again, are in the trace already."""
    inner: Any = equation.params.get("call_jaxpr", equation.params.get("jaxpr"))
    closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
    return _run(closed, inputs, axes)


def _scan(equation: core.JaxprEqn, inputs: list[Any], axes: frozenset[str]) -> list[Any]:
    params, inner = equation.params, equation.params["jaxpr"].jaxpr
    # The names of the numbers of constants and carries differ between jax's versions. What is scanned has a dimension
    # more outside than inside.
    num_carry = sum(_rank(outer) == _rank(each) for outer, each in zip(equation.outvars, inner.outvars, strict=True))
    num_scanned = sum(_rank(outer) != _rank(each) for outer, each in zip(equation.invars, inner.invars, strict=True))
    last = len(inputs) - num_scanned
    first = last - num_carry

    def body(carry: list[Any], xs: list[Any]) -> tuple[list[Any], list[Any]]:
        results = _run(params["jaxpr"], [*inputs[:first], *carry, *xs], axes)
        return results[: last - first], results[last - first :]

    settings = {name: params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = lax.scan(body, inputs[first:last], inputs[last:], **settings)
    return [*carry, *ys]


def _rank(variable: Any) -> int:
    rank: int = variable.aval.ndim
    return rank


def _while(equation: core.JaxprEqn, inputs: list[Any], axes: frozenset[str]) -> list[Any]:
    params = equation.params
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    goes_on = lambda carry: _run(params["cond_jaxpr"], [*inputs[:first], *carry], axes)[0]  # noqa: E731
    body = lambda carry: _run(params["body_jaxpr"], [*inputs[first:last], *carry], axes)  # noqa: E731
    results: list[Any] = lax.while_loop(goes_on, body, inputs[last:])
    return results


def _cond(equation: core.JaxprEqn, inputs: list[Any], axes: frozenset[str]) -> list[Any]:
    branches = [functools.partial(_run, branch, axes=axes) for branch in equation.params["branches"]]
    results: list[Any] = lax.switch(inputs[0], branches, inputs[1:])
    return results


# Operations that hold functions: their types follow from those of the arguments, as above.
_INNER = {"scan": _scan, "while": _while, "cond": _cond}
_INNER |= dict.fromkeys(("jit", "pjit", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"), _call)


def as_varying_over(x: Any, axes: frozenset[str]) -> Any:
    """The array, marked as varying over further axes."""
    missing = tuple(sorted(axes - axes_of(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def _run(closed: core.ClosedJaxpr, arguments: Sequence[Any], axes: frozenset[str]) -> list[Any]:
    def varying(x: Any) -> Any:
        return as_varying_over(x, axes)

    def read(name: Any) -> Any:
        return name.val if isinstance(name, core.Literal) else values[name]

    jaxpr = closed.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *arguments], strict=True))
    for equation in jaxpr.eqns:
        inputs = [varying(read(name)) for name in equation.invars]
        results = _INNER.get(equation.primitive.name, _bound)(equation, inputs, axes)
        values |= dict(zip(equation.outvars, map(varying, results), strict=True))
    return [varying(read(name)) for name in jaxpr.outvars]
