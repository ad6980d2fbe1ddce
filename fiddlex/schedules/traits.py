"""What the planner may take for granted of every schedule that a generator makes.

A generator needs no traits: without them its schedules are proven, lowered and simulated whole, which takes longer the
more microbatches there are, and the planner's search leaves them out. With traits long pipelines are simulated at two
short lengths and drawn out. Nothing proves traits but tests (`tests/planner/test_closed_forms.py` compares each of them
with whole schedules), so a generator that gets some belongs in the list there.
"""

import dataclasses
from collections.abc import Callable
from typing import TypeVar

from fiddlex.schedules.buffers import Sizes, Slots
from fiddlex.schedules.schedule import Schedule

Generator = Callable[..., Schedule]
_Generator = TypeVar("_Generator", bound=Generator)


@dataclasses.dataclass(frozen=True)
class Traits:
    """Facts about all schedules of a generator, with p ranks, v chunks and m microbatches.

    Attributes:
      slots: (p, v, m) → the slots that a flushed batch takes where p > 1; of one rank it takes those of a microbatch
        alone. None: the batch is lowered to tell.
      onset: p → microbatches from which on each period more adds the same ticks.
      period: p → microbatches of a period; schedules exist for whole periods only.
      splits_backward: whether backward passes run as I and W.
      chunks: numbers of stages on a rank that the planner's search tries.
      searched: semantics under which the search tries the schedule.
      never_waits: whether a pipeline that is not flushed never waits for an update, where the weights of all stages
        lag and m ≥ 2(p−1).
      sizes_2bw: (p, v, m) → what a pipeline of p > 1 ranks holds under 2BW, where m ≥ p; None: it is unrolled to tell.
    """

    slots: Callable[[int, int, int], Slots] | None
    onset: Callable[[int], int] = lambda p: 2 * p
    period: Callable[[int], int] = lambda p: 1
    splits_backward: bool = False
    chunks: tuple[int, ...] = (1,)
    searched: tuple[str, ...] = ()
    never_waits: bool = False
    sizes_2bw: Callable[[int, int, int], Sizes] | None = None


_TRAITS: dict[Generator, Traits] = {}


def with_traits(traits: Traits) -> Callable[[_Generator], _Generator]:
    """A decorator that says so of a generator."""

    def register(generator: _Generator) -> _Generator:
        _TRAITS[generator] = traits
        return generator

    return register


def traits_of(generator: Generator | None) -> Traits | None:
    """The traits of a generator; None where it has none."""
    return _TRAITS.get(generator) if generator else None
