"""The lockstep clock: what a lowered schedule costs when all ranks step through its ticks together, as they execute it.

In a tick a rank runs F, then B or I, then W, and skips the ones it does not have; the tick lasts as long as its slowest
rank. All ranks together embed the microbatch that enters, before the forward slot, and run the embedding's backward at
the tick's end. All ranks together score what leaves the last stage, either between the forward and the backward slot
(`Lowered.scores_between`), which synchronizes them, or at the tick's end, where they synchronize anyway.

Messages travel while slots compute. An activation is sent when its forward ends, and the tick lasts until it has
arrived; the backward slot of its tick hides the hop for as long as the slot lasts. A gradient is sent at the start of
the next tick, and the backward slot of the receiving rank waits for it; the forward slot hides the hop in the same way.
Hops without a message cost nothing. Invariant: all ranks start a tick at the same time, so the length of a tick depends
only on the work in that tick and in the previous one.

Ranks whose devices share a processor's cores (`Costs.sharing`) slow each other down when they run the same slot, or,
where each rank runs one action per tick, the same tick. While k ranks are active, their actions take `sharing[k − 1]`
times as long; when one rank finishes, the others continue faster.

Copies to and from the host go on beside the work, in both directions at once, and the work that follows waits for them.
Where what forwards save waits on the host, every tick copies, needed or not (`fiddlex.pipeline.host_stash`): the
backward slot begins only once a spill that began with the tick has ended, and the tick ends only once a fetch that
began after the spill has ended. Where weights come from the host, every period copies (`fiddlex.simulate.streaming`).
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fiddlex.errors import ScheduleError
from fiddlex.schedules.columns import Columns
from fiddlex.schedules.lowering import Lowered
from fiddlex.schedules.schedule import Kind, Schedule
from fiddlex.schedules.ticks import SLOT_OF, SLOTS, fills_pairs
from fiddlex.schedules.weight_stream import WeightStream
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.streaming import Copies
from fiddlex.simulate.timeline import BUBBLE, Event, Timeline
from fiddlex.terminal.readable import counted

_SLOTS = np.asarray([SLOT_OF[kind] for kind in Kind])  # the slot of each kind, by the kind's number
_FORWARD, _BACKWARD, _WEIGHT = range(len(SLOTS))


def lockstep(lowered: Lowered, costs: Costs, stream: WeightStream | None = None) -> Timeline:
    """Steps through the ticks of a lowered schedule, in time linear in ticks × ranks.

    Args:
      lowered: the schedule on its ticks.
      costs: times of the actions, hops and copies; the timeline is in their unit.
      stream: when weights come from the host and gradients go there; None: they are on the devices.

    Raises:
      ScheduleError: when `costs` do not fit the stages.
    """
    columns, copies = Columns.of(lowered.schedule, lowered.ticks), Copies.of(stream) if stream else None
    times = TickWork.of_lowered(lowered, columns, copies).times(costs, copies)
    slots = _SLOTS[columns.kind]
    order = np.lexsort((slots, columns.tick, columns.rank))
    cells = slots[order], columns.tick[order], columns.rank[order]
    begins, ends = (times.starts[cells[1]] + moments[cells] for moments in (times.begins, times.ends))
    actions = [lowered.schedule.numbered[number] for number in order.tolist()]
    events = list(map(Event, actions, begins.tolist(), ends.tolist()))
    rows = (tuple(events[start:end]) for start, end in itertools.pairwise(lowered.schedule.starts))
    starts, ticks_end = tuple(times.starts.tolist()), float(times.starts[-1] + times.lengths[-1])
    return Timeline(lowered.schedule, tuple(rows), starts, times.makespan, ticks_end, times.shared)


def describe(lowered: Lowered, *, num_layers: Sequence[int], stream: WeightStream | None = None) -> str:
    """One line for a log: stages, ticks, bubble, and what a rank holds.

    The times of F, I and W are assumed proportional to `num_layers`, the number of layers of each stage.
    """
    layers = tuple(map(float, num_layers))
    bubble = lockstep(lowered, Costs(layers, layers, layers)).bubble_fraction
    schedule, fewest, most = lowered.schedule, min(num_layers), max(num_layers)
    sizes = f"{most} layer" if fewest == most else f"{fewest} to {most} layer"
    return (
        f"{schedule.name}: {counted(schedule.num_ranks, 'rank')}, {counted(schedule.num_stages, 'stage')} of "
        f"{sizes}{'s' * (most > 1)}, {counted(schedule.num_microbatches, 'microbatch', 'microbatches')} in "
        f"{counted(lowered.num_ticks, 'tick')}, bubble {bubble:.0%} ({BUBBLE}), "
        f"at most {lowered.stash_slots} forward passes of a stage stashed on a rank"
        + (f" and {lowered.host_stash_slots} on its host" if lowered.host_stash_slots else "")
        + (f", {stream.held_text(schedule.num_chunks)}" if stream else "")
    )


class TickTimes(NamedTuple):
    """When ticks and their slots start and end."""

    starts: np.ndarray  # of each tick, float [tick]
    lengths: np.ndarray  # from the start of each tick to that of the next, or of the last tick to its end, float [tick]
    begins: np.ndarray  # of each slot, counted from the start of its tick, float [slot, tick, rank]
    ends: np.ndarray  # of each slot, counted from the start of its tick, float [slot, tick, rank]
    makespan: float  # end of the last tick and of the copies after it
    shared: float  # total time in which all ranks embed and score


@dataclasses.dataclass(frozen=True)
class TickWork:
    """The work in each tick, independent of its costs."""

    num_stages: int
    scores_between: bool  # as in `Lowered`
    spills: bool  # whether every tick copies what a forward pass saves to the host and back
    rows: np.ndarray  # int [slot, tick, rank]: what the slot runs, as an index into `_durations`; 0: nothing
    edges: np.ndarray  # bool [3, tick]: whether a microbatch enters, leaves, or comes back as a gradient
    activations: np.ndarray  # messages of F, int [4, message]: tick, sending rank, receiving rank, sending stage
    # Messages of B and I in the same form; the tick is the one in which they travel, after the action's.
    gradients: np.ndarray

    @classmethod
    def of(cls, schedule: Schedule, columns: Columns, *, num_ticks: int, spills: bool) -> "TickWork":
        """The work of a schedule on ticks, in time linear in its actions; ticks that it does not have are idle."""
        rank, stage, kind, _, tick = columns
        last, placement = schedule.num_stages - 1, np.asarray(schedule.placement)
        rows = np.zeros((len(SLOTS), num_ticks, schedule.num_ranks), np.int64)
        rows[_SLOTS[kind], tick, rank] = 1 + len(Kind) * stage + kind
        forwards, inputs = columns.numbers(Kind.F), columns.numbers(Kind.B, Kind.I)
        edges = np.zeros((3, num_ticks), bool)
        for edge, numbers, outermost in zip(edges, (forwards, forwards, inputs), (0, last, 0), strict=True):
            edge[tick[numbers[stage[numbers] == outermost]]] = True
        messages = []
        for numbers, step in ((forwards, 1), (inputs, -1)):
            numbers = numbers[stage[numbers] != (last if step > 0 else 0)]
            receivers = placement[stage[numbers] + step]
            arrives = tick[numbers] + (step < 0)  # past the last tick if the pipeline is cut before its end
            sent = (receivers != rank[numbers]) & (arrives < num_ticks)
            messages.append(np.stack([arrives, rank[numbers], receivers, stage[numbers]])[:, sent])
        return cls(schedule.num_stages, fills_pairs(schedule), spills, rows, edges, *messages)

    @classmethod
    def of_lowered(cls, lowered: Lowered, columns: Columns, copies: Copies | None) -> "TickWork":
        num_ticks = copies.whole_periods(lowered.num_ticks) if copies else lowered.num_ticks
        return cls.of(lowered.schedule, columns, num_ticks=num_ticks, spills=lowered.host_stash_slots > 0)

    def times(self, costs: Costs, copies: Copies | None = None) -> TickTimes:
        """When ticks and slots start and end; raises ScheduleError if the costs do not fit the stages or ranks."""
        hops = np.asarray(costs.per_stage(self.num_stages)["hop"])
        lengths = self._shared(self._durations(costs)[self.rows], costs.sharing)
        begins, ends = np.zeros_like(lengths), np.zeros_like(lengths)
        embeds, scores, embeds_backward = self.edges[..., None]
        begins[_FORWARD] = costs.embed * embeds
        ends[_FORWARD] = begins[_FORWARD] + lengths[_FORWARD]
        copy = costs.spill if self.spills else 0.0
        spilled = np.maximum(ends[_FORWARD], copy)
        now = spilled.copy()
        if self.scores_between:
            now = np.where(scores, now.max(axis=1, keepdims=True) + costs.head, now)
        ticks, _, receivers, stages = self.gradients
        np.maximum.at(now, (ticks, receivers), hops[stages])
        begins[_BACKWARD], ends[_BACKWARD] = now, now + lengths[_BACKWARD]
        begins[_WEIGHT], ends[_WEIGHT] = ends[_BACKWARD], ends[_BACKWARD] + lengths[_WEIGHT]
        now = np.maximum(ends[_WEIGHT], spilled + copy)
        ticks, senders, receivers, stages = self.activations
        np.maximum.at(now, (ticks, receivers), spilled[ticks, senders] + hops[stages])
        shared = costs.embed * embeds + costs.head * scores + costs.embed_backward * embeds_backward
        at_end = costs.embed_backward * embeds_backward + (0.0 if self.scores_between else costs.head * scores)
        of_ticks = now.max(axis=1) + at_end[:, 0] + costs.tick
        first, last = 0.0, 0.0
        if copies:
            of_ticks = copies.lengthened(of_ticks, costs, spill=copy)
            first, last = copies.ends(costs)
        clock = np.cumsum([first, *of_ticks])
        return TickTimes(clock[:-1], of_ticks, begins, ends, float(clock[-1]) + last, float(shared.sum()))

    def _durations(self, costs: Costs) -> np.ndarray:
        """0, followed by the time of each kind on each stage, float [1 + stage × kind]."""
        durations = costs.durations(self.num_stages)
        return np.concatenate([[0.0], np.stack([durations[kind] for kind in Kind], axis=1).ravel()])

    def _shared(self, lengths: np.ndarray, sharing: Sequence[float]) -> np.ndarray:
        """The times of actions that other ranks slow down, from their times alone, float [slot, tick, rank]."""
        ranks = lengths.shape[-1]
        if not sharing:
            return lengths
        if len(sharing) < ranks:
            raise ScheduleError(
                f"costs: sharing has {len(sharing)} factors for {ranks} ranks: give one for each number of them."
            )
        if self.scores_between:
            return slowed_down(lengths, sharing)
        return np.where(lengths > 0, slowed_down(lengths.sum(axis=0), sharing), 0.0)


def slowed_down(lengths: np.ndarray, sharing: Sequence[float]) -> np.ndarray:
    """When each rank finishes if all ranks start together and share cores, float [..., rank]."""
    order = np.argsort(lengths, axis=-1)
    pieces = np.diff(np.take_along_axis(lengths, order, axis=-1), axis=-1, prepend=0.0)
    ends = np.cumsum(pieces * np.asarray(sharing)[lengths.shape[-1] - 1 :: -1], axis=-1)
    done = np.empty_like(lengths)
    np.put_along_axis(done, order, ends, axis=-1)
    return done
