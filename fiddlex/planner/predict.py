"""Predicts the step time and memory of any config with a cost model and the simulator."""

import dataclasses
import functools
from typing import NamedTuple, Protocol

from fiddlex.config import Config, MeshConfig
from fiddlex.costs.backend import Backend
from fiddlex.costs.memory import Memory, device_memory
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.planner.closed_forms import Shape, batch_seconds, shares_ticks, sizes, stage_ranks
from fiddlex.planner.times import MicrobatchTimes, StepTimes
from fiddlex.schedules.buffers import Sizes
from fiddlex.schedules.columns import Columns
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.placement import LayerPlacement, place_layers
from fiddlex.schedules.resolve import Pipeline, resolve, schedule_of, semantics_of, stream_of
from fiddlex.schedules.ticks import fills_pairs
from fiddlex.schedules.traits import traits_of
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import TickWork
from fiddlex.simulate.steady import mean_batch_time
from fiddlex.simulate.streaming import Copies


class StepModel(Protocol):
    """A source of times: `CostModel` or `ProfiledCostModel`."""

    def microbatch(self, mesh: MeshConfig, *, num_microbatches: int, recompute: str) -> MicrobatchTimes:
        """The times of a microbatch."""

    def step(self, mesh: MeshConfig, *, num_parameters: float, streamed_rows: int = 0) -> StepTimes:
        """The times of a step outside the pipeline."""


class Prediction(NamedTuple):
    """Seconds of a step; no other place adds up its parts."""

    pipeline: float  # all microbatches, with bubbles and with copies to and from the host that nothing hides
    step: StepTimes  # the parts of a step outside the pipeline

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return self.pipeline + sum(self.step)


def predict(config: Config, model: StepModel) -> Prediction:
    """The seconds of a config's step, on average over the run, without filling and draining between phases.

    Args:
      config: a valid config.
      model: times of the same model and batch.

    Raises:
      ConfigError: when the config has no pipeline, as in `resolve`.
    """
    pipeline, m = pipeline_of(config), config.pipeline.num_microbatches
    times = model.microbatch(config.mesh, num_microbatches=m, recompute=config.pipeline.recompute)
    rows = pipeline.placement.rows_per_rank
    number, streamed_rows = device_parameters(config, rows), rows * config.pipeline.by_chunk
    step = model.step(config.mesh, num_parameters=number, streamed_rows=streamed_rows)
    return Prediction(pipeline.batch_seconds(times.costs(pipeline.placement)), step)


def needed_memory(config: Config, backend: Backend) -> Memory:
    """The memory that a config's step takes on a device."""
    pipeline = pipeline_of(config)
    return device_memory(config, pipeline.sizes, pipeline.placement, backend)


class _Short(NamedTuple):
    """A pipeline with one semantics whose schedule has traits; closed forms replace a simulation of its full length."""

    shape: Shape
    placement: LayerPlacement

    @property
    def sizes(self) -> Sizes:
        return sizes(self.shape)

    def batch_seconds(self, costs: Costs) -> float:
        return batch_seconds(self.shape, costs)


@dataclasses.dataclass(frozen=True)
class _Whole:
    """Any pipeline, simulated at its full length."""

    pipeline: Pipeline

    @property
    def placement(self) -> LayerPlacement:
        return self.pipeline.placement

    @property
    def sizes(self) -> Sizes:
        return self.pipeline.spec.sizes

    @functools.cached_property
    def _ticks(self) -> tuple[TickWork, Copies | None]:
        """The ticks of a flushed batch, for any costs."""
        lowered, stream = self.pipeline.lowered, self.pipeline.stream
        copies = Copies.of(stream) if stream else None
        return TickWork.of_lowered(lowered, Columns.of(lowered.schedule, lowered.ticks), copies), copies

    def batch_seconds(self, costs: Costs) -> float:
        if self.pipeline.windows:
            return mean_batch_time(self.pipeline, costs)
        work, copies = self._ticks
        return work.times(costs, copies).makespan


def pipeline_of(config: Config) -> _Short | _Whole:
    """The pipeline of a config: by closed forms where its schedule has traits, else as in training (`resolve`).

    Raises:
      ConfigError: when there is no such pipeline, as in `resolve`.
    """
    pipe, pipeline = config.mesh.pipe, config.pipeline
    traits = traits_of(GENERATORS.get(pipeline.schedule))
    if traits is None or pipeline.semantics_schedule:
        return _Whole(resolve(config))
    m, short = pipeline.num_microbatches, traits.onset(pipe)
    whole_periods = m > short and (m - short) % traits.period(pipe) == 0
    schedule = schedule_of(config, short if whole_periods else m)  # raises if there is none
    semantics = semantics_of(config, pipeline.semantics, num_stages=pipe * pipeline.num_chunks)
    name = pipeline.semantics if any(semantics.delays) else "sync"
    shape = Shape(pipeline.schedule, pipe, pipeline.num_chunks, m, name, pipeline.spills)
    if fills_pairs(schedule) != shares_ticks(shape):  # `pipeline.order` asks for another order than the generator's
        return _Whole(resolve(config))
    placement = place_layers(stage_ranks(shape), config.model.num_layers, pipeline.layers_per_stage)
    if pipeline.by_chunk:
        stream_of(config, lower(schedule), placement)  # raises if there is none
        shape = shape._replace(streamed=placement.rows_per_chunk)
    return _Short(shape, placement)
