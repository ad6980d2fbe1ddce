"""The free-running clock: what a schedule costs when every rank starts an action as soon as it can.

The papers' figures and formulas use this clock; `lockstep` is the clock of the executor's ticks. A rank runs one action
at a time, in its order; a hop to the neighbouring rank takes time but keeps no rank busy. Invariant: no action can
start earlier unless the order on a rank changes.
"""

import dataclasses
import itertools
from typing import Any

from fiddlex.config.rules import nearest
from fiddlex.errors import ScheduleError
from fiddlex.schedules.schedule import NOTHING, Kind, Schedule, execution_order
from fiddlex.schedules.validate import validate
from fiddlex.simulate.timeline import Event, Timeline

_SINGLE = ("embed", "head", "embed_backward", "tick", "load", "store", "spill")  # times that belong to no stage
_UNUSUAL = ("tick", "load", "store", "spill", "sharing")
MOST = 1e100  # the largest time allowed, so that sums of times stay finite
_FORM = "Write forward=1,hop=0.1, or forward=1:1:2 with a time for each stage."


@dataclasses.dataclass(frozen=True)
class Costs:
    """Time of each kind of action, in any unit: one number for all stages, or one for each stage.

    The defaults are the papers' unit costs: a backward pass takes twice as long as a forward, half for I and half for
    W, and nothing else takes time. `embed`, `head` and `embed_backward` are one number each: in the lockstep clock all
    ranks do that work together, as in the executor; in the free-running clock the rank of the first or last stage does
    it. Only the lockstep clock uses the fields from `tick` on.
    """

    forward: float | tuple[float, ...] = 1.0
    backward_input: float | tuple[float, ...] = 1.0
    backward_weight: float | tuple[float, ...] = 1.0
    hop: float | tuple[float, ...] = 0.0  # a message from the stage to another rank, in either direction
    embed: float = 0.0  # embedding a microbatch that enters the first stage
    head: float = 0.0  # loss of a microbatch that leaves the last stage, and the loss's gradient
    embed_backward: float = 0.0  # embedding's backward for a gradient that leaves the first stage
    tick: float = 0.0  # every tick, in addition to the work in it
    load: float = 0.0  # the weights of a row, which is a layer or padding, come from the host (`weight_stream`)
    store: float = 0.0  # the gradients of a row go to the host
    spill: float = 0.0  # what the forward pass of a stage saves goes to the host, or comes back (`lowering`)
    # Factors by which actions slow down while 1, 2, … ranks are active, if fake devices share cores; empty: they do not
    sharing: tuple[float, ...] = ()

    def __str__(self) -> str:
        """All times, to six digits, in the form that `parse` reads; those from `tick` on only if they are not 0."""
        times = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        rows = {
            name: time if isinstance(time, tuple) else (time,)
            for name, time in times.items()
            if time or name not in _UNUSUAL
        }
        return ",".join(f"{name}={':'.join(f'{time:g}' for time in row)}" for name, row in rows.items())

    def per_stage(self, num_stages: int) -> dict[str, tuple[float, ...]]:
        """The times of actions and hops, each as a tuple with one time for each stage.

        Raises:
          ScheduleError: when a tuple's length is not `num_stages`, or a time is negative or not finite.
        """
        times = {}
        self._check_range()
        for field in dataclasses.fields(self):
            name, value = field.name, getattr(self, field.name)
            if name == "sharing":
                continue
            row = value if isinstance(value, tuple) else (value,) * num_stages
            if name in _SINGLE and isinstance(value, tuple):
                raise ScheduleError(f"costs: {name} has {len(value)} times: it belongs to no stage, give a single one.")
            if len(row) != num_stages:
                raise ScheduleError(
                    f"costs: {name} has {len(row)} times for {num_stages} stages: "
                    "give one for each stage, or a single number for all."
                )
            if name not in _SINGLE:
                times[name] = row
        return times

    def _check_range(self) -> None:
        if not all(0 < factor <= MOST for factor in self.sharing):
            raise ScheduleError(f"costs: sharing={self.sharing} must be above 0 and at most {MOST:g}.")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not all(0 <= time <= MOST for time in (value if isinstance(value, tuple) else (value,))):
                raise ScheduleError(f"costs: {field.name}={value} must be at least 0 and at most {MOST:g}.")

    def durations(self, num_stages: int) -> dict[Kind, tuple[float, ...]]:
        """The time of each kind of action on each stage, B as long as I and W; raises what `per_stage` raises."""
        times = self.per_stage(num_stages)
        inputs, weights = times["backward_input"], times["backward_weight"]
        whole = tuple(map(sum, zip(inputs, weights, strict=True)))
        return {Kind.F: times["forward"], Kind.B: whole, Kind.I: inputs, Kind.W: weights}

    @classmethod
    def parse(cls, text: str) -> "Costs":
        """Parses `forward=1,hop=0.1`, or `forward=1:1:2` with one time for each stage; other times keep their defaults.

        Raises:
          ScheduleError: on an unknown or repeated name, or a time that is not a number, negative or too large.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            name, _, value = (part.strip() for part in item.partition("="))
            if name not in names:
                raise ScheduleError(f"costs: there is no {name!r}. {nearest(name, names)} {_FORM}")
            if name in values:
                raise ScheduleError(f"costs: {name} is given twice. {_FORM}")
            try:
                times = tuple(map(float, value.split(":")))
            except ValueError:
                raise ScheduleError(f"costs: {item.strip()!r} gives no time. {_FORM}") from None
            values[name] = times if len(times) > 1 or name == "sharing" else times[0]
        costs = cls(**values)
        costs._check_range()
        return costs


def free_running(schedule: Schedule, costs: Costs) -> Timeline:
    """Runs a legal schedule, each action as soon as its rank is free and what it needs has arrived.

    Times are in the unit of `costs`. The runtime is linear in the number of actions.

    Raises:
      ScheduleError: when `costs` do not fit the stages, or the schedule cannot run to its end.
    """
    durations, hops = _with_edges(costs, schedule.num_stages), costs.per_stage(schedule.num_stages)["hop"]
    actions, neighbour, placement = schedule.numbered, schedule.needs.neighbour, schedule.placement
    lengths = [durations[kind][stage] for stage, kind, _ in actions]
    delays = [
        hops[actions[need].stage] if need != NOTHING and placement[actions[need].stage] != placement[stage] else 0.0
        for need, (stage, _, _) in zip(neighbour, actions, strict=True)
    ]
    starts, ends = [0.0] * len(actions), [0.0] * (len(actions) + 2)  # plus MISSING and NOTHING
    free, left = [0.0] * schedule.num_ranks, len(actions)
    for rank, number in execution_order(schedule):
        # What an action needs of its own stage has already ended on the same rank.
        starts[number] = start = max(free[rank], ends[neighbour[number]] + delays[number])
        free[rank] = ends[number] = start + lengths[number]
        left -= 1
    if left:
        validate(schedule)  # shows where it stalls
    spans = itertools.pairwise(schedule.starts)
    rows = (tuple(map(Event, row, starts[a:b], ends[a:b])) for row, (a, b) in zip(schedule.actions, spans, strict=True))
    return Timeline(schedule, tuple(rows))


def _with_edges(costs: Costs, num_stages: int) -> dict[Kind, tuple[float, ...]]:
    """Durations that include embedding in the first stage's actions, and scoring in the last stage's forward."""
    durations = {kind: list(times) for kind, times in costs.durations(num_stages).items()}
    durations[Kind.F][0] += costs.embed
    durations[Kind.F][-1] += costs.head
    for kind in (Kind.B, Kind.I):
        durations[kind][0] += costs.embed_backward
    return {kind: tuple(times) for kind, times in durations.items()}
