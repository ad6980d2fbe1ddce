"""The step of any config, as a cost model and the simulator predict it."""

from typing import NamedTuple, Protocol

from fiddlex.config import Config, MeshConfig
from fiddlex.costs.backend import Backend
from fiddlex.costs.memory import Memory, device_memory
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.planner.closed_forms import Shape, batch_seconds, sizes, stage_ranks
from fiddlex.planner.cost_model import MicrobatchTimes, StepTimes
from fiddlex.schedules.buffers import Sizes
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.placement import LayerPlacement, place_layers
from fiddlex.schedules.resolve import Pipeline, resolve, schedule_of, semantics_of
from fiddlex.schedules.traits import traits_of
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.steady import mean_batch_time


class StepModel(Protocol):
    """What gives times: `CostModel` or `ProfiledCostModel`."""

    def microbatch(self, mesh: MeshConfig, *, num_microbatches: int, recompute: str) -> MicrobatchTimes:
        """The times of a microbatch."""

    def step(self, mesh: MeshConfig, *, num_parameters: float) -> StepTimes:
        """The times of a step outside the pipeline."""


class Prediction(NamedTuple):
    """Seconds of a step; the one place where they are added up.

    Attributes:
      pipeline: microbatches through the pipeline, bubbles included.
      step: what comes once.
    """

    pipeline: float
    step: StepTimes

    @property
    def seconds(self) -> float:
        """All together."""
        return self.pipeline + sum(self.step)


def predict(config: Config, model: StepModel) -> Prediction:
    """What a step of a config takes, on average over the run; what it takes to fill and drain between phases left out.

    Args:
      config: a valid one.
      model: of the same model and batch.

    Raises:
      ConfigError: as `pipeline_of`.
    """
    pipeline, m = pipeline_of(config), config.pipeline.num_microbatches
    times = model.microbatch(config.mesh, num_microbatches=m, recompute=config.pipeline.recompute)
    step = model.step(config.mesh, num_parameters=device_parameters(config, pipeline.placement.rows_per_rank))
    return Prediction(pipeline.batch_seconds(times.costs(pipeline.placement)), step)


def needed_memory(config: Config, backend: Backend) -> Memory:
    """What a step of a config takes of a device's memory.

    Args:
      config: a valid one.
      backend: what it is compiled for.

    Raises:
      ConfigError: as `pipeline_of`.
    """
    pipeline = pipeline_of(config)
    return device_memory(config, pipeline.sizes, pipeline.placement, backend)


class PredictedPipeline(Protocol):
    """The pipeline of a config, as predictions need it."""

    @property
    def placement(self) -> LayerPlacement:
        """Its layers on stages."""

    @property
    def sizes(self) -> Sizes:
        """What it holds."""

    def batch_seconds(self, costs: Costs) -> float:
        """Seconds of a batch in the lockstep clock, for costs of its stages in seconds."""


class _Short(NamedTuple):
    """A pipeline of a schedule with traits and of one semantics: nothing of its length is simulated."""

    shape: Shape
    placement: LayerPlacement

    @property
    def sizes(self) -> Sizes:
        return sizes(self.shape)

    def batch_seconds(self, costs: Costs) -> float:
        return batch_seconds(self.shape, costs)


class _Whole(NamedTuple):
    """Any pipeline."""

    pipeline: Pipeline

    @property
    def placement(self) -> LayerPlacement:
        return self.pipeline.placement

    @property
    def sizes(self) -> Sizes:
        return self.pipeline.spec.sizes

    def batch_seconds(self, costs: Costs) -> float:
        return mean_batch_time(self.pipeline, costs)


def pipeline_of(config: Config) -> PredictedPipeline:
    """The pipeline of a config: as training has it (`resolve`), or by the shorter way where there is one.

    Args:
      config: a valid one.

    Raises:
      ConfigError: when there is no such pipeline, as `resolve`.
    """
    pipe, pipeline = config.mesh.pipe, config.pipeline
    traits = traits_of(GENERATORS.get(pipeline.schedule))
    if traits is None or pipeline.semantics_schedule:
        return _Whole(resolve(config))
    m, short = pipeline.num_microbatches, traits.onset(pipe)
    schedule_of(config, short if m > short and m % pipe == short % pipe == 0 else m)  # raises where there is none
    semantics = semantics_of(config, pipeline.semantics, num_stages=pipe * pipeline.num_chunks)
    name = pipeline.semantics if any(semantics.delays) else "sync"
    shape = Shape(pipeline.schedule, pipe, pipeline.num_chunks, m, name)
    return _Short(shape, place_layers(stage_ranks(shape), config.model.num_layers, pipeline.layers_per_stage))
