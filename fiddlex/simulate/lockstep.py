"""The lockstep clock: what a lowered schedule costs when all ranks step through its ticks together, as they execute it.

In a tick a rank runs F, then B or I, then W, and skips what it has not; the tick lasts as long as its slowest rank.
Where the last stage's forward is scored between the slots (`Lowered.scores_between`), all ranks wait for each other
behind the forward slot, since scoring takes all of them. That work itself, and embedding, cost nothing here.

What is sent travels beside a slot. An activation sets out when its forward ends, and the tick lasts until it has
arrived: it is hidden beside the backward slot of its tick as far as that is as long. A gradient sets out at the start
of the next tick, and the backward slot of the rank that gets it waits for it: it is hidden beside the forward slot.
Hops that carry nothing for anybody cost nothing. Invariant: every rank starts a tick at the same time. Imports no jax.
"""

from collections.abc import Sequence
from typing import NamedTuple

from fiddlex.pipeline.lowering import NONE, Lowered
from fiddlex.pipeline.schedule import Action, Kind, Schedule
from fiddlex.pipeline.ticks import SLOTS
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.timeline import Event, Timeline


def lockstep(lowered: Lowered, costs: Costs) -> Timeline:
    """Steps through the ticks of a lowered schedule.

    Args:
      lowered: the schedule on its ticks.
      costs: times of the actions and hops.

    Returns:
      The timeline, in the unit of `costs`. Takes time linear in ticks × ranks.

    Raises:
      ScheduleError: when `costs` do not fit the stages.
    """
    ranks = _Ranks(lowered.schedule, costs)
    meets_between = ((lowered.column("head")[:, 0] != NONE) & lowered.scores_between).tolist()
    tick_starts = []
    gradients: list[_Message] = []
    for tick, (forwards, backwards, weights) in enumerate(_slots(lowered)):
        start = ranks.meet()
        tick_starts.append(start)
        activations = ranks.run(forwards)
        if meets_between[tick]:
            ranks.meet()
        ranks.receive(gradients, sent=start)
        gradients = ranks.run(backwards)
        ranks.run(weights)
        ranks.receive(activations)
    return Timeline(lowered.schedule, tuple(map(tuple, ranks.events)), tuple(tick_starts))


def describe(lowered: Lowered, *, num_layers: Sequence[int]) -> str:
    """One line for a log: stages, ticks, bubble and what the fullest rank holds.

    Args:
      lowered: the schedule on its ticks.
      num_layers: of each stage, to whose number a forward, an I and a W are taken to be proportional.
    """
    layers = tuple(map(float, num_layers))
    bubble = lockstep(lowered, Costs(layers, layers, layers)).bubble_fraction
    schedule, fewest, most = lowered.schedule, min(num_layers), max(num_layers)
    sizes = f"{most} layer" if fewest == most else f"{fewest} to {most} layer"
    return (
        f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_stages} stages of {sizes}{'s' * (most > 1)}, "
        f"{schedule.num_microbatches} microbatches in {lowered.num_ticks} ticks, bubble {bubble:.0%}, "
        f"at most {lowered.stash_slots} forward passes of a stage stashed on a rank"
    )


class _Message(NamedTuple):
    """What an action sends to another rank: when it can set out, and how long it takes."""

    receiver: int
    ready: float
    hop: float


class _Ranks:
    """The time on each rank, and what has run there."""

    def __init__(self, schedule: Schedule, costs: Costs):
        self.events: list[list[Event]] = [[] for _ in range(schedule.num_ranks)]
        self._now = [0.0] * schedule.num_ranks
        self._placement = schedule.placement
        self._durations = costs.durations(schedule.num_stages)
        self._hops = costs.per_stage(schedule.num_stages)["hop"]

    def meet(self) -> float:
        """All ranks wait for the last of them; the time it is then."""
        self._now = [max(self._now)] * len(self._now)
        return self._now[0]

    def run(self, actions: list[Action]) -> list[_Message]:
        """Runs at most one action on each rank, and gives what F, B or I send to the neighbouring stage."""
        messages = []
        for action in actions:
            rank = self._placement[action.stage]
            start = self._now[rank]
            self._now[rank] = end = start + self._durations[action.kind][action.stage]
            self.events[rank].append(Event(action, start, end))
            neighbour = action.stage + (1 if action.kind is Kind.F else -1)
            if 0 <= neighbour < len(self._placement) and self._placement[neighbour] != rank:
                messages.append(_Message(self._placement[neighbour], end, self._hops[action.stage]))
        return messages

    def receive(self, messages: list[_Message], *, sent: float = 0.0) -> None:
        """The receivers wait for messages that set out at time `sent`, or when they are ready."""
        for receiver, ready, hop in messages:
            self._now[receiver] = max(self._now[receiver], max(ready, sent) + hop)


def _slots(lowered: Lowered) -> list[tuple[list[Action], ...]]:
    """For each tick the actions of all ranks by slot."""
    slots: list[tuple[list[Action], ...]] = [tuple([] for _ in SLOTS) for _ in range(lowered.num_ticks)]
    slot_of = {kind: slot for slot, kinds in enumerate(SLOTS) for kind in kinds}
    for row, ticks in zip(lowered.schedule.actions, lowered.ticks, strict=True):
        for action, tick in zip(row, ticks, strict=True):
            slots[tick][slot_of[action.kind]].append(action)
    return slots
