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
from jax import lax
from jax.extend import core

from fiddlex.pipeline.elementwise import ELEMENTWISE


class Cut(NamedTuple):
    """A part of an array along a dimension: of each of equal pieces, one after another, the r-th part on rank r.

    A fused projection of queries, keys and values has three pieces. Activations between products may be cut along
    their positions: these parts yield to those of weights, so the ranks exchange activations, and never weights.
    """

    dimension: int
    pieces: int = 1
    yields: bool = False  # whether an operation that has a part of something else takes the whole of this

    def at(self, dimension: int, pieces: int | None = None) -> "Cut":
        return Cut(int(dimension), self.pieces if pieces is None else pieces, self.yields)


# What a rank has of an array. None: the whole, as all ranks; SUM: a term, which has the shape of the whole, of the sum
# over the ranks.
Place = Cut | str | None
SUM = "sum"

Shape = tuple[int, ...]


def stored_whole(place: Place) -> bool:
    """Whether a weight of which ranks have such parts is stored whole: arrays are stored in one piece."""
    return isinstance(place, Cut) and place.pieces > 1


_SAME: Mapping[str, Any] = types.MappingProxyType({})


class Rule(NamedTuple):
    """What an operation takes and makes."""

    wanted: Sequence[Place]  # of each input
    outputs: Sequence[Place]
    params: Mapping[str, Any] = _SAME  # parameters of the operation that differ from those in the trace
    indexed: bool = False  # whether its second input indexes the first along a dimension of which a rank has a part


def _leading(places: Sequence[Place]) -> Cut:
    """The part by which an operation goes that has parts of several inputs: the first that does not yield, or else."""
    return min((place for place in places if isinstance(place, Cut)), key=lambda place: place.yields)


def whole(equation: core.JaxprEqn) -> Rule:
    return Rule([None] * len(equation.invars), [None] * len(equation.outvars))


def shape_of(variable: Any) -> Shape:
    shape: Shape = variable.aval.shape
    return shape


def rule_of(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule:
    """The rule of an operation for `ranks` tensor ranks that have its inputs as `places` say."""
    name = equation.primitive.name
    if {SUM} == set(places) and is_linear(equation):
        alone = _RULES[name](equation, [None], ranks) if name in _RULES else None
        return Rule(places, [SUM], alone.params if alone else _SAME)
    places = [None if place == SUM else place for place in places]
    if all(place is None for place in places):
        return whole(equation)
    if name in ELEMENTWISE:
        return _elementwise(equation, places)
    if name in _RULES:
        return _RULES[name](equation, places, ranks) or whole(equation)
    return whole(equation)


def rule_making(equation: core.JaxprEqn, place: Cut) -> Rule | None:
    """A rule by which an operation makes a part of its result from whole arrays; None where there is none."""
    if equation.primitive.name == "scatter-add":
        return _scatter_add(equation, place)
    if equation.primitive.name == "dot_general":
        sizes = (len(shape_of(factor)) for factor in equation.invars)
        rules = (_product(equation, side, place.at(i)) for side, number in enumerate(sizes) for i in range(number))
        return next((rule for rule in rules if rule.outputs == [place]), None)
    return None


def is_linear(equation: core.JaxprEqn) -> bool:
    """Whether an operation takes terms of a sum; it does not if the terms are fewer bytes before it."""
    if equation.primitive.name != "convert_element_type":
        return equation.primitive.name in LINEAR
    before, after = equation.invars[0].aval.dtype, equation.params["new_dtype"]  # type: ignore[attr-defined]
    return jnp.issubdtype(after, jnp.inexact) and after.itemsize <= before.itemsize


_Rules = Callable[[core.JaxprEqn, Sequence[Place], int], Rule | None]  # None: it takes whole arrays


def _elementwise(equation: core.JaxprEqn, places: Sequence[Place]) -> Rule:
    found = collections.Counter(place for place in places if isinstance(place, Cut))
    place = _leading([place for place, _ in found.most_common()])
    size = shape_of(equation.outvars[0])[place.dimension]
    shapes = map(shape_of, equation.invars)  # an operand may be a scalar, or have one element along a dimension
    wanted = [place if shape and shape[place.dimension] == size else None for shape in shapes]
    return Rule(wanted, [place] * len(equation.outvars))


def _barrier(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del equation, ranks
    return Rule(places, places)


def _dot_general(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del ranks
    sides = [(place, side) for side, place in enumerate(places) if isinstance(place, Cut)]
    # The other side is brought to what the larger one has: a part of it, or the whole.
    place, largest = max(sides, key=lambda each: (not each[0].yields, math.prod(shape_of(equation.invars[each[1]]))))
    return _product(equation, largest, place)


def _product(equation: core.JaxprEqn, side: int, place: Any) -> Rule:
    """A product whose factor on a side, 0 or 1, is in parts."""
    contracted, batched = equation.params["dimension_numbers"]
    mine, other, dimension = side, 1 - side, place.dimension
    wanted: list[Place] = [None, None]
    wanted[mine] = place
    if dimension in contracted[mine]:
        wanted[other] = place.at(contracted[other][contracted[mine].index(dimension)])
        return Rule(wanted, [SUM])
    if dimension in batched[mine]:
        wanted[other] = place.at(batched[other][batched[mine].index(dimension)])
        return Rule(wanted, [place.at(batched[mine].index(dimension))])
    # The result has the batch, then the free dimensions of the left factor, then those of the right one.
    free = [
        [i for i in range(len(shape_of(factor))) if i not in (*contracted[n], *batched[n])]
        for n, factor in enumerate(equation.invars)
    ]
    return Rule(wanted, [place.at(len(batched[0]) + len(free[0]) * side + free[side].index(dimension))])


def _broadcast_in_dim(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place,), shape = places, equation.params["shape"]
    to = place.at(equation.params["broadcast_dimensions"][place.dimension]) if isinstance(place, Cut) else None
    return Rule(places, [to], {"shape": cut(shape, to, ranks)})


def _reshape(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place,), shape = places, equation.params["new_sizes"]
    if not isinstance(place, Cut):
        return Rule(places, [None])
    to = _reshaped(shape_of(equation.invars[0]), shape, place, ranks)
    return to and Rule(places, [to], {"new_sizes": cut(shape, to, ranks)})


def _reshaped(before: Shape, after: Shape, place: Cut, ranks: int) -> Cut | None:
    """Where parts of an array are when it has another shape; None where they are no parts along one dimension."""
    outside = math.prod(before[: place.dimension])
    starts = list(itertools.accumulate(after, operator.mul, initial=1))
    for i, size in enumerate(after):
        # The pieces of a dimension may become one of their own, before that which has their parts.
        begins = starts[i] == outside * place.pieces and (place.pieces == 1 or outside in starts[:i])
        if begins and size > 1 and size % ranks == 0:
            return place.at(i, pieces=1)
        if starts[i] == outside and size == before[place.dimension]:
            return place.at(i)
    if place.pieces > 1:
        return None
    for first in range(place.dimension):  # dimensions before the parts may become one with theirs
        pieces, start = math.prod(before[first : place.dimension]), math.prod(before[:first])
        within = pieces * before[place.dimension]
        for i, size in enumerate(after):
            if starts[i] == start and size % within == 0 and math.prod(before[first:]) % size == 0 and size >= within:
                return place.at(i, pieces)
    return None


def cut(shape: Sequence[int], place: Place, ranks: int) -> Shape:
    """The shape of what a rank has of an array."""
    dimension = place.dimension if isinstance(place, Cut) else None
    return tuple(size // ranks if i == dimension else size for i, size in enumerate(shape))


def _transpose(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    del ranks
    (place,) = places
    order = equation.params["permutation"]
    return Rule(places, [place.at(order.index(place.dimension)) if isinstance(place, Cut) else place])


def _removed(parameter: str) -> _Rules:
    """Of an operation that removes the dimensions in a parameter."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        del ranks
        (place,), gone = places, equation.params[parameter]
        if not isinstance(place, Cut):
            return Rule(places, [None])
        if place.dimension in gone:
            return Rule(places, [SUM]) if equation.primitive.name == "reduce_sum" else None
        return Rule(places, [place.at(place.dimension - sum(int(each) < place.dimension for each in gone))])

    return rule


def _along(parameter: str) -> _Rules:
    """Of an operation that works along the dimensions in a parameter, and alike at all places of the others."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        del ranks
        along, place = equation.params[parameter], _leading(places)
        along = along if isinstance(along, tuple) else (along,)
        if place.dimension in along:
            return None
        return Rule([place] * len(places), [place] * len(equation.outvars))

    return rule


def _split(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place,), sizes = places, equation.params["sizes"]
    if not isinstance(place, Cut) or place.dimension != equation.params["axis"]:
        return _along("axis")(equation, places, ranks)
    if len(sizes) != place.pieces or len(set(sizes)) > 1:
        return None
    one = place.at(place.dimension, pieces=1)
    return Rule(places, [one] * len(sizes), {"sizes": tuple(size // ranks for size in sizes)})


def _concatenate(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    place, dimension = _leading(places), equation.params["dimension"]
    sizes = {shape_of(name)[dimension] for name in equation.invars}
    if (place.dimension, place.pieces) != (dimension, 1) or len(sizes) > 1:
        return _along("dimension")(equation, places, ranks)
    return Rule([place] * len(places), [place.at(dimension, len(places))])


def _sliced(parameter: str) -> _Rules:
    """Of an operation that takes a piece of its first input, of sizes or with ends in a parameter."""

    def rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
        (place, *others), sizes = places, equation.params[parameter]
        if not isinstance(place, Cut):
            return None
        whole, taken = (shape_of(name)[place.dimension] for name in (equation.invars[0], equation.outvars[0]))
        if taken != whole:
            return _one_piece(equation, place, ranks)
        return Rule([place, *[None] * len(others)], [place], {parameter: cut(sizes, place, ranks)})

    return rule


def _one_piece(equation: core.JaxprEqn, place: Cut, ranks: int) -> Rule | None:
    """Of a slice that takes one of the pieces of which a rank has parts."""
    if equation.primitive.name != "slice" or equation.params["strides"]:
        return None
    size = shape_of(equation.invars[0])[place.dimension] // place.pieces
    ends = [equation.params[name] for name in ("start_indices", "limit_indices")]
    start, limit = (each[place.dimension] for each in ends)
    if start % size or limit - start != size:
        return None
    params = dict(zip(("start_indices", "limit_indices"), (cut(each, place, ranks) for each in ends), strict=True))
    return Rule([place], [place.at(place.dimension, pieces=1)], params)


def _gather(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    """Of rows that are taken from parts of a table: a rank has those of its part among zeros."""
    del ranks
    (place, _), numbers = places, equation.params["dimension_numbers"]
    if not isinstance(place, Cut):
        return None
    if not _is_indexed(place, numbers.start_index_map, numbers.collapsed_slice_dims):
        return None
    return Rule([place, None], [SUM], {"mode": lax.GatherScatterMode.FILL_OR_DROP, "fill_value": 0}, indexed=True)


def _scatter_add(equation: core.JaxprEqn, place: Cut) -> Rule | None:
    """Of rows that are added to parts of a table: those of other parts are dropped."""
    numbers = equation.params["dimension_numbers"]
    if not _is_indexed(place, numbers.scatter_dims_to_operand_dims, numbers.inserted_window_dims):
        return None
    return Rule([place, None, None], [place], {"mode": lax.GatherScatterMode.FILL_OR_DROP}, indexed=True)


def _is_indexed(place: Cut, indexed: Sequence[int], one_each: Sequence[int]) -> bool:
    """Whether single rows are numbered along the parts."""
    return place.pieces == 1 and tuple(indexed) == (place.dimension,) and place.dimension in one_each


def _pad(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> Rule | None:
    (place, _), config = places, equation.params["padding_config"]
    if not isinstance(place, Cut):
        return None
    low, high, between = config[place.dimension]
    if not (low or high or between):
        return Rule([place, None], [place])
    size = shape_of(equation.invars[0])[place.dimension]
    if place.pieces > 1 or between or low < 0 or high < 0 or low % size or high % size:
        return None
    here = [(low // ranks, high // ranks, 0) if i == place.dimension else each for i, each in enumerate(config)]
    pieces = (low + size + high) // size
    return Rule([place, None], [place.at(place.dimension, pieces)], {"padding_config": tuple(here)})


ADDING = {"add", "add_any", "sub"}  # with a whole array and terms of another, which stay terms
LINEAR = ADDING | {"neg", "copy", "convert_element_type", "reduce_sum"}
LINEAR |= {"broadcast_in_dim", "reshape", "transpose", "squeeze"}
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
    "gather": _gather,
    "split": _split,
    "concatenate": _concatenate,
    "sort": _along("dimension"),
    "rev": _along("dimensions"),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), _along("axis")),
    **dict.fromkeys(
        ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "argmax", "argmin"),
        _removed("axes"),
    ),
}
