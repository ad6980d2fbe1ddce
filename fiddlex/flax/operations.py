"""Which operations run on parts of arrays, and what they make of them.

An operation without a rule here takes whole arrays, which is always right: a rule saves exchange and work.
"""

import collections
import itertools
import math
import operator
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core

# What a rank has of an array. None: the whole, as all ranks; an int: a part along this dimension, the r-th of equal
# parts on rank r; SUM: a term, which has the shape of the whole, of the sum over the ranks.
Place = int | str | None
SUM = "sum"

Shape = tuple[int, ...]
_SAME: Mapping[str, Any] = types.MappingProxyType({})


class Rule(NamedTuple):
    """What an operation takes and makes."""

    wanted: Sequence[Place]  # of each input
    outputs: Sequence[Place]
    params: Mapping[str, Any] = _SAME  # parameters of the operation that differ from those in the trace


def whole(equation: core.JaxprEqn) -> Rule:
    return Rule([None] * len(equation.invars), [None] * len(equation.outvars))


def shape_of(variable: Any) -> Shape:
    shape: Shape = variable.aval.shape
    return shape


def _dtype(variable: Any) -> Any:
    return variable.aval.dtype


def rule_of(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule:
    """The rule of an operation for `ranks` tensor ranks that have its inputs as `places` say."""
    if all(place is None for place in places):
        return whole(equation)
    name = equation.primitive.name
    if name in LINEAR and {SUM} == set(places) and jnp.issubdtype(_dtype(equation.outvars[0]), jnp.inexact):
        alone = _RULES[name](equation, [None], ranks) if name in _RULES else None
        return Rule(places, [SUM], alone.params if alone else _SAME)
    if name in _ELEMENTWISE:
        return _elementwise(equation, places) or whole(equation)
    if name in _RULES:
        return _RULES[name](equation, places, ranks) or whole(equation)
    return whole(equation)


_Rules = Callable[[core.JaxprEqn, Sequence[Place], int], Rule | None]  # None: it takes whole arrays


def _elementwise(equation: core.JaxprEqn, places: Sequence[Place]) -> Rule | None:
    dimensions = collections.Counter(place for place in places if isinstance(place, int))
    if not dimensions:
        return None
    ((dimension, _),) = dimensions.most_common(1)
    size = shape_of(equation.outvars[0])[dimension]
    shapes = map(shape_of, equation.invars)  # an operand may be a scalar, or have one element along a dimension
    wanted = [dimension if shape and shape[dimension] == size else None for shape in shapes]
    return Rule(wanted, [dimension] * len(equation.outvars))


def _barrier(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del equation, ranks
    wanted = [None if place == SUM else place for place in places]
    return Rule(wanted, wanted)


def _dot_general(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del ranks
    sides = [place if isinstance(place, int) else None for place in places]
    ranked = sorted((side for side in (0, 1) if sides[side] is not None), key=lambda side: -_size(equation, side))
    # The other side is brought to what the larger one has: a part of it, or the whole.
    return _product(equation, ranked[0], sides[ranked[0]]) if ranked else None


def _size(equation: core.JaxprEqn, side: int) -> int:
    return math.prod(shape_of(equation.invars[side]))


def _product(equation: core.JaxprEqn, side: int, place: Any) -> Rule:
    """A product whose factor on a side, 0 or 1, is in parts along a dimension."""
    contracted, batched = equation.params["dimension_numbers"]
    mine, other = side, 1 - side
    wanted: list[Place] = [None, None]
    wanted[mine] = place
    if place in contracted[mine]:
        wanted[other] = int(contracted[other][contracted[mine].index(place)])
        return Rule(wanted, [SUM])
    if place in batched[mine]:
        wanted[other] = int(batched[other][batched[mine].index(place)])
        return Rule(wanted, [batched[mine].index(place)])
    # The result has the batch, then the free dimensions of the left factor, then those of the right one.
    free = [
        [i for i in range(len(shape_of(factor))) if i not in (*contracted[n], *batched[n])]
        for n, factor in enumerate(equation.invars)
    ]
    return Rule(wanted, [len(batched[0]) + len(free[0]) * side + free[side].index(place)])


def _broadcast_in_dim(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place,), shape = places, equation.params["shape"]
    to = int(equation.params["broadcast_dimensions"][place]) if isinstance(place, int) else None  # from numpy's
    return Rule(places, [to], {"shape": cut(shape, to, ranks)})


def _reshape(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place,), shape = places, equation.params["new_sizes"]
    if not isinstance(place, int):
        return Rule(places, [None])
    before = math.prod(shape_of(equation.invars[0])[:place])
    # Parts of the array are parts of any dimension that begins where theirs does.
    starts = itertools.accumulate(shape, operator.mul, initial=1)
    fitting = [i for i, (start, size) in enumerate(zip(starts, shape, strict=False)) if start == before]
    fitting = [i for i in fitting if shape[i] > 1 and shape[i] % ranks == 0]
    return Rule(places, [fitting[0]], {"new_sizes": cut(shape, fitting[0], ranks)}) if fitting else None


def cut(shape: Sequence[int], place: Place, ranks: int) -> Shape:
    """The shape of what a rank has of an array."""
    return tuple(size // ranks if i == place else size for i, size in enumerate(shape))


def _transpose(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del ranks
    (place,) = places
    return Rule(places, [place if place is None else equation.params["permutation"].index(place)])


def _removed(parameter: str) -> _Rules:
    """Of an operation that removes the dimensions in a parameter."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        del ranks
        (place,), gone = places, equation.params[parameter]
        if place in gone:
            return Rule(places, [SUM]) if equation.primitive.name == "reduce_sum" else None
        if not isinstance(place, int):
            return Rule(places, [None])
        return Rule(places, [place - sum(int(each) < place for each in gone)])

    return rule


def _along(parameter: str) -> _Rules:
    """Of an operation that works along the dimensions in a parameter, and alike at all places of the others."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        del ranks
        along, dimensions = equation.params[parameter], [place for place in places if isinstance(place, int)]
        along = along if isinstance(along, tuple) else (along,)
        if not dimensions or dimensions[0] in along:
            return None
        return Rule([dimensions[0]] * len(places), [dimensions[0]] * len(equation.outvars))

    return rule


def _sliced(parameter: str) -> _Rules:
    """Of an operation that takes a piece of its first input, of sizes or with ends in a parameter."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        (place, *others), sizes = places, equation.params[parameter]
        if not isinstance(place, int):
            return None
        full = shape_of(equation.outvars[0])[place] == shape_of(equation.invars[0])[place]
        if not full:
            return None
        return Rule([place, *[None] * len(others)], [place], {parameter: cut(sizes, place, ranks)})

    return rule


def _pad(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del ranks
    place = places[0]
    if not isinstance(place, int) or any(equation.params["padding_config"][place]):
        return None
    return Rule([place, None], [place])


ADDING = {"add", "add_any", "sub"}  # with a whole array and terms of another, which stay terms
LINEAR = ADDING | {"neg", "copy", "convert_element_type", "reduce_sum"}
LINEAR |= {"broadcast_in_dim", "reshape", "transpose", "squeeze"}
_ELEMENTWISE = {
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "cbrt", "ceil",
    "clamp", "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp",
    "exp2", "expm1", "floor", "ge", "gt", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "log2",
    "logistic", "lt", "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "one_minus_square", "or",
    "population_count", "pow", "real", "reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "xor",
}  # fmt: skip
_RULES: dict[str, _Rules] = {
    "optimization_barrier": _barrier,
    "dot_general": _dot_general,
    "broadcast_in_dim": _broadcast_in_dim,
    "reshape": _reshape,
    "transpose": _transpose,
    "squeeze": _removed("dimensions"),
    "slice": _sliced("limit_indices"),
    "dynamic_slice": _sliced("slice_sizes"),
    "pad": _pad,
    "split": _along("axis"),
    "concatenate": _along("dimension"),
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _removed("axes"),
    ),
}
