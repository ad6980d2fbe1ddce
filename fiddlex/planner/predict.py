"""The step of a config, as a cost model and the simulator have it. Imports no jax."""

from typing import NamedTuple, Protocol

from fiddlex.config import Config, MeshConfig
from fiddlex.errors import ConfigError
from fiddlex.pipeline.generators import GENERATORS, make_schedule
from fiddlex.pipeline.placement import LayerPlacement, place_layers
from fiddlex.pipeline.semantics import make_semantics
from fiddlex.planner.costs import MicrobatchTimes, StepTimes
from fiddlex.planner.shapes import Shape, batch_seconds, sizes, stage_ranks
from fiddlex.simulate.backend import Backend
from fiddlex.simulate.memory import Memory, device_memory
from fiddlex.simulate.weight_memory import device_parameters


class StepModel(Protocol):
    """What gives times: `CostModel` or `ProfiledCostModel`."""

    def microbatch(self, mesh: MeshConfig, *, num_microbatches: int, recompute: str) -> MicrobatchTimes:
        """The times of a microbatch."""

    def step(self, mesh: MeshConfig, *, num_parameters: float) -> StepTimes:
        """The times of a step outside the pipeline."""


class Prediction(NamedTuple):
    """Seconds of a step.

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
    """What a step of a config takes; of a pipeline that goes on, on average once it is full.

    Args:
      config: a valid one.
      model: of the same model and batch.

    Raises:
      ConfigError, ScheduleError: as `pipeline_of`.
    """
    shape, placement = pipeline_of(config)
    times = model.microbatch(config.mesh, num_microbatches=shape.num_microbatches, recompute=config.pipeline.recompute)
    rows = placement.rows_per_chunk * placement.num_chunks
    step = model.step(config.mesh, num_parameters=device_parameters(config, rows))
    return Prediction(batch_seconds(shape, times.costs(placement)), step)


def needed_memory(config: Config, backend: Backend) -> Memory:
    """What a step of a config takes of a device's memory.

    Args:
      config: a valid one.
      backend: what it is compiled for.

    Raises:
      ConfigError, ScheduleError: as `pipeline_of`.
    """
    shape, placement = pipeline_of(config)
    return device_memory(config, sizes(shape), placement, backend)


def pipeline_of(config: Config) -> tuple[Shape, LayerPlacement]:
    """The pipeline of a config, and its layers on stages.

    Raises:
      ConfigError: for a schedule of the user's own, stages of chosen layers, or semantics that change along the run; or
        when there are no such semantics.
      ScheduleError: when the schedule does not exist for these sizes.
    """
    pipe, pipeline = config.mesh.pipe, config.pipeline
    if pipeline.schedule not in GENERATORS or pipeline.layers_per_stage or pipeline.semantics_schedule:
        raise ConfigError(
            f"pipeline.schedule={pipeline.schedule}, layers_per_stage={pipeline.layers_per_stage!r}, "
            f"semantics_schedule={pipeline.semantics_schedule!r}: steps are predicted for one of "
            f"{', '.join(GENERATORS)}, with even stages and one semantics."
        )
    m = pipeline.num_microbatches
    long = m % pipe == 0 and m > 2 * pipe  # whose groups are alike; the proof of all of them takes long
    make_schedule(
        pipeline.schedule,
        pipe=pipe,
        chunks=pipeline.num_chunks,
        num_microbatches=2 * pipe if long else m,
        words=("mesh.pipe", "pipeline.num_chunks", "pipeline.num_microbatches"),
    )
    semantics = make_semantics(pipeline.semantics, num_stages=pipe * pipeline.num_chunks, batch_size=m)
    name = pipeline.semantics if any(semantics.delays) else "sync"
    shape = Shape(pipeline.schedule, pipe, pipeline.num_chunks, m, name)
    return shape, place_layers(stage_ranks(shape), config.model.num_layers)
