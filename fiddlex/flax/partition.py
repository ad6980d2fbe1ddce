"""Which part of each array of a trace a tensor rank has, and what the ranks exchange for it.

A trace is planned operation by operation, from the parts that a rank has of its arguments. An operation that works on
parts runs on parts; before any other, the ranks bring the whole arrays together. So every trace has a plan, whatever it
computes, and what a good choice of weights' parts saves is that little has to be exchanged: in a transformer's block,
the two sums of Megatron-LM (Shoeybi et al., 2019, section 3).
"""

import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from fiddlex.flax.operations import (
    ADDING,
    SUM,
    Cut,
    Place,
    Rule,
    is_linear,
    rule_making,
    rule_of,
    shape_of,
    stored_whole,
)

PIECES = (2, 3)  # of fused projections: gate and value; queries, keys and values
KEPT = "kept"  # in place of a result's place: the one that it has, but no terms


class Step(NamedTuple):
    """How an operation runs by a rule."""

    moves: list[tuple[Place, Place]]  # of each input: what the rank has, and what the operation takes
    rule: Rule
    body: "Plan | None"  # of a scan


class Plan(NamedTuple):
    """How the operations of a trace run."""

    steps: list[Step]
    results: list[tuple[Place, Place]]  # of each result: what the rank has, and what is asked for
    flops: float  # of products on one rank
    exchanged: int  # elements that a rank sends, about

    @property
    def places(self) -> list[Place]:
        return [wanted for _, wanted in self.results]


def plan(jaxpr: core.Jaxpr, places: Sequence[Place], wanted: Sequence[Place], ranks: int) -> Plan:
    """The plan of a trace without inner `jit`s.

    Args:
      jaxpr: the trace, with the shapes of whole arrays.
      places: what a rank has of the first arguments; of the others it has the whole.
      wanted: what it is to have of the first results; it has the others as they are made.
      ranks: number of tensor ranks.
    """
    wanted = [*wanted, *[KEPT] * (len(jaxpr.outvars) - len(wanted))]
    state = _Planning(jaxpr, places, wanted, ranks)
    steps = [state.step(equation) for equation in jaxpr.eqns]
    results = [state.moved(name, state.asked(place, name)) for name, place in zip(jaxpr.outvars, wanted, strict=True)]
    return Plan(steps, results, state.flops, state.exchanged)


class _Planning:
    """A plan that grows with each operation; the arguments are those of `plan`, with an entry for each result.

    Attributes:
      flops, exchanged: those of `Plan`, so far.
    """

    def __init__(self, jaxpr: core.Jaxpr, places: Sequence[Place], wanted: Sequence[Place], ranks: int):
        self.flops, self.exchanged, self._ranks = 0.0, 0, ranks
        self._made: dict[Any, Place] = dict.fromkeys([*jaxpr.constvars, *jaxpr.invars])
        self._made |= dict(zip(jaxpr.invars, places, strict=False))
        self._gathered = set[Any]()
        self._streams = dict[Any, Place]()  # of shapes of arrays of which ranks have parts that yield
        self._remember(jaxpr.invars)
        self._summed = _inputs(equation for equation in jaxpr.eqns if not is_linear(equation))
        self._added = _inputs(equation for equation in jaxpr.eqns if equation.primitive.name in ADDING)
        self._added -= _inputs(equation for equation in jaxpr.eqns if equation.primitive.name not in ADDING)
        self._added -= {name for name in jaxpr.outvars if not isinstance(name, core.Literal)}
        self._asked = _asked_before(jaxpr, wanted)

    def step(self, equation: core.JaxprEqn) -> Step:
        """Plans the operation that comes next."""
        made_first = next(iter(equation.outvars), None)  # none of what only reports
        rule, body = self._rule(equation, made_first)
        moves = [self.moved(name, place) for name, place in zip(equation.invars, rule.wanted, strict=True)]
        self._made.update(zip(equation.outvars, rule.outputs, strict=True))
        self._remember(equation.outvars)
        if equation.primitive.name == "dot_general":
            shared = any(each is not None for each in rule.wanted)
            self.flops += _flops(equation) / (self._ranks if shared else 1)
        if body is not None:
            self.flops += body.flops * equation.params["length"]
            self.exchanged += body.exchanged * equation.params["length"]
        return Step(moves, rule, body)

    def moved(self, name: Any, place: Place) -> tuple[Place, Place]:
        """What a rank has of an array, and `place`, which it is to have now."""
        if isinstance(name, core.Literal):
            return None, place
        given = place if same_part(self._made[name], place) else self._made[name]
        if given not in (place, None) and place != SUM and not (place is None and name in self._gathered):
            self.exchanged += math.prod(shape_of(name)) * (2 if given == SUM and place is None else 1)
        if place is None:  # whoever takes the whole next has it
            self._gathered.add(name)
        if given == SUM and place != SUM:
            self._made[name] = place
        return given, place

    def asked(self, place: Place, name: Any) -> Place:
        """What a rank is to have of a result of which `place` is wanted."""
        if place != KEPT:
            return place
        return None if isinstance(name, core.Literal) or self._made[name] == SUM else self._made[name]

    def _rule(self, equation: core.JaxprEqn, made_first: Any) -> tuple[Rule, Plan | None]:
        # Whoever needs a sum needs it once, before all who could take terms. Until then terms stay terms.
        given = [None if isinstance(name, core.Literal) else self._made[name] for name in equation.invars]
        pairs = list(zip(given, equation.invars, strict=True))
        if any(place == SUM and name in self._summed for place, name in pairs):
            given = [self._streams.get(shape_of(name)) if place == SUM else place for place, name in pairs]
        # A whole array is a term on one rank; a part that yields is one among zeros, which is less if a sum follows.
        kinds = {place.yields if isinstance(place, Cut) else place for place in given}
        joins = equation.primitive.name in ADDING and made_first not in self._summed
        if joins and (kinds == {SUM, None} or (kinds == {SUM, True} and made_first in self._added)):
            return Rule([SUM, SUM], [SUM]), None
        place = self._asked.get(made_first) if set(given) == {None} else None
        if place and (making := rule_making(equation, place)):
            return making, None
        return _rule(equation, given, self._ranks)

    def _remember(self, names: Sequence[Any]) -> None:
        made = {name: self._made[name] for name in names}
        self._streams |= {
            shape_of(name): place for name, place in made.items() if isinstance(place, Cut) and place.yields
        }


def _inputs(equations: Iterable[core.JaxprEqn]) -> set[Any]:
    return {name for equation in equations for name in equation.invars if not isinstance(name, core.Literal)}


def _asked_before(jaxpr: core.Jaxpr, wanted: Sequence[Place]) -> dict[Any, Cut]:
    """Parts that are asked for of results, and of the arrays that only a conversion or a sum parts from these."""
    pairs = zip(jaxpr.outvars, wanted, strict=True)
    asked = {name: place for name, place in pairs if isinstance(place, Cut) and not isinstance(name, core.Literal)}
    for equation in reversed(jaxpr.eqns):
        place = next(map(asked.get, equation.outvars), None)
        if place and equation.primitive.name in (*ADDING, "convert_element_type"):
            names = [name for name in equation.invars if not isinstance(name, core.Literal)]
            asked |= {name: place for name in names if shape_of(name) == shape_of(equation.outvars[0])}
    return asked


def _flops(equation: core.JaxprEqn) -> float:
    ((left, _), _) = equation.params["dimension_numbers"]
    return 2.0 * math.prod(shape_of(equation.outvars[0])) * math.prod(shape_of(equation.invars[0])[i] for i in left)


def _rule(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> tuple[Rule, Plan | None]:
    if equation.primitive.name == "scan":
        return _scan(equation, places, ranks)
    return rule_of(equation, places, ranks), None


def _scan(equation: core.JaxprEqn, places: Sequence[Place], ranks: int) -> tuple[Rule, Plan]:
    """A scan whose body runs on parts, and the plan of its body."""
    constants, carries, _ = scan_sizes(equation)
    body = equation.params["jaxpr"].jaxpr
    outer = [None if place == SUM else place for place in places]
    # Not along the scan.
    outer[constants + carries :] = [place if _dimension(place) else None for place in outer[constants + carries :]]
    scanned = [_shifted(place, -1) for place in outer[constants + carries :]]
    carried, settled = outer[constants : constants + carries], [False] * carries
    while True:
        given = [*outer[:constants], *carried, *scanned]
        found = plan(body, given, [], ranks).places[:carries]
        if all(map(operator.or_, settled, map(same_part, carried, found))):
            break
        for i, (before, after) in enumerate(zip(carried, found, strict=True)):
            if not same_part(before, after):
                # A carry that starts whole may become parts; one whose parts change is whole throughout.
                carried[i] = after if before is None and not settled[i] else None
                settled[i] |= before is not None
    final = plan(body, given, carried, ranks)
    outer[constants : constants + carries] = carried
    of_steps = [_shifted(place, 1) for place in final.places[carries:]]
    return Rule(outer, [*carried, *of_steps]), final


def _dimension(place: Place) -> int:
    return place.dimension if isinstance(place, Cut) else 0


def _shifted(place: Place, dimensions: int) -> Place:
    return place.at(place.dimension + dimensions) if isinstance(place, Cut) else place


def scan_sizes(equation: core.JaxprEqn) -> tuple[int, int, int]:
    """Numbers of constants, carries and scanned arrays of a scan; jax's versions name them differently."""
    inner = equation.params["jaxpr"].jaxpr
    pairs = [zip(*names, strict=True) for names in ((equation.outvars, inner.outvars), (equation.invars, inner.invars))]
    # What is scanned has a dimension more outside than inside.
    carries, others = (sum(len(shape_of(each)) == len(shape_of(body)) for each, body in pair) for pair in pairs)
    return others - carries, carries, len(equation.invars) - others


def same_part(a: Place, b: Place) -> bool:
    """Whether a rank that has one has the other."""
    return a[:2] == b[:2] if isinstance(a, Cut) and isinstance(b, Cut) else a == b


def of_gradient(place: Place, *, terms: bool = False) -> Place:
    """What a rank is to have of the gradient of a weight.

    A weight that is cut in pieces is stored whole. Each rank has the gradient of its part among zeros, and the ranks
    add these up once per batch. With `terms` they do so for all weights that they have whole.
    """
    return SUM if stored_whole(place) or (terms and place is None) else place


def choose(jaxpr: core.Jaxpr, num_weights: int, ranks: int, *, exchange: float) -> list[Place]:
    """The part of each weight with which a layer's step is cheapest, as far as a greedy search finds it.

    The search gives a rank a part of one weight, and of all other weights the parts of which it then has the gradients:
    a part of one kernel of a multilayer perceptron or of attention decides on the others. What makes the step cheaper
    is kept. Last it tries two and three pieces of what is whole.

    Args:
      jaxpr: a trace of the layer's results and gradients. Its first arguments are the weights, and its last results
        the gradients of the weights and that of the layer's input.
      num_weights: number of weights.
      ranks: number of tensor ranks.
      exchange: number of floating-point operations that cost as much as exchanging one element.
    """
    others: list[Place] = [None] * (len(jaxpr.invars) - num_weights)

    def planned(places: Sequence[Place], gradients: Sequence[Place]) -> Plan:
        results = [None] * (len(jaxpr.outvars) - num_weights - 1)
        return plan(jaxpr, [*places, *others], [*results, *gradients, None], ranks)

    def cost(places: Sequence[Place]) -> float:
        found = planned(places, list(map(of_gradient, places)))
        return found.flops + exchange * found.exchanged

    def followed(places: list[Place]) -> list[Place]:
        made = planned(places, [KEPT] * num_weights).places[-1 - num_weights : -1]
        further = [mine if mine is not None else place for mine, place in zip(places, made, strict=True)]
        return places if further == places else followed(further)

    places: list[Place] = [None] * num_weights
    best = cost(places)
    for pieces in (1, *PIECES) if ranks > 1 else ():
        changed = True
        while changed:
            changed = False
            for i, name in enumerate(jaxpr.invars[:num_weights]):
                for dimension, size in enumerate(shape_of(name)):
                    tried = Cut(dimension, pieces)
                    if size % (ranks * pieces) or tried == places[i] or (pieces > 1 and places[i] is not None):
                        continue
                    other = followed([*places[:i], tried, *places[i + 1 :]])
                    if (found := cost(other)) < best:
                        places, best, changed = other, found, True
    return places
