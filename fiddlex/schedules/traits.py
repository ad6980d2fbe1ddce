"""What the planner may assume of every schedule that a generator makes.

A generator may have no traits. The planner's search then leaves its schedules out unless the user asks for them, and a
prediction proves, lowers and simulates them whole, which takes longer with more microbatches. With traits, the planner
simulates a long pipeline at two short lengths and extrapolates. Only tests check traits:
`tests/planner/test_closed_forms.py` compares each of them with whole schedules, so add every generator with traits to
the list there.
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
      slots: (p, v, m) → the slots that a flushed batch needs for p > 1; with one rank it needs the slots of its first
        two microbatches unless the schedule is chunk-major. None: the planner lowers the batch to count them.
      spilled_slots: the same where what forwards save may wait on the host. None: the planner lowers a batch that is
        just long enough to repeat.
      onset: p → number of microbatches from which each further period adds the same ticks.
      period: p → number of microbatches in a period; schedules exist only for whole periods.
      splits_backward: whether some or all backward passes run as I and W.
      idle_ticks: (p, v, m) → the least number of a flushed batch's ticks in which a rank runs nothing, where ranks run
        one action per tick.
      chunks: numbers of stages per rank that the planner's search tries.
      searched: semantics under which the planner's search tries the schedule.
      chunk_major: whether weights on the host can come chunk by chunk (`fiddlex.schedules.weight_stream`); the planner
        tries such schedules only for that, and others never.
      never_waits: whether a pipeline without flushes never waits for an update when the weights of all stages have a
        delay and m ≥ 2(p−1).
      sizes_2bw: (p, v, m) → the sizes of a pipeline of p > 1 ranks under 2BW, for m ≥ p; None: the planner unrolls the
        pipeline to find them.
    """

    slots: Callable[[int, int, int], Slots] | None
    spilled_slots: Callable[[int, int, int], Slots] | None = None
    onset: Callable[[int], int] = lambda p: 2 * p
    period: Callable[[int], int] = lambda p: 1
    splits_backward: bool = False
    idle_ticks: Callable[[int, int, int], int] = lambda p, v, m: 0
    chunks: tuple[int, ...] = (1,)
    searched: tuple[str, ...] = ()
    chunk_major: bool = False
    never_waits: bool = False
    sizes_2bw: Callable[[int, int, int], Sizes] | None = None


# Of a schedule of which nothing more is known than its actions: it is simulated whole, and bounds assume the least.
NO_TRAITS = Traits(slots=None, onset=lambda p: 2**62, splits_backward=True)

_TRAITS: dict[Generator, Traits] = {}


def with_traits(traits: Traits) -> Callable[[_Generator], _Generator]:
    """A decorator that gives a generator these traits."""

    def register(generator: _Generator) -> _Generator:
        _TRAITS[generator] = traits
        return generator

    return register


def traits_of(generator: Generator | None) -> Traits | None:
    """Returns the traits of a generator; None if it has none."""
    return _TRAITS.get(generator) if generator else None
