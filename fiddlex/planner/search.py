"""An exact search for the best layouts of a model on a cluster, which evaluates only a small part of the space.

Each layout has a cheap lower bound on its score (for time and cost: `_least_seconds`). The search visits layouts in
ascending order of this bound. It ends when it has enough plans and the bound of the next layout is worse than the worst
of them. It checks whether each visited layout fits (`fiddlex.costs.memory`), then simulates it
(`closed_forms.batch_seconds`). Invariant: the plans are those that an evaluation of the whole space (`layouts`) would
give, up to ties.
"""

import bisect
import dataclasses
import functools
from collections.abc import Iterator
from typing import NamedTuple

from fiddlex.config import Config, MeshConfig, PipelineConfig
from fiddlex.costs.backend import backend_of
from fiddlex.costs.memory import Memory, device_memory
from fiddlex.costs.sizes import model_flops
from fiddlex.costs.weight_memory import WeightBytes, device_parameters, weight_bytes
from fiddlex.errors import ConfigError
from fiddlex.planner.closed_forms import Shape, batch_seconds, sizes, stage_ranks
from fiddlex.planner.cost_model import CostModel, MicrobatchTimes, StepTimes, Traffic
from fiddlex.planner.layouts import Layout, Problem, layouts, planned_prediction
from fiddlex.planner.predict import Prediction
from fiddlex.schedules.placement import LayerPlacement, place_layers


@dataclasses.dataclass(frozen=True)
class Plan:
    """A layout and the predictions for it.

    Attributes:
      layout: the layout.
      config: the config of the run with this layout.
      times: seconds of a microbatch's parts.
      step: seconds of the parts of a step outside the pipeline.
      memory: bytes on each device.
      step_time_s: seconds of a step.
      tflops_per_device: model operations per second and device, in units of 10¹², without recomputation.
      utilisation: share of the chip's peak in the model's dtype that the model operations reach.
      bubble: share of the step in which the rank with most layers waits.
      exposed_s: seconds of a step's communication that overlaps with no computation, by its purpose.
      usd_per_step: price of a step in USD; None: the topology has no price.
      traffic: what each axis sends over each link in a step.
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
    traffic: tuple[Traffic, ...]


class Need(NamedTuple):
    """A layout that does not fit, and its memory."""

    layout: Layout
    memory: Memory


class Found(NamedTuple):
    """The result of a search.

    Attributes:
      plans: the best plans, the best first; empty: no layout fits.
      space: number of layouts in the space.
      simulated: number of layouts that the search simulated.
      least: among visited layouts that do not fit, the one whose device and host lack least; None: no such layout.
    """

    plans: list[Plan]
    space: int
    simulated: int
    least: Need | None


def search(problem: Problem, *, keep: int = 5) -> Found:
    """Finds the best layouts.

    Args:
      problem: the problem to solve.
      keep: largest number of plans to return.

    Raises:
      ConfigError: when no layout divides the model over the devices, or the topology has no peak for the model's
        dtype.
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
        if memory.peak > problem.limit or memory.of_host > problem.host_limit:
            if least is None or _shortage(problem, memory) < _shortage(problem, least.memory):
                least = Need(entry.layout, memory)
            continue
        simulated += 1
        plan = space.plan(entry.layout, memory)
        bisect.insort(best, (score(problem.objective, plan), number, plan))
        del best[keep:]
    return Found([plan for *_, plan in best], len(entries), simulated, least)


def evaluate(problem: Problem, layout: Layout) -> Plan:
    """The predictions for one layout, whether it fits or not.

    Raises:
      ConfigError: when no link of the topology joins the layout's devices, or the topology has no peak for the
        model's dtype.
    """
    space = _Space(problem)
    return space.plan(layout, space.memory(layout))


def search_further(problem: Problem, *, keep: int = 5) -> tuple[Problem, Found]:
    """Finds the best layouts, with `optimizer.offload` where no layout fits without it.

    Args:
      problem: the problem to solve.
      keep: largest number of plans to return.

    Returns:
      The problem that was solved, in which the config has `optimizer.offload` if only that makes a layout fit, and the
      result.

    Raises:
      ConfigError: when `search` raises it.
    """
    found = search(problem, keep=keep)
    offloads = not found.plans and "sync" in problem.semantics and problem.topology.host is not None
    if offloads and not problem.config.optimizer.offload:
        further = search(problem.offloading, keep=keep)
        if further.plans:
            return problem.offloading, further
    return problem, found


def _shortage(problem: Problem, memory: Memory) -> tuple[int, int]:
    """Bytes that device and host lack together, and bytes that the device needs."""
    lacking = max(memory.of_host - problem.host_limit, 0) + max(memory.peak - problem.limit, 0)
    return lacking, memory.peak


Score = tuple[float, float]


def score(objective: str, plan: Plan) -> Score:
    """The value that the search minimizes, and the value that breaks ties."""
    if objective == "memory":
        return plan.memory.peak, plan.step_time_s
    return plan.step_time_s * (plan.layout.num_devices if objective == "cost" else 1), plan.memory.peak


class _Entry(NamedTuple):
    """A layout and a lower bound on its score, by which the search orders the layouts."""

    least: Score
    layout: Layout


class _Space:
    """The layouts of a problem, with a cache of shared results."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._models = {semantics: self._cost_model(semantics) for semantics in problem.semantics}
        self._backend = backend_of(problem.topology.compiler)
        self._microbatch_once, self._step_once = functools.cache(self._microbatch), functools.cache(self._step)
        self._weights_once, self._cut_once = functools.cache(self._weights), functools.cache(_Cut.of)
        self._memory_once = functools.cache(self._memory)

    def entries(self) -> Iterator[_Entry]:
        """All layouts with their lower bounds."""
        for layout in layouts(self.problem):
            yield _Entry(self._least(layout), layout)

    def _least(self, layout: Layout) -> Score:
        if self.problem.objective == "memory":
            return float(self.memory(layout).peak), 0.0
        cut, (times, step) = self.cut(layout), self.times(layout)
        devices = layout.num_devices if self.problem.objective == "cost" else 1
        return (_least_seconds(layout, cut, times) + sum(step)) * devices, 0.0

    def times(self, layout: Layout) -> tuple[MicrobatchTimes, StepTimes]:
        """Seconds of a layout's microbatch, and of its step outside the pipeline."""
        outermost = layout.outermost
        return self._microbatch_once(
            *layout[:4], layout.num_microbatches, layout.recompute, outermost, layout.collective_matmul
        ), self._step_once(*layout[:3], self.cut(layout).rows, layout.semantics, outermost)

    def memory(self, layout: Layout) -> Memory:
        """Bytes that a layout takes on each device, whichever axis is outermost."""
        return self._memory_once(layout._replace(outermost="data"))

    def _memory(self, layout: Layout) -> Memory:
        config, cut = layout.applied(self.problem.config), self.cut(layout)
        weights = self._weights_once(*layout[:3], cut.rows)
        shape = layout.shape._replace(spills=config.pipeline.spills)
        return device_memory(config, sizes(shape), cut.placement, self._backend, weights=weights)

    def cut(self, layout: Layout) -> "_Cut":
        """The placement of a layout's layers on stages."""
        return self._cut_once(layout.schedule, layout.pipe, layout.chunks, self.problem.config.model.num_layers)

    def plan(self, layout: Layout, memory: Memory) -> Plan:
        """The predictions for a layout that takes `memory`."""
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
            traffic=self._models[layout.semantics].traffic(
                config.mesh,
                placement=cut.placement,
                num_microbatches=m,
                recompute=layout.recompute,
                num_parameters=device_parameters(config, cut.rows),
            ),
        )

    def _cost_model(self, semantics: str) -> CostModel:
        config = self.problem.config
        stash_dtype = config.pipeline.stash_dtype
        pipeline = PipelineConfig(semantics=semantics, stash_dtype=stash_dtype, **planned_prediction(config, semantics))
        config = dataclasses.replace(config, pipeline=pipeline)
        return CostModel(config, self.problem.topology, efficiency=self.problem.efficiency)

    def _microbatch(
        self,
        data: int,
        pipe: int,
        tensor: int,
        sequence_parallel: bool,
        num_microbatches: int,
        recompute: str,
        outermost: str,
        collective_matmul: bool,
    ) -> MicrobatchTimes:
        mesh = MeshConfig(data, pipe, tensor, sequence_parallel, outermost, collective_matmul)
        model = self._models[self.problem.semantics[0]]  # microbatches take equal times under all semantics
        return model.microbatch(mesh, num_microbatches=num_microbatches, recompute=recompute)

    def _weights(self, data: int, pipe: int, tensor: int, rows: int) -> WeightBytes:
        config = dataclasses.replace(self.problem.config, mesh=MeshConfig(data, pipe, tensor))
        return weight_bytes(config, rows, self._backend)

    def _step(self, data: int, pipe: int, tensor: int, rows: int, semantics: str, outermost: str) -> StepTimes:
        mesh = MeshConfig(data, pipe, tensor, outermost=outermost)
        number = device_parameters(dataclasses.replace(self.problem.config, mesh=mesh), rows)
        return self._models[semantics].step(mesh, num_parameters=number)


class _Cut(NamedTuple):
    """The placement of layers on stages, with the counts that the search needs.

    Attributes:
      placement: the placement of the layers.
      rows: number of rows of a stacked weight on each rank.
      most: number of layers on the rank that has most.
      last: number of layers on the last rank.
      before: number of layers in the first `pipe` − 1 stages.
    """

    placement: LayerPlacement
    rows: int
    most: int
    last: int
    before: int

    @classmethod
    def of(cls, schedule: str, pipe: int, chunks: int, num_layers: int) -> "_Cut":
        """The cut for a schedule with `pipe` ranks and `chunks` stages on each."""
        placement = place_layers(stage_ranks(Shape(schedule, pipe, chunks, pipe)), num_layers)
        layers = placement.layers_per_stage
        work = [sum(layers[stage] for stage in stages) for stages in placement.chunks]
        return cls(placement, placement.rows_per_rank, max(work), work[-1], sum(layers[: pipe - 1]))


def _least_seconds(layout: Layout, cut: _Cut, times: MicrobatchTimes) -> float:
    """A lower bound on the seconds of a batch, for any order of its work.

    The rank with most layers processes all microbatches, and all ranks take part in the embedding and head of each. In
    a pipeline that is flushed, the last rank is also idle until the first microbatch reaches it, and from the end of
    its last backward pass until the first rank has run that microbatch's backward pass. Where the schedule splits
    backward passes, W fills this second gap.
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
        if problem.config.optimizer.offload:
            return (
                f"optimizer.offload=true with semantics {', '.join(problem.semantics)} alone: without a flush the "
                "planner predicts weights, which needs all of them on the devices at once. Allow sync too "
                "(--semantics), or set optimizer.offload=false."
            )
        return (
            f"{problem.num_devices} devices and data.global_batch_size={batch} have no layout with semantics "
            f"{', '.join(problem.semantics)} alone: these need at least two ranks and as many "
            "microbatches as ranks. Allow sync too (--semantics)."
        )
    return (
        f"{problem.num_devices} devices cannot be a mesh for model.num_heads={model.num_heads}, model.num_layers="
        f"{model.num_layers} and data.global_batch_size={batch}: their number must be data × pipe × tensor, where data "
        "divides the batch, tensor divides the heads, and each pipe rank has a layer. Use another number of devices, "
        "or another batch (--global_batch_size)."
    )
