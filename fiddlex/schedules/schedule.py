"""What a pipeline schedule is: for each rank of the pipe an ordered list of actions, as plain data.

A stage is a piece of the model and belongs to one rank; a rank that holds several of them holds that many chunks. The
ranks run their own lists in order and each action waits for what it needs from the neighbouring stage, so that a
schedule holds an order but no times: times come from a clock (`fiddlex.simulate`) or from the lowering. Actions print
and parse as the published `stage kind microbatch` tokens, `2F0`. Invariant: nothing here knows a model, a schedule by
name, or jax. A `Schedule` may break the rules; `fiddlex.schedules.validate` tells.
"""

import collections
import dataclasses
import enum
import functools
import itertools
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from fiddlex.errors import ScheduleError

NOTHING, MISSING = -1, -2  # in the place of an action's number, see `Needs`

_TOKEN = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Kind(enum.StrEnum):
    """What an action computes. The backward pass of a microbatch is either B, or I and some time later W."""

    F = "F"  # forward
    B = "B"  # gradients of inputs and weights at once
    I = "I"  # gradient of the inputs only, which the stage before waits for  # noqa: E741
    W = "W"  # gradient of the weights only, which nobody waits for

    __hash__ = str.__hash__  # Enum's own is written in Python, and actions are hashed by the million


_F, _B, _I, _W = Kind  # looking up a member takes longer than all else that is done with an action


class Action(NamedTuple):
    """One piece of work: `kind` for one microbatch on one stage."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, token: str) -> "Action":
        """Reads what `str` of an action gives.

        Raises:
          ScheduleError: when `token` is not a stage, one of F, B, I, W, and a microbatch.
        """
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ScheduleError(
                f"{token!r} is not an action: write stage, kind and microbatch as in 2F0, where the kind is "
                "F (forward), B (backward), I (input gradient) or W (weight gradient). "
                "A schedule has no sends and receives; they follow from it."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    @property
    def product(self) -> "Action":
        """The action as others need it: B gives the input gradient, as I does."""
        return Action(self.stage, _I, self.microbatch) if self.kind is _B else self

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The products that must exist before the action starts, those of the neighbouring stage first."""
        stage, kind, microbatch = self
        if kind is _F:
            return (Action(stage - 1, _F, microbatch),) if stage else ()
        if kind is _W:
            return (Action(stage, _I, microbatch),)
        own = Action(stage, _F, microbatch)
        return (Action(stage + 1, _I, microbatch), own) if stage + 1 < num_stages else (own,)


class Needs(NamedTuple):
    """What each action waits for, both by their numbers (`Schedule.numbered`), so that passes over all hash nothing.

    `NOTHING` where it needs nothing of the kind, `MISSING` where no action of the schedule gives it.
    """

    neighbour: list[int]  # of the stage before or after
    own: list[int]  # of the action's own stage


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Each rank's ordered actions, and the rank of each stage."""

    name: str
    actions: tuple[tuple[Action, ...], ...]  # [rank][position]
    placement: tuple[int, ...]  # [stage] → rank

    @property
    def num_ranks(self) -> int:
        """Devices along the pipe axis."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Pieces into which the model is cut."""
        return len(self.placement)

    @functools.cached_property
    def num_chunks(self) -> int:
        """Most stages that one rank holds."""
        return max(collections.Counter(self.placement).values(), default=0)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Microbatches in the batch: one more than the highest number named."""
        return 1 + max((action.microbatch for action in self.numbered), default=-1)

    @functools.cached_property
    def split_backward(self) -> bool:
        """Whether any backward pass runs as I and W."""
        return not {Kind.I, Kind.W}.isdisjoint(action.kind for action in self.numbered)

    @functools.cached_property
    def numbered(self) -> tuple[Action, ...]:
        """All actions, the lists of the ranks one behind the other: where an action stands here is its number."""
        return tuple(itertools.chain.from_iterable(self.actions))

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The number of each rank's first action, and behind the last rank's how many actions there are."""
        return tuple(itertools.accumulate(map(len, self.actions), initial=0))

    @functools.cached_property
    def needs(self) -> Needs:
        """`Action.needs` of every action."""
        actions, num_stages = self.numbered, self.num_stages
        by_stage: dict[int, dict[Action, int]] = collections.defaultdict(dict)  # smaller ones fit into a cache
        for number, action in enumerate(actions):
            by_stage[action.stage][action.product] = number
        needs = Needs([NOTHING] * len(actions), [NOTHING] * len(actions))
        for number, action in enumerate(actions):
            for need in action.needs(num_stages):
                place = needs.own if need.stage == action.stage else needs.neighbour
                place[number] = by_stage[need.stage].get(need, MISSING)
        return needs

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in order."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)


def execution_order(schedule: Schedule) -> Iterator[tuple[int, int]]:
    """Runs the ranks as queues: an action leaves its queue once all it needs has been done.

    Linear in the number of actions. One order out of many: every clock follows from it, as it is a topological one.

    Args:
      schedule: any schedule, legal or not.

    Yields:
      Rank and number of an action. Ends early, without an error, where every rank that is not done waits for another.
    """
    neighbour, own = schedule.needs
    done = bytearray(len(own) + 2)
    done[NOTHING] = True  # the other of the two behind the actions is that of MISSING
    heads, ends = list(schedule.starts[:-1]), schedule.starts[1:]
    waiting: dict[int, list[int]] = {}
    ready = collections.deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        for number in range(heads[rank], ends[rank]):
            if not (done[neighbour[number]] and done[own[number]]):
                missing = own[number] if done[neighbour[number]] else neighbour[number]
                waiting.setdefault(missing, []).append(rank)
                heads[rank] = number
                break
            yield rank, number
            done[number] = True
            if number in waiting:
                ready.extend(waiting.pop(number))


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], *, warmup: int) -> list[Action]:
    """The order that most schedules have: `warmup` forwards, then one forward and one backward, then the rest.

    Args:
      forwards: one rank's forwards in order.
      backwards: its backwards (B or I) in order, as many.
      warmup: forwards ahead of the first pair; beyond the number of forwards, all of them.

    Returns:
      All the actions.
    """
    pairs = itertools.zip_longest(forwards[warmup:], backwards)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair if action is not None)]
