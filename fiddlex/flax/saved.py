"""What a call saves for its derivative: the least from which elementwise work makes the rest again.

A derivative takes arrays of the forward pass. Many follow from others by elementwise work alone, which compilers fuse
into whatever reads it: GELU by tanh takes five arrays, which follow from its input. So a call saves a minimum cut, by
bytes on a rank, between what no elementwise work makes and what the derivative takes (He and Yu, "Transcending
Runtime-Memory Tradeoffs in Checkpointing by being Fusion Aware", MLSys 2023).
"""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence, Set
from typing import Any

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from fiddlex.config.values.stash import STATISTICS
from fiddlex.flax.operations import SUM, cut, shape_of
from fiddlex.flax.partition import Plan, Step
from fiddlex.pipeline.elementwise import ELEMENTWISE, FUSED

_MOST = 1 << 30  # of the capacities, which are 32-bit
_EXCHANGE = 1000  # how many times its bytes a term costs, which ranks would have to add up to save it

Tree = Any
Names = Sequence[Any]


def passes(
    closed: core.ClosedJaxpr,
    pulled: core.ClosedJaxpr,
    structures: Sequence[Any],
    planned: Plan,
    sizes: Sequence[int],
    ranks: int,
) -> tuple[Callable[..., Tree], Callable[..., Tree]]:
    """A forward pass that saves the least, and its backward pass, as functions of whole arrays.

    Args:
      closed: a trace of `jax.vjp` of a function of weights, `x` and `again`, which is not differentiated.
      pulled: a trace of the derivative, a function of what it takes and of the gradient of the result.
      structures: those of the function's result and of the gradients.
      planned: how ranks share the trace.
      sizes: numbers of weights, of arrays in `x`, and of those in `again`.
      ranks: number of ranks.

    Returns:
      `first(weights, x, again) -> (y, saved)` and `second(weights, again, saved, dy) -> (dweights, dx)`.
    """
    jaxpr, constants = closed.jaxpr, dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
    number = structures[0].num_leaves
    y, taken = jaxpr.outvars[:number], jaxpr.outvars[number:]
    given = [*jaxpr.invars[: sizes[0]], *jaxpr.invars[sizes[0] + sizes[1] :]]
    saved = least_saved(jaxpr, planned, taken, given, ranks)
    forwards = _needed(jaxpr, [*y, *saved], jaxpr.invars, reports=True)
    again = _needed(jaxpr, taken, [*saved, *given], reports=False)
    exact = _enlarged(again, dict(zip(pulled.jaxpr.invars, taken, strict=False)), pulled.jaxpr.eqns, unknown=saved)

    def first(*args: Tree) -> tuple[Tree, list[Any]]:
        values = constants | dict(zip(jaxpr.invars, jax.tree.leaves(args), strict=True))
        made = _evaluated(forwards, values, [*y, *saved])
        kept = [
            checkpoint_name(x, STATISTICS) if name in exact else x for name, x in zip(saved, made[number:], strict=True)
        ]
        return jax.tree.unflatten(structures[0], made[:number]), kept

    def second(weights: Tree, others: Tree, arrays: list[Any], dy: Tree) -> Tree:
        known = [*jax.tree.leaves((weights, others)), *arrays]
        values = constants | dict(zip([*given, *saved], known, strict=True))
        made = _evaluated(again, values, taken)
        return jax.tree.unflatten(structures[1], core.jaxpr_as_fun(pulled)(*made, *jax.tree.leaves(dy)))

    return first, second


def _enlarged(
    again: Sequence[core.JaxprEqn], taken: dict[Any, Any], pulled: Sequence[core.JaxprEqn], *, unknown: Names
) -> set[Any]:
    """The arrays whose errors operations may enlarge, so that a stash must not round them.

    Args:
      again: operations that make arrays again.
      taken: for each argument of the derivative, the array that it is.
      pulled: the operations of the derivative.
      unknown: the arrays that the stash holds.
    """
    from_stash, found = set(unknown), set[Any]()
    for equation in again:
        if from_stash.intersection(_names(equation.invars)):
            from_stash.update(equation.outvars)
    for equation in (*reversed(pulled), *reversed(again)):
        names = _names(equation.invars) if found.intersection(equation.outvars) else _sensitive(equation)
        read = set(_names([taken.get(name, name) for name in names]))
        # Two arrays of the stash that are rounded apart are no longer equal, or in order.
        if equation.primitive.name not in _COMPARE or len(from_stash.intersection(read)) > 1:
            found.update(read)
    return found


def _sensitive(equation: core.JaxprEqn) -> list[Any]:
    """The arrays that an operation reads whose errors it may enlarge, or of which it must know whether they differ."""
    name, arrays = equation.primitive.name, equation.invars
    if name in ("div", "rem"):  # by the denominator
        return list(_names(arrays[1:]))
    inner = (getattr(each, "jaxpr", each) for each in core.jaxprs_in_params(equation.params))
    enlarges = name in _ENLARGE or (name == "integer_pow" and equation.params["y"] < 0)
    enlarges |= any(_sensitive(each) for jaxpr in inner for each in jaxpr.eqns)
    return list(_names(arrays)) if enlarges or name in _COMPARE else []


_ENLARGE = {
    "exp", "exp2", "expm1", "log", "log1p", "pow", "rsqrt", "sin", "cos", "tan", "sinh", "cosh", "atanh", "acosh",
    "lgamma",
}  # fmt: skip


def _evaluated(equations: Sequence[core.JaxprEqn], values: dict[Any, Any], names: Names) -> list[Any]:
    def read(name: Any) -> Any:
        return name.val if isinstance(name, core.Literal) else values[name]

    for equation in equations:
        params = equation.primitive.get_bind_params(equation.params)
        made = equation.primitive.bind(*map(read, equation.invars), **params)
        values |= zip(equation.outvars, made if equation.primitive.multiple_results else [made], strict=True)
    return list(map(read, names))


def least_saved(jaxpr: core.Jaxpr, planned: Plan, taken: Names, given: Names, ranks: int) -> list[Any]:
    """The arrays to save, so that elementwise work makes those that a derivative takes.

    Args:
      jaxpr: the trace of a forward pass.
      planned: how ranks share it.
      taken: names of the arrays that the derivative takes.
      given: names of arguments that the derivative gets in any case.
      ranks: number of ranks.
    """
    makers = {name: pair for pair in zip(jaxpr.eqns, planned.steps, strict=True) for name in pair[0].outvars}
    known = _following(jaxpr, planned, {*jaxpr.constvars, *given})
    compared = _compared(jaxpr, known)
    waiting, made_from = [name for name in _names(taken) if name not in known], dict[Any, list[Any]]()
    sinks = set(waiting)
    while waiting:
        if (name := waiting.pop()) not in made_from:
            fuses = name in makers and _fuses(*makers[name]) and name not in compared
            made_from[name] = [each for each in _names(makers[name][0].invars) if each not in known] if fuses else []
            waiting += made_from[name]
    if not made_from:
        return []

    def size(name: Any) -> float:
        place = makers[name][1].rule.outputs[makers[name][0].outvars.index(name)] if name in makers else None
        return (
            math.prod(cut(shape_of(name), place, ranks)) * name.aval.dtype.itemsize * (1 + _EXCHANGE * (place == SUM))
        )

    return _minimum_cut(made_from, sinks, {name: size(name) for name in made_from})


def _compared(jaxpr: core.Jaxpr, known: Set[Any]) -> set[Any]:
    """Results of arithmetic that comparisons of two unknown arrays read, as that of scores with their maximum.

    Made again, they may be rounded otherwise than what they are compared with, and no element equals the maximum.
    """
    found, compared = set[Any](), set[Any]()
    for equation in reversed(jaxpr.eqns):
        names, name = set(_names(equation.invars)).difference(known), equation.primitive.name
        if name in _COMPARE and len(names) > 1:
            found |= names
        elif found.intersection(equation.outvars):
            if name in _EXACT or _widens(equation):
                found |= names
            else:
                compared.update(equation.outvars)
    return compared


_COMPARE = {"eq", "ne", "ge", "gt", "le", "lt"}
# operations that round nothing
_EXACT = {"abs", "copy", "max", "min", "name", "neg", "select_n", "stop_gradient"} | FUSED - ELEMENTWISE


def _widens(equation: core.JaxprEqn) -> bool:
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = (each.aval.dtype for each in (equation.invars[0], equation.outvars[0]))  # type: ignore[attr-defined]
    return np.promote_types(before, after) == after


def _minimum_cut(made_from: dict[Any, list[Any]], sinks: Set[Any], sizes: dict[Any, float]) -> list[Any]:
    """The cheapest arrays through which all ways lead from those that are made from nothing to the sinks.

    Of several such cuts it is the one that is nearest to the sinks.
    """
    numbers = {name: 2 * i for i, name in enumerate(made_from)}  # of a node before an array; the next is that after it
    source, sink = 2 * len(numbers), 2 * len(numbers) + 1
    unit = max(1.0, sum(sizes.values())) / (_MOST / 2)
    edges = {(numbers[name], numbers[name] + 1): max(1, math.ceil(sizes[name] / unit)) for name in made_from}
    for name, inputs in made_from.items():
        ways = [numbers[each] + 1 for each in inputs] or [source]
        edges |= {(way, numbers[name]): _MOST for way in ways}
    edges |= {(numbers[name] + 1, sink): _MOST for name in sinks}
    starts, ends = np.array(list(edges), np.int32).T
    capacities = csr_array((np.array(list(edges.values()), np.int32), (starts, ends)), shape=(sink + 1, sink + 1))
    left = capacities - maximum_flow(capacities, source, sink).flow
    left.eliminate_zeros()
    reaches = set(breadth_first_order(csr_array(left.T), sink, return_predecessors=False))
    return [name for name, number in numbers.items() if number not in reaches and number + 1 in reaches]


def _following(jaxpr: core.Jaxpr, planned: Plan, known: set[Any]) -> set[Any]:
    """What elementwise work makes from known arrays alone, with these."""
    for equation, step in zip(jaxpr.eqns, planned.steps, strict=True):
        if _fuses(equation, step) and known.issuperset(_names(equation.invars)):
            known.update(equation.outvars)
    return known


def _fuses(equation: core.JaxprEqn, step: Step) -> bool:
    """Whether an operation is elementwise work, before which ranks exchange nothing."""
    stays = all(before is None or before == after for before, after in step.moves)
    return stays and equation.primitive.name in FUSED


def _needed(jaxpr: core.Jaxpr, wanted: Names, known: Names, *, reports: bool) -> list[core.JaxprEqn]:
    """The operations that make the wanted arrays from known ones, and those that report something, in order."""
    names, found = set(_names(wanted)).difference(known), list[core.JaxprEqn]()
    for equation in reversed(jaxpr.eqns):
        if names.intersection(equation.outvars) or (reports and equation.effects):
            names.update(set(_names(equation.invars)).difference(known))
            found.append(equation)
    return found[::-1]


def _names(variables: Sequence[Any]) -> Iterator[Any]:
    return itertools.filterfalse(lambda each: isinstance(each, core.Literal), variables)
