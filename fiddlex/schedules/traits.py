"""What the planner may assume of every schedule that a generator makes.

Without traits, the planner's search leaves a generator's schedules out unless the user asks for them, and a prediction
proves, lowers and simulates them whole, which takes longer with more microbatches. With traits, the planner simulates a
long pipeline at two short lengths and extrapolates. Only `tests/planner/test_closed_forms.py` checks traits, against
whole schedules, so add every generator with traits to the list there.
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

    On one rank, a flushed batch needs the slots of its first two microbatches unless the schedule is chunk-major.
    """

    # (p, v, m) → the slots that a flushed batch needs for p > 1; None: the planner lowers the batch to count them.
    slots: Callable[[int, int, int], Slots] | None
    # The same if stashes may spill to the host; None: the planner lowers a batch just long enough to repeat.
    spilled_slots: Callable[[int, int, int], Slots] | None = None
    # p → number of microbatches from which each further period adds the same ticks.
    onset: Callable[[int], int] = lambda p: 2 * p
    # p → number of microbatches in a period; schedules exist only for whole periods.
    period: Callable[[int], int] = lambda p: 1
    splits_backward: bool = False  # whether some or all backward passes run as I and W
    # (p, v, m) → the fewest idle ticks of a rank in a flushed batch, where ranks run one action per tick.
    idle_ticks: Callable[[int, int, int], int] = lambda p, v, m: 0
    chunks: tuple[int, ...] = (1,)  # numbers of stages per rank that the planner's search tries
    searched: tuple[str, ...] = ()  # semantics under which the planner's search tries the schedule
    # Whether weights can come chunk by chunk: the planner tries such schedules if they wait on the host, else others.
    chunk_major: bool = False
    # Whether, without flushes, no forward waits for an update if all stages have a delay and m ≥ 2(p−1).
    never_waits: bool = False
    # (p, v, m) → the sizes for p > 1 ranks under 2BW, for m ≥ p; None: the planner unrolls the pipeline to find them.
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
    return _TRAITS.get(generator) if generator else None
