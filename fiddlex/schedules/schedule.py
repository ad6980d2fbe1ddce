"""What a pipeline schedule is: an ordered list of actions for each rank of the pipe, as plain data.

A stage is a piece of the model and belongs to one rank. The stages on one rank are the rank's chunks. Each rank runs
its own list in order, and each action waits for what it needs from the neighbouring stage. So a schedule holds an order
but no times: times come from a clock (`fiddlex.simulate`) or from `fiddlex.schedules.lowering`. Invariant: this module
knows no model, no schedule by name, and no jax. A `Schedule` may break the rules that `validate` checks.
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

NOTHING, MISSING = -1, -2  # in `Needs`: the action needs none; what it needs is not in the schedule

_TOKEN = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Kind(enum.StrEnum):
    """What an action computes. The backward pass of a microbatch is either one B, or an I and later a W."""

    F = "F"  # forward
    B = "B"  # gradients of inputs and weights at once
    I = "I"  # gradient of the inputs only, which the previous stage waits for  # noqa: E741
    W = "W"  # gradient of the weights only, which no other action waits for

    __hash__ = str.__hash__  # Enum.__hash__ is written in Python, and millions of actions are hashed


_F, _B, _I, _W = Kind  # module names, since looking up enum members is slow


class Action(NamedTuple):
    """One piece of work: `kind` for one microbatch on one stage, printed as stage, kind and microbatch, as in `2F0`."""

    stage: int
    kind: Kind
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    @classmethod
    def parse(cls, token: str) -> "Action":
        """Parses a token as `str` prints it, for example `2F0`; raises ScheduleError for any other text."""
        match = _TOKEN.fullmatch(token)
        if match is None:
            raise ScheduleError(
                f"{token!r} is not an action: write stage, kind and microbatch as in 2F0, where the kind is "
                "F (forward), B (backward), I (input gradient) or W (weight gradient)."
            )
        return cls(int(match[1]), Kind(match[2]), int(match[3]))

    @property
    def product(self) -> "Action":
        """The action that `needs` names instead: I for B, since both give the input gradient; else itself."""
        return Action(self.stage, _I, self.microbatch) if self.kind is _B else self

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The products that must exist before the action starts; the neighbouring stage's product comes first."""
        stage, kind, microbatch = self
        if kind is _F:
            return (Action(stage - 1, _F, microbatch),) if stage else ()
        if kind is _W:
            return (Action(stage, _I, microbatch),)
        own = Action(stage, _F, microbatch)
        return (Action(stage + 1, _I, microbatch), own) if stage + 1 < num_stages else (own,)


class Needs(NamedTuple):
    """For each action the numbers (`Schedule.numbered`) of those that it waits for; numbers let loops avoid hashing."""

    neighbour: list[int]  # the needed action of the previous or next stage
    own: list[int]  # the needed action of the action's own stage


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Each rank's ordered actions, and the rank of each stage."""

    name: str  # for messages
    actions: tuple[tuple[Action, ...], ...]  # of each rank in order, [rank][position]
    placement: tuple[int, ...]  # the rank of each stage
    # Whether a rank runs one action per tick, in order; else F and whole B share ticks, and F may run ahead (`ticks`).
    strict: bool = False
    notes: tuple[str, ...] = dataclasses.field(default=(), compare=False)  # how a table was read, for people

    @property
    def num_ranks(self) -> int:
        """Number of devices along the pipe axis."""
        return len(self.actions)

    @property
    def num_stages(self) -> int:
        """Number of pieces into which the model is cut."""
        return len(self.placement)

    @functools.cached_property
    def num_chunks(self) -> int:
        """The largest number of stages on one rank."""
        return max(collections.Counter(self.placement).values(), default=0)

    @functools.cached_property
    def num_microbatches(self) -> int:
        """Number of microbatches in the batch: one more than the highest microbatch number in the actions."""
        return 1 + max((action.microbatch for action in self.numbered), default=-1)

    @functools.cached_property
    def split_backward(self) -> bool:
        """Whether any backward pass runs as I and W."""
        return not {Kind.I, Kind.W}.isdisjoint(action.kind for action in self.numbered)

    @property
    def has_whole(self) -> bool:
        """Whether any backward pass is whole (B)."""
        return Kind.B in {action.kind for action in self.numbered}

    @functools.cached_property
    def numbered(self) -> tuple[Action, ...]:
        """The actions of all ranks, concatenated in rank order; an action's index here is its number."""
        return tuple(itertools.chain.from_iterable(self.actions))

    @functools.cached_property
    def starts(self) -> tuple[int, ...]:
        """The index of each rank's first action in `numbered`, then the number of actions."""
        return tuple(itertools.accumulate(map(len, self.actions), initial=0))

    @functools.cached_property
    def needs(self) -> Needs:
        """`Action.needs` of every action, as numbers."""
        actions, num_stages = self.numbered, self.num_stages
        by_stage: dict[int, dict[Action, int]] = collections.defaultdict(dict)  # small dicts fit into a CPU cache
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
    """Yields rank and number of each action in an order in which they can run: each one after all that it needs.

    Any such order is enough to compute a clock. In an illegal schedule, the iterator ends early, without an error, when
    every unfinished rank waits for an action that can never run. The runtime is linear in the number of actions.
    """
    neighbour, own = schedule.needs
    done = bytearray(len(own) + 2)
    done[NOTHING] = True  # the last two entries are those of MISSING and NOTHING; MISSING is never done
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
    """The order of most schedules: `warmup` forwards, then forwards and backwards in turn, then the rest.

    Args:
      forwards: one rank's forwards in order.
      backwards: the same rank's backwards (B or I) in order, as many as there are forwards.
      warmup: number of forwards before the first pair; if it exceeds the number of forwards, all run first.
    """
    pairs = itertools.zip_longest(forwards[warmup:], backwards)
    return [*forwards[:warmup], *(action for pair in pairs for action in pair if action is not None)]
