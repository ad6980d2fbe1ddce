"""What a pipeline schedule is: for each rank of the pipe an ordered list of actions, as plain data.

A stage is a piece of the model and belongs to one rank; a rank that holds several of them holds that many chunks. The
ranks run their own lists in order and each action waits for what it needs from the neighbouring stage, so that a
schedule holds an order but no times: times come from a clock (`fiddlex.simulate`) or from the lowering. Actions print
and parse as the published `stage kind microbatch` tokens, `2F0`. Invariant: nothing here knows a model, a schedule by
name, or jax. A `Schedule` may break the rules; `fiddlex.pipeline.validate` tells.
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

_TOKEN = re.compile(r"(\d{1,9})([FBIW])(\d{1,9})", re.ASCII)


class Kind(enum.StrEnum):
    """What an action computes. The backward pass of a microbatch is either B, or I and some time later W."""

    F = "F"  # forward
    B = "B"  # gradients of inputs and weights at once
    I = "I"  # gradient of the inputs only, which the stage before waits for  # noqa: E741
    W = "W"  # gradient of the weights only, which nobody waits for

    __hash__ = str.__hash__  # Enum's own is written in Python, and actions are hashed by the hundred thousand


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
        return Action(self.stage, Kind.I, self.microbatch) if self.kind is Kind.B else self

    def needs(self, num_stages: int) -> tuple["Action", ...]:
        """The products that must exist before the action starts, those of the neighbouring stage first."""
        stage, kind, microbatch = self
        if kind is Kind.F:
            return (Action(stage - 1, Kind.F, microbatch),) if stage else ()
        if kind is Kind.W:
            return (Action(stage, Kind.I, microbatch),)
        own = Action(stage, Kind.F, microbatch)
        return (Action(stage + 1, Kind.I, microbatch), own) if stage + 1 < num_stages else (own,)


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
        return 1 + max((action.microbatch for row in self.actions for action in row), default=-1)

    @functools.cached_property
    def split_backward(self) -> bool:
        """Whether any backward pass runs as I and W."""
        return any(action.kind in (Kind.I, Kind.W) for row in self.actions for action in row)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that `rank` holds, in order."""
        return tuple(stage for stage, home in enumerate(self.placement) if home == rank)


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Runs the ranks as queues: an action leaves its queue once all it needs has been done.

    Linear in the number of actions. One order out of many: every clock follows from it, as it is a topological one.

    Args:
      schedule: any schedule, legal or not.

    Yields:
      Rank and action. Ends early, without an error, where every rank that is not done waits for another.
    """
    next_position = [0] * schedule.num_ranks
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = {}
    ready = collections.deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        row = schedule.actions[rank]
        while next_position[rank] < len(row):
            action = row[next_position[rank]]
            missing = [need for need in action.needs(schedule.num_stages) if need not in done]
            if missing:
                waiting.setdefault(missing[0], []).append(rank)
                break
            yield rank, action
            next_position[rank] += 1
            product = action.product
            done.add(product)
            ready.extend(waiting.pop(product, ()))


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
