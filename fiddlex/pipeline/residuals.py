"""Separates a layer's backward pass from its forward, and finds the least that has to be saved in between.

The leaves of the pytree that `jax.vjp` returns are the residuals. The jaxpr shows which of them are arguments of the
function, mostly weights: the backward pass takes these again, and only the others are stashed.

A backward pass can also run in two parts: the gradient of the input first (I), the gradients of the weights later (W).
The first part has the equations on which the gradient of the input depends; values that the second part needs of it are
saved for W (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, section 2). The first part also computes
gradients that take no matrix product, such as those of biases and norms: only a product is worth deferring, and a
deferred sum would keep large operands in memory.

Of the pipeline only this module reads jaxprs; it does so as jax's documentation of custom interpreters describes.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from typing import Any, NamedTuple, TypeVar

import jax
from jax.extend import core

from fiddlex.config.values.stash import STATISTICS
from fiddlex.pipeline import layer_losses
from fiddlex.pipeline.codec import Codec
from fiddlex.pipeline.elementwise import FUSED

Arrays = list[Any]
Tree = Any
Result = TypeVar("Result")


class SplitVjp:
    """The vjp of `function(given, x, again)` as separate functions, which pass residuals through a stash.

    The backward pass also takes `given`, the weights, and `again`, which is not differentiated. Arguments of the same
    types are traced only once.

    Args:
      function: returns an array of the type of `x`, or that and a loss (`layer_losses`), which is not differentiated;
        must not close over traced values.
      recompute: whether to stash only `x`, and to run the function again in the backward pass.
      codec: how the stash holds activations; None: as they are.
    """

    def __init__(
        self,
        function: Callable[[Tree, jax.Array, Tree], Any],
        *,
        recompute: bool = False,
        codec: Codec | None = None,
    ):
        self._function = lambda *args: layer_losses.split(function(*args))
        self._recompute, self._codec = recompute, codec
        self._residuals = _traced_once(self._trace_residuals)
        self._parts = _traced_once(self._trace_parts)

    def forward(self, given: Tree, x: jax.Array, again: Tree) -> tuple[jax.Array, Arrays, Arrays]:
        """The function's value, what to stash, and its losses."""
        if self._recompute:
            y, losses = self._function(given, x, again)
            return y, [x], losses
        residuals = self._residuals(given, x, again)
        y, *leaves = core.jaxpr_as_fun(residuals.closed)(*jax.tree.leaves((given, x, again)))
        by_name = {name: leaf for name, leaf in zip(residuals.names, leaves, strict=False) if _is_name(name)}
        losses = leaves[len(residuals.names) :]
        return y, self._encoded(residuals, [by_name[name] for name in residuals.stashed]), losses

    def encodes(self, given: Tree, x: jax.Array, again: Tree) -> list[bool]:
        """For each array that `forward` stashes, whether it is an activation, which a codec encodes."""
        return [False] if self._recompute else self._residuals(given, x, again).encoded

    def backward(self, given: Tree, again: Tree, stashed: Arrays, dy: jax.Array) -> tuple[Tree, jax.Array]:
        """The gradients of `given` and `x`; `dy` is the gradient of the function's value."""
        return self._backward(given, again, self._decoded(given, again, stashed, dy), dy)

    def _backward(self, given: Tree, again: Tree, stashed: Arrays, dy: jax.Array) -> tuple[Tree, jax.Array]:
        if self._recompute:
            vjp = jax.vjp(self._function, given, stashed[0], again, has_aux=True)[1]
        else:
            residuals = self._residuals(given, dy, again)  # dy stands in for x, of which only the type matters
            values = dict(zip(residuals.stashed, stashed, strict=True)) | residuals.constants
            values |= dict(zip(residuals.arguments, jax.tree.leaves((given, again)), strict=True))
            _evaluate(residuals.free, values)
            vjp = jax.tree.unflatten(residuals.structure, [_read(values, name) for name in residuals.names])
        dgiven, dx, _ = vjp(dy)
        return dgiven, dx

    def backward_input(self, given: Tree, again: Tree, stashed: Arrays, dy: jax.Array) -> "InputGradient":
        """The first part of the backward pass (I): the gradient of `x`, and what the second part needs."""
        stashed = self._decoded(given, again, stashed, dy)
        parts = self._parts(given, again, stashed, dy)
        values = parts.values((given, again, stashed, dy))
        _evaluate(parts.first, values)
        *weights, dx = parts.outputs
        dgiven = [None if late else _read(values, v) for v, late in zip(weights, parts.late, strict=True)]
        return InputGradient(_read(values, dx), dgiven, [values[name] for name in parts.crossing])

    def backward_weights(self, given: Tree, again: Tree, stashed: Arrays, left: Arrays, dy: jax.Array) -> Arrays:
        """The second part of the backward pass (W): leaves of the gradient of `given`, None if the first part gave it.

        `left` is from the first part; both parts decode what they read of the stash. Only the type of `dy` matters.
        """
        stashed = self._decoded(given, again, stashed, dy)
        parts = self._parts(given, again, stashed, dy)
        values = parts.values((given, again, stashed, dy)) | dict(zip(parts.crossing, left, strict=True))
        _evaluate(parts.second, values)
        return [_read(values, v) if late else None for v, late in zip(parts.outputs[:-1], parts.late, strict=True)]

    def _encoded(self, residuals: "_Residuals", stashed: Arrays) -> Arrays:
        if self._codec is None:
            return stashed
        pairs = zip(residuals.encoded, stashed, strict=True)
        return [leaf for encodes, x in pairs for leaf in (self._codec.encode(x) if encodes else [x])]

    def _decoded(self, given: Tree, again: Tree, stashed: Arrays, dy: jax.Array) -> Arrays:
        if self._codec is None or self._recompute:
            return stashed
        leaves = iter(stashed)
        return [
            self._codec.decode([next(leaves), next(leaves)], dy.dtype) if encoded else next(leaves)
            for encoded in self._residuals(given, dy, again).encoded
        ]

    def _trace_residuals(self, given: Tree, x: jax.Array, again: Tree) -> "_Residuals":
        """Traces residuals; the backward pass recomputes those that depend only on constants (a mask's zeros, say)."""
        trace = jax.make_jaxpr(functools.partial(jax.vjp, self._function, has_aux=True), return_shape=True)
        closed, (_, vjp, _) = trace(given, x, again)
        graph = _Graph(closed)
        names = graph.outputs[1 : 1 + len(jax.tree.leaves(vjp))]
        free = graph.following(graph.constants)
        num_given = len(jax.tree.leaves(given))
        arguments = graph.arguments[:num_given] + graph.arguments[num_given + 1 :]  # x is stashed like any residual
        known = {*arguments, *graph.constants, *graph.made_by(free)}
        stashed = [name for name in dict.fromkeys(filter(_is_name, names)) if name not in known]
        outputs = zip(graph.outputs, closed.out_avals, strict=True)
        dtypes = {name: each.dtype for name, each in outputs if _is_name(name)}
        unencoded = _unencoded(graph, graph.arguments[num_given])
        return _Residuals(
            closed,
            jax.tree.structure(vjp),
            names,
            stashed,
            [name not in unencoded and dtypes[name] == x.dtype for name in stashed],
            arguments,
            graph.constants,
            [graph.equations[position] for position in sorted(free & graph.needed(names))],
        )

    def _trace_parts(self, given: Tree, again: Tree, stashed: Arrays, dy: jax.Array) -> "_Parts":
        graph = _Graph(jax.make_jaxpr(self._backward)(given, again, stashed, dy))
        given_names = graph.arguments[: len(jax.tree.leaves((given, again)))]
        return _partition(graph, {*graph.constants, *given_names})


class _Residuals(NamedTuple):
    """The trace of a function's value and residuals."""

    closed: core.ClosedJaxpr  # computes the value and the residuals from the function's arguments
    structure: Any  # of the vjp function, whose leaves are the residuals
    names: list[Any]  # the name of each residual, or the literal that it is
    stashed: list[int]  # names of the residuals that are no arguments and depend on more than constants
    encoded: list[bool]  # for each of `stashed`: whether it is an activation, which a codec encodes
    arguments: list[int]  # names of `given` and `again`
    constants: "_Values"  # of the trace, by name
    free: list["_Equation"]  # these compute residuals from constants alone


def _traced_once(trace: Callable[..., Result]) -> Callable[..., Result]:
    """Caches the results of `trace` by the types of its arguments."""
    made: dict[Any, Result] = {}

    def traced(*args: Tree) -> Result:
        leaves, structure = jax.tree.flatten(args)
        key = structure, *map(jax.typeof, leaves)
        if key not in made:
            made[key] = trace(*args)
        return made[key]

    return traced


class InputGradient(NamedTuple):
    """The result of the first part of a backward pass."""

    dx: jax.Array
    dgiven: Arrays  # leaves of the gradient of the weights; None where the second part computes it
    left: Arrays  # the values that the second part needs


_Values = dict[int, Any]


class _Equation(NamedTuple):
    primitive: core.Primitive
    params: dict[str, Any]
    inputs: list[Any]  # names, or literals
    outputs: list[int]

    def reads(self) -> Iterator[int]:
        return (name for name in self.inputs if not isinstance(name, core.Literal))


class _Graph:
    """A jaxpr with its inner `jit`s inlined, and with a number as the name of each variable."""

    def __init__(self, closed: core.ClosedJaxpr):
        self.equations: list[_Equation] = []
        self.constants: _Values = {}
        self._names = itertools.count()
        self.arguments = self._new(closed.jaxpr.invars)
        self.outputs = self._add(closed, self.arguments)

    def _add(self, closed: core.ClosedJaxpr, inputs: Sequence[Any]) -> list[Any]:
        jaxpr, constants = closed.jaxpr, self._new(closed.consts)
        self.constants |= dict(zip(constants, closed.consts, strict=True))
        names = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *inputs], strict=True))
        for equation in jaxpr.eqns:
            read = [v if isinstance(v, core.Literal) else names[v] for v in equation.invars]
            if equation.primitive.name in ("jit", "pjit"):
                written = self._add(equation.params["jaxpr"], read)
            else:
                written = self._new(equation.outvars)
                self.equations.append(_Equation(equation.primitive, equation.params, read, written))
            names |= dict(zip(equation.outvars, written, strict=True))
        return [v if isinstance(v, core.Literal) else names[v] for v in jaxpr.outvars]

    def _new(self, variables: Sequence[Any]) -> list[int]:
        return [next(self._names) for _ in variables]

    def needed(self, outputs: Sequence[Any]) -> set[int]:
        """The positions of the equations on which `outputs` depend."""
        wanted, positions = set(filter(_is_name, outputs)), set()
        for position in reversed(range(len(self.equations))):
            if wanted.intersection(self.equations[position].outputs):
                wanted.update(self.equations[position].reads())
                positions.add(position)
        return positions

    def made_by(self, positions: Iterable[int]) -> Iterator[int]:
        """The names of the results of the equations at these positions."""
        return (name for position in positions for name in self.equations[position].outputs)

    def following(self, known: Iterable[int], *, only: Set[str] | None = None) -> set[int]:
        """The positions of the equations, `only` those of such names, that depend on `known` variables and literals."""
        known, positions = set(known), set()
        for position, equation in enumerate(self.equations):
            if known.issuperset(equation.reads()) and (only is None or equation.primitive.name in only):
                known.update(equation.outputs)
                positions.add(position)
        return positions


_MOVES = ("pvary", "all_gather")  # primitives that only mark a layer's input, or bring together its parts


def _unencoded(graph: _Graph, x: int) -> set[int]:
    """The names of all values that a codec leaves as they are (`fiddlex.config.values.stash`), whatever their types."""
    others = {*graph.arguments, *graph.constants} - {x}
    # These are `x` itself, also gathered, all that does not depend on `x`, and statistics.
    kept = {x, *others, *graph.made_by(graph.following(others))}
    inputs = {x}
    for equation in graph.equations:
        if equation.primitive.name in _MOVES and inputs.issuperset(equation.reads()):
            inputs.update(equation.outputs)
        if equation.primitive.name == "name" and equation.params["name"] == STATISTICS:
            kept.update(equation.outputs)
    return kept | inputs


class _Parts(NamedTuple):
    first: list[_Equation]
    second: list[_Equation]
    crossing: list[int]
    outputs: list[Any]  # the gradients of the weights and that of the input
    late: list[bool]  # for each of the weights, whether the second part computes its gradient
    arguments: list[int]
    constants: _Values

    def values(self, args: Tree) -> _Values:
        return self.constants | dict(zip(self.arguments, jax.tree.leaves(args), strict=True))


def _partition(graph: _Graph, known: set[int]) -> _Parts:
    """Cuts a backward pass in two.

    Each part recomputes the values that it needs and that depend only on `known`, or by elementwise work on the stash.
    """
    equations = graph.equations
    *weights, dx = graph.outputs
    first, late = graph.needed([dx]), []
    for output in weights:
        own = graph.needed([output]) - first
        late.append(any(_has_product(equations[position].primitive, equations[position].params) for position in own))
        if not late[-1]:
            first |= own
    stashed = set(graph.arguments[:-1])
    free = graph.following(known)
    free |= graph.following({*known, *stashed, *graph.made_by(free)}, only=FUSED | {"pvary"})
    late_outputs = [output for output, is_late in zip(weights, late, strict=True) if is_late and _is_name(output)]
    second = graph.needed(late_outputs) - (first - free)
    made = {name for position in second for name in equations[position].outputs}
    read = {name for position in second for name in equations[position].reads()} | set(late_outputs)
    return _Parts(
        [equations[position] for position in sorted(first)],
        [equations[position] for position in sorted(second)],
        sorted(read - made - stashed - set(graph.constants)),
        graph.outputs,
        late,
        graph.arguments,
        graph.constants,
    )


def _has_product(primitive: core.Primitive, params: dict[str, Any]) -> bool:
    if primitive.name in ("dot_general", "conv_general_dilated"):
        return True
    inner = (getattr(jaxpr, "jaxpr", jaxpr) for jaxpr in core.jaxprs_in_params(params))
    return any(_has_product(equation.primitive, equation.params) for jaxpr in inner for equation in jaxpr.eqns)


def _evaluate(equations: Sequence[_Equation], values: _Values) -> None:
    """Runs equations, and adds their results to `values`."""
    for equation in equations:
        params = equation.primitive.get_bind_params(equation.params)
        result = equation.primitive.bind(*(_read(values, name) for name in equation.inputs), **params)
        results = result if equation.primitive.multiple_results else [result]
        values |= dict(zip(equation.outputs, results, strict=True))


def _read(values: _Values, name: Any) -> Any:
    return values[name] if _is_name(name) else name.val


def _is_name(name: Any) -> bool:
    return not isinstance(name, core.Literal)
