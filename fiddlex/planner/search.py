"""The best of all layouts of a model on a cluster: exact over the whole space, most of which is never looked at.

Each layout has a time that no schedule can beat (`_least_seconds`), which takes microseconds; layouts are taken in the
order of that, and the search ends when the next could not be among the best even so. What is taken is asked whether it
fits (`fiddlex.costs.memory`), then simulated (`shapes.batch_seconds`). Invariant: the plans are those that evaluating
the whole space (`layouts`) would give, up to ties.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from fiddlex.config import Config, MeshConfig
from fiddlex.costs.backend import backend_of
from fiddlex.costs.memory import Memory, device_memory
from fiddlex.costs.sizes import model_flops
from fiddlex.costs.weight_memory import WeightBytes, device_parameters, weight_bytes
from fiddlex.errors import ConfigError
from fiddlex.planner.closed_forms import Shape, batch_seconds, sizes, stage_ranks
from fiddlex.planner.cost_model import CostModel, MicrobatchTimes, StepTimes
from fiddlex.planner.layouts import Layout, Problem, layouts
from fiddlex.planner.predict import Prediction
from fiddlex.schedules.placement import LayerPlacement, place_layers


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout and what is predicted of it.

    Attributes:
      layout: the layout.
      config: that has it.
      times: of a microbatch.
      step: of what is done once a step.
      memory: of each device.
      step_time_s: of a step.
      tflops_per_device: model operations a second, 10¹², nothing computed again counted.
      utilisation: of the chip's peak in the model's dtype.
      bubble: share of the step in which a rank waits for others.
      exposed_s: seconds of a step that are communication beside nothing, by what for.
      usd_per_step: None where the topology has no price.
    """

    layout: Layout
    config: Config
    times: MicrobatchTimes
    step: StepTimes
    memory: Memory
    step_time_s: float
    tflops_per_device: float
    utilisation: float
    bubble: float
    exposed_s: dict[str, float]
    usd_per_step: float | None


class Need(NamedTuple):
    """The least memory that any layout takes."""

    layout: Layout
    memory: Memory


class Found(NamedTuple):
    """The end of a search.

    Attributes:
      plans: the best first; empty when nothing fits.
      space: layouts there are.
      simulated: layouts that were simulated.
      least: of all layouts that were asked whether they fit and did not, the one that needs least.
    """

    plans: list[Plan]
    space: int
    simulated: int
    least: Need | None


def search(problem: Problem, *, keep: int = 5) -> Found:
    """Finds the best layouts.

    Args:
      problem: what is searched for.
      keep: plans to give at most.

    Raises:
      ConfigError: when the model cannot be cut for so many devices at all, or the topology has no peak for its dtype.
    """
    space = _Space(problem)
    entries = sorted(space.entries(), key=lambda entry: entry.least)
    if not entries:
        raise ConfigError(_uncuttable(problem))
    best: list[tuple[Score, int, Plan]] = []
    least: Need | None = None
    simulated = 0
    for number, entry in enumerate(entries):
        if len(best) == keep and entry.least > best[-1][0]:
            break
        memory = space.memory(entry.layout)
        if memory.peak > problem.limit:
            if least is None or memory.peak < least.memory.peak:
                least = Need(entry.layout, memory)
            continue
        simulated += 1
        plan = space.plan(entry.layout, memory)
        bisect.insort(best, (score(problem.objective, plan), number, plan))
        del best[keep:]
    return Found([plan for *_, plan in best], len(entries), simulated, least)


def evaluate(problem: Problem, layout: Layout) -> Plan:
    """What is predicted of one layout, whether it fits or not.

    Raises:
      ConfigError: when the topology does not join its devices, or has no peak for the dtype.
    """
    space = _Space(problem)
    return space.plan(layout, space.memory(layout))


Score = tuple[float, float]


def score(objective: str, plan: Plan) -> Score:
    """What is to be least, and what decides between equals."""
    if objective == "memory":
        return plan.memory.peak, plan.step_time_s
    return plan.step_time_s * (plan.layout.num_devices if objective == "cost" else 1), plan.memory.peak


class _Entry(NamedTuple):
    """A layout, and what it is to be taken in the order of: its score is at least that."""

    least: Score
    layout: Layout


class _Space:
    """The layouts of a problem, with what they share reckoned once."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._model = CostModel(problem.config, problem.topology, efficiency=problem.efficiency)
        self._backend = backend_of(problem.topology.compiler)
        self._microbatch_once, self._step_once = functools.cache(self._microbatch), functools.cache(self._step)
        self._weights_once, self._cut_once = functools.cache(self._weights), functools.cache(_Cut.of)

    def entries(self) -> Iterator[_Entry]:
        """All layouts."""
        for layout in layouts(self.problem):
            yield _Entry(self._least(layout), layout)

    def _least(self, layout: Layout) -> Score:
        if self.problem.objective == "memory":
            return float(self.memory(layout).peak), 0.0
        cut, (times, step) = self.cut(layout), self.times(layout)
        devices = layout.num_devices if self.problem.objective == "cost" else 1
        return (_least_seconds(layout, cut, times) + sum(step)) * devices, 0.0

    def times(self, layout: Layout) -> tuple[MicrobatchTimes, StepTimes]:
        """Of the parts of a step."""
        return self._microbatch_once(*layout[:4], layout.num_microbatches, layout.recompute), self._step_once(
            *layout[:3], self.cut(layout).rows
        )

    def memory(self, layout: Layout) -> Memory:
        """Of each device."""
        config, cut = layout.applied(self.problem.config), self.cut(layout)
        weights = self._weights_once(*layout[:3], cut.rows)
        return device_memory(config, sizes(layout.shape), cut.placement, self._backend, weights=weights)

    def cut(self, layout: Layout) -> "_Cut":
        """Its layers on stages."""
        return self._cut_once(layout.schedule, layout.pipe, layout.chunks, self.problem.config.model.num_layers)

    def plan(self, layout: Layout, memory: Memory) -> Plan:
        """What is predicted of a layout."""
        problem, cut, (times, step) = self.problem, self.cut(layout), self.times(layout)
        config, costs = layout.applied(problem.config), times.costs(cut.placement)
        pipeline_s = batch_seconds(layout.shape, costs)
        step_s, m = Prediction(pipeline_s, step).seconds, layout.num_microbatches
        hops_s = pipeline_s - batch_seconds(layout.shape, dataclasses.replace(costs, hop=0.0))
        busy_s = m * (cut.most * times.layer + times.edges)
        flops = model_flops(config) / step_s / layout.num_devices
        price = problem.topology.price
        return Plan(
            layout,
            config,
            times,
            step,
            memory,
            step_s,
            tflops_per_device=flops / 1e12,
            utilisation=flops / problem.topology.chip.peak(config.model.dtype),
            bubble=max(pipeline_s - busy_s - hops_s, 0.0) / step_s,
            exposed_s={
                "tensor": m * cut.most * times.exchange,
                "vocabulary": m * times.edge_exchange,
                "pipe": max(hops_s, 0.0),
                "data": step.reduce + step.gather,
            },
            usd_per_step=price.usd_per_device_hour * layout.num_devices * step_s / 3600 if price else None,
        )

    def _microbatch(
        self, data: int, pipe: int, tensor: int, sequence_parallel: bool, num_microbatches: int, recompute: str
    ) -> MicrobatchTimes:
        mesh = MeshConfig(data, pipe, tensor, sequence_parallel)
        return self._model.microbatch(mesh, num_microbatches=num_microbatches, recompute=recompute)

    def _weights(self, data: int, pipe: int, tensor: int, rows: int) -> WeightBytes:
        config = dataclasses.replace(self.problem.config, mesh=MeshConfig(data, pipe, tensor))
        return weight_bytes(config, rows, self._backend)

    def _step(self, data: int, pipe: int, tensor: int, rows: int) -> StepTimes:
        mesh = MeshConfig(data, pipe, tensor)
        number = device_parameters(dataclasses.replace(self.problem.config, mesh=mesh), rows)
        return self._model.step(mesh, num_parameters=number)


class _Cut(NamedTuple):
    """Layers on stages.

    Attributes:
      placement: of the layers.
      rows: that each rank has of a stacked weight.
      most: layers of the fullest rank.
      last: of the last rank.
      before: of the first stage of each other rank, together.
    """

    placement: LayerPlacement
    rows: int
    most: int
    last: int
    before: int

    @classmethod
    def of(cls, schedule: str, pipe: int, chunks: int, num_layers: int) -> "_Cut":
        """For a schedule with so many ranks and stages on each."""
        placement = place_layers(stage_ranks(Shape(schedule, pipe, chunks, pipe)), num_layers)
        layers = placement.layers_per_stage
        work = [sum(layers[stage] for stage in stages) for stages in placement.chunks]
        return cls(placement, placement.rows_per_rank, max(work), work[-1], sum(layers[: pipe - 1]))


def _least_seconds(layout: Layout, cut: _Cut, times: MicrobatchTimes) -> float:
    """What no order of a batch's work can beat.

    The rank with most layers works for all microbatches, and all ranks embed and score each. A pipeline that drains is
    idle besides on its last rank until the first microbatch has come there, and after the last one has left it until
    the first rank has run it backwards; where backward passes are split, W fills the latter.
    """
    m = layout.num_microbatches
    least = m * (cut.most * times.layer + times.edges)
    if layout.semantics == "sync":
        whole = not layout.shape.traits.splits_backward
        idle = times.forward + (times.backward_input + times.backward_weight) * whole
        least = max(least, m * (cut.last * times.layer + times.head) + cut.before * idle)
    return least


def _uncuttable(problem: Problem) -> str:
    model, batch = problem.config.model, problem.config.data.global_batch_size
    if "sync" not in problem.semantics and any(layouts(dataclasses.replace(problem, semantics=("sync",)))):
        return (
            f"{problem.num_devices} devices and data.global_batch_size={batch} have no layout with semantics "
            f"{', '.join(problem.semantics)} alone, which take a pipeline of two ranks or more with as many "
            "microbatches. Allow sync too (--semantics)."
        )
    return (
        f"{problem.num_devices} devices cannot be a mesh for model.num_heads={model.num_heads}, model.num_layers="
        f"{model.num_layers} and data.global_batch_size={batch}: their number must be data × pipe × tensor, where data "
        "divides the batch, tensor divides the heads, and each pipe rank has a layer. Use another number of devices, "
        "or another batch (--global_batch_size)."
    )
