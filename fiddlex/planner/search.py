"""An exact search for the best layouts of a model on a cluster, which evaluates only a small part of the space.

The search visits layouts in ascending order of a cheap lower bound on their scores (for time and cost:
`fiddlex.planner.bound`). It ends when it has enough plans and the bound of the next layout is worse than the worst of
them. Invariant: the plans are those that an evaluation of the whole space (`layouts`) would give, up to ties.
"""

import bisect
import contextlib
import dataclasses
import functools
import gc
import heapq
import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

from fiddlex.config import MeshConfig
from fiddlex.config.overrides import replaced
from fiddlex.config.sections import AXES
from fiddlex.costs.backend import backend_of
from fiddlex.costs.memory import Memory, device_memory
from fiddlex.costs.weight_memory import WeightBytes, device_parameters, weight_bytes
from fiddlex.errors import ConfigError
from fiddlex.planner.bound import Cut, least_seconds
from fiddlex.planner.closed_forms import Shape, batch_seconds, sizes
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Group, Layout, Problem, groups, layouts, planned_pipeline, schedules, why_missing
from fiddlex.planner.plans import Plan, Score, plan_of, score
from fiddlex.planner.times import MicrobatchTimes, StepTimes
from fiddlex.schedules.generators import generator_of
from fiddlex.schedules.weight_stream import FEWEST_CHUNKS
from fiddlex.terminal.readable import counted

# Share by which a bound that equals the time may exceed it, since sums are rounded. Where copies to and from the host
# take longest, many layouts take the same time, and the one that needs least memory is to be found.
_ROUNDING = 1e-12


class Need(NamedTuple):
    """A layout that does not fit, and its memory."""

    layout: Layout
    memory: Memory


class Found(NamedTuple):
    """The result of a search."""

    plans: list[Plan]  # the best first; empty: no layout fits
    space: int  # number of layouts
    simulated: int  # number of layouts that the search simulated
    # of visited layouts that do not fit, the one whose device and host lack least; None: no such layout
    least: Need | None


@contextlib.contextmanager
def _without_collections() -> Iterator[None]:
    """Pauses Python's search for cycles of garbage, which would visit all entries again each time they have grown."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_without_collections()
def search(problem: Problem, *, keep: int = 5) -> Found:
    """Finds the `keep` best layouts, or as many as fit.

    Raises:
      ConfigError: when no layout divides the model over the devices, the topology has no peak for the model's dtype, or
        the compiler or another setting of the config rules out that the layers' weights wait on the host.
    """
    _check_streams(problem)
    space = _Space(problem)
    size = sum(len(group.pipelines) * group.combinations for group in groups(problem))
    if not size:
        raise ConfigError(_uncuttable(problem))
    best: list[tuple[Score, int, Plan]] = []
    least: Need | None = None
    simulated = 0
    for number, entry in enumerate(space.entries()):
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
    return Found([plan for *_, plan in best], size, simulated, least)


def evaluate(problem: Problem, layout: Layout) -> Plan:
    """The predictions for one layout, whether it fits or not.

    Raises:
      ConfigError: when no link joins the layout's devices, or the topology has no peak for the model's dtype.
    """
    space = _Space(problem)
    return space.plan(layout, space.memory(layout))


def search_further(problem: Problem, *, keep: int = 5) -> tuple[Problem, Found]:
    """The first problem for which a layout fits, and its best layouts; if none does, the problem as it is.

    It searches as the config says, then with `optimizer.offload`, then with the layers' weights on hosts too, then with
    the stash there too.
    """
    found = search(problem, keep=keep)
    if found.plans:
        return problem, found
    for further in further_problems(problem):
        result = search(further, keep=keep)
        if result.plans:
            return further, result
    return problem, found


def further_problems(problem: Problem) -> Iterator[Problem]:
    """The problem with more on the hosts, first with `optimizer.offload`, where that has layouts."""
    seen = [problem.config]
    for further in problem.further.values():
        if further.config not in seen and any(layouts(further)):
            seen.append(further.config)
            yield further


def _shortage(problem: Problem, memory: Memory) -> tuple[int, int]:
    """Bytes that device and host lack together, and bytes that the device needs."""
    lacking = max(memory.of_host - problem.host_limit, 0) + max(memory.peak - problem.limit, 0)
    return lacking, memory.peak


class _Entry(NamedTuple):
    """A layout and a lower bound on its score, by which the search orders the layouts."""

    least: Score
    layout: Layout


class _Alike(NamedTuple):
    """The layouts of a group with one of its pipelines."""

    layouts: Callable[[], Iterator[Layout]]
    semantics: str
    cut: Cut
    seconds: Callable[[MicrobatchTimes], float]  # `least_seconds`


class _Space:
    """The layouts of a problem, with a cache of shared results."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._models = {semantics: self._cost_model(semantics) for semantics in problem.semantics}
        self._own = {name for name, traits in schedules(problem) if traits.slots is None}
        self._backend = backend_of(problem.topology.compiler)
        # By mesh, and then by the rest: of a layout's key, the mesh takes longest to look up.
        self._times_once, self._steps_once = functools.cache(self._times_on), functools.cache(self._steps)
        self._weights_once, self._cut_once = functools.cache(self._weights), functools.cache(Cut.of)
        self._memory_once = functools.cache(self._memory)

    def entries(self) -> Iterator[_Entry]:
        """All layouts in ascending order of their bounds, those with equal bounds in the order of `layouts`.

        Layouts of the same group and pipeline have a common bound; each gets its own when no bound is smaller.
        """
        waiting: list[tuple[Score, int, _Alike | Layout]] = []
        number = 0
        for group in groups(self.problem):
            common_bound = self._common_bound(group)
            for pipeline in group.pipelines:
                alike = self._alike(group, pipeline)
                waiting.append((common_bound(alike), number, alike))
                number += group.combinations
        heapq.heapify(waiting)
        while waiting:
            least, number, found = heapq.heappop(waiting)
            if isinstance(found, Layout):
                yield _Entry(least, found)
                continue
            for own, layout in enumerate(found.layouts(), number):
                heapq.heappush(waiting, (self._bound(layout, found), own, layout))

    def _alike(self, group: Group, pipeline: tuple[str, int, str]) -> _Alike:
        layouts_of = functools.partial(group.layouts, *pipeline)
        first = next(layouts_of())
        cut = self.cut(first)
        return _Alike(layouts_of, first.semantics, cut, least_seconds(self.shape(first), cut))

    def _common_bound(self, group: Group) -> Callable[[_Alike], Score]:
        """A lower bound on the scores of the group's layouts that share a pipeline."""
        if self.problem.objective == "memory":
            return lambda alike: (0.0, 0.0)
        on_meshes = [self._times_once(mesh) for mesh in group.meshes]
        times = [
            microbatch(group.num_microbatches, recompute)
            for (microbatch, _), recompute in itertools.product(on_meshes, group.recompute)
        ]
        shortest = MicrobatchTimes(*map(min, zip(*times, strict=True)))

        def bound(alike: _Alike) -> Score:
            step_s = min(sum(step(alike.cut.rows, alike.semantics)) for _, step in on_meshes)
            return self._at_least(alike.seconds(shortest) + step_s, group.meshes[0])

        return bound

    def _bound(self, layout: Layout, alike: _Alike) -> Score:
        if self.problem.objective == "memory":
            return float(self.memory(layout).peak), 0.0
        times, step = self.times(layout, alike.cut)
        return self._at_least(alike.seconds(times) + sum(step), layout.mesh)

    def _at_least(self, seconds: float, mesh: MeshConfig) -> Score:
        devices = mesh.num_devices if self.problem.objective == "cost" else 1
        return seconds * (1 - _ROUNDING) * devices, 0.0

    def times(self, layout: Layout, cut: Cut) -> tuple[MicrobatchTimes, StepTimes]:
        microbatch, step = self._times_once(layout.mesh)
        return microbatch(layout.num_microbatches, layout.recompute), step(cut.rows, layout.semantics)

    def memory(self, layout: Layout) -> Memory:
        """Bytes that a layout takes on each device, whichever axis is outermost."""
        return self._memory_once(layout._replace(mesh=layout.mesh.along(*AXES)))

    def _memory(self, layout: Layout) -> Memory:
        config, cut = layout.applied(self.problem.config), self.cut(layout)
        weights = self._weights_once(layout.mesh.plain, cut.rows)
        return device_memory(config, sizes(self.shape(layout)), cut.placement, self._backend, weights=weights)

    def shape(self, layout: Layout) -> Shape:
        """The shape of a layout's pipeline, with what waits on the host."""
        pipeline = self.problem.config.pipeline
        if not (pipeline.spills or pipeline.by_chunk):
            return layout.shape
        streamed = self.cut(layout).placement.rows_per_chunk * pipeline.by_chunk
        return layout.shape._replace(spills=pipeline.spills, streamed=streamed)

    def cut(self, layout: Layout) -> Cut:
        layers = self.problem.config.model.num_layers
        number = layout.num_microbatches if layout.schedule in self._own else None
        return self._cut_once(layout.schedule, layout.mesh.pipe, layout.chunks, layers, number)

    def plan(self, layout: Layout, memory: Memory) -> Plan:
        config, cut = layout.applied(self.problem.config), self.cut(layout)
        seconds, model = functools.partial(batch_seconds, self.shape(layout)), self._models[layout.semantics]
        return plan_of(self.problem, layout, config, cut.placement, *self.times(layout, cut), memory, seconds, model)

    def _cost_model(self, semantics: str) -> CostModel:
        config = dataclasses.replace(self.problem.config, pipeline=planned_pipeline(self.problem.config, semantics))
        return CostModel(config, self.problem.topology, efficiency=self.problem.efficiency)

    def _times_on(
        self, mesh: MeshConfig
    ) -> tuple[Callable[[int, str], MicrobatchTimes], Callable[[int, str], StepTimes]]:
        """The times of a microbatch, by number and recomputation, and those of a step, by rows and semantics."""
        model = self._models[self.problem.semantics[0]]  # microbatches take equal times under all semantics

        @functools.cache
        def microbatch(number: int, recompute: str) -> MicrobatchTimes:
            return model.microbatch(mesh, num_microbatches=number, recompute=recompute)

        return microbatch, self._steps_once(mesh.plain)

    def _weights(self, mesh: MeshConfig, rows: int) -> WeightBytes:
        return weight_bytes(dataclasses.replace(self.problem.config, mesh=mesh), rows, self._backend)

    def _steps(self, mesh: MeshConfig) -> Callable[[int, str], StepTimes]:
        config = dataclasses.replace(self.problem.config, mesh=mesh)

        @functools.cache
        def step(rows: int, semantics: str) -> StepTimes:
            streamed_rows = rows * config.pipeline.by_chunk
            number = device_parameters(config, rows)
            return self._models[semantics].step(mesh, num_parameters=number, streamed_rows=streamed_rows)

        return step


def _check_streams(problem: Problem) -> None:
    """Raises ConfigError when a config whose layers' weights wait on the host has no valid layout."""
    if not problem.config.pipeline.streams:
        return
    if layout := next(layouts(problem), None):
        layout.applied(problem.config).validate()
        return
    refused = problem.refused_width(problem.num_devices)
    of_any_width = dataclasses.replace(problem, config=replaced(problem.config, {"optimizer.zero1": False}))
    if refused and any(layouts(of_any_width)):
        raise ConfigError(refused)


def _uncuttable(problem: Problem) -> str:
    model, batch = problem.config.model, problem.config.data.global_batch_size
    if problem.schedules and any(layouts(dataclasses.replace(problem, schedules=()))):
        pipe = next((number for number in range(2, problem.num_devices + 1) if problem.num_devices % number == 0), 2)
        name = problem.schedules[0]
        if told := why_missing(name, generator_of(name), pipe, 1, batch):
            told = f" With pipe={pipe}, chunks=1 and num_microbatches={batch}: {told}"
        return (
            f"--schedule={','.join(problem.schedules)}: no layout of {counted(problem.num_devices, 'device')} and "
            f"data.global_batch_size={batch} has such a schedule under {', '.join(problem.semantics)}.{told} The ranks "
            "must divide the devices, and the microbatches the examples of a replica; schedules without traits run "
            "with a flush (sync). fiddlex schedule --name=… tells for which sizes it exists."
        )
    if "sync" not in problem.semantics and any(layouts(dataclasses.replace(problem, semantics=("sync",)))):
        if problem.config.optimizer.offload:
            return (
                f"optimizer.offload=true with semantics {', '.join(problem.semantics)} alone: without a flush the "
                "planner predicts weights, which needs all of them on the devices at once. Allow sync too "
                "(--semantics), or set optimizer.offload=false."
            )
        return (
            f"{counted(problem.num_devices, 'device')} and data.global_batch_size={batch} have no layout with "
            f"semantics {', '.join(problem.semantics)} alone: these need at least two ranks and as many "
            "microbatches as ranks. Allow sync too (--semantics)."
        )
    if problem.config.pipeline.by_chunk:
        return (
            f"pipeline.weights_memory={problem.config.pipeline.weights_memory} with model.num_layers="
            f"{model.num_layers}, {problem.num_devices} devices and data.global_batch_size={batch}: no mesh has "
            f"{FEWEST_CHUNKS} stages or more on each rank, a layer in each. Use another number of devices, or "
            "pipeline.weights_memory=device."
        )
    return (
        f"{problem.num_devices} devices cannot be a mesh for model.num_heads={model.num_heads}, model.num_layers="
        f"{model.num_layers} and data.global_batch_size={batch}: their number must be data × pipe × tensor, where data "
        "divides the batch, tensor divides the heads, and each pipe rank has a layer. Use another number of devices, "
        "or another batch (--global_batch_size)."
    )
