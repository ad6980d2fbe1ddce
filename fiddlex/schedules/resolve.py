"""From a config to its pipeline: the one place where schedule, semantics and layers on stages are put together.

Training runs what `resolve` gives, ahead-of-time compilation compiles it, and predictions of time and memory start from
it too, but for long pipelines of schedules that the planner knows a shorter way for (`fiddlex.planner.closed_forms`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from fiddlex.config import Config
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.pipeline_spec import PipelineSpec, make_spec
from fiddlex.schedules.placement import LayerPlacement, place_layers
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import Phase, Semantics, make_phases, make_semantics
from fiddlex.schedules.windows import Windows, common_spec, unroll


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What the pipeline of a run does.

    Attributes:
      lowered: the schedule of one batch on its ticks.
      placement: the layers of each stage.
      phases: the semantics of the run's steps.
      windows: for each semantics of the run the schedule that runs on from batch to batch; empty when every batch of
        the run is flushed.
    """

    lowered: Lowered
    placement: LayerPlacement
    phases: tuple[Phase, ...]
    windows: Mapping[str, Windows]

    @functools.cached_property
    def spec(self) -> PipelineSpec:
        """What a program must know that runs any step."""
        if self.windows:
            return common_spec(list(self.windows.values()))
        return make_spec(self.lowered, self.lowered.schedule.num_microbatches)

    @property
    def delay(self) -> int:
        """By how many updates the oldest weights that a batch of the run uses lag behind."""
        return self.spec.sizes.versions - 1


def resolve(config: Config) -> Pipeline:
    """The pipeline of a config.

    Args:
      config: a valid one.

    Raises:
      ConfigError: when the schedule does not exist for these sizes, the layers cannot be cut into its stages, or there
        are no such semantics or the schedule cannot have them.
    """
    pipeline = config.pipeline
    schedule = schedule_of(config, pipeline.num_microbatches)
    placement = place_layers(schedule.placement, config.model.num_layers, pipeline.layers_per_stage)
    phases = make_phases(pipeline.semantics, pipeline.semantics_schedule, config.train.num_steps)
    names = dict.fromkeys(phase.semantics for phase in phases)
    all_semantics = {name: semantics_of(config, name, num_stages=schedule.num_stages) for name in names}
    windows = {}
    if any(max(semantics.delays) for semantics in all_semantics.values()):
        longer = None if pipeline.schedule.startswith("file:") else functools.partial(schedule_of, config)
        windows = {name: _unrolled(config, schedule, name, s, longer) for name, s in all_semantics.items()}
    return Pipeline(lower(schedule), placement, phases, windows)


def schedule_of(config: Config, num_microbatches: int) -> Schedule:
    """The schedule of a config, proven legal, for any number of microbatches.

    Raises:
      ConfigError: when it does not exist for these sizes.
    """
    mesh, pipeline = config.mesh, config.pipeline
    try:
        return make_schedule(
            pipeline.schedule,
            pipe=mesh.pipe,
            chunks=pipeline.num_chunks,
            num_microbatches=num_microbatches,
            words=("mesh.pipe", "pipeline.num_chunks", "pipeline.num_microbatches"),
        )
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.schedule={pipeline.schedule} with mesh.pipe={mesh.pipe}, pipeline.num_chunks="
            f"{pipeline.num_chunks}, pipeline.num_microbatches={pipeline.num_microbatches}: {error}"
        ) from error


def semantics_of(config: Config, name: str, *, num_stages: int) -> Semantics:
    """The semantics of this name for the pipeline of a config.

    Raises:
      ConfigError: when there are none of this name, or they need more microbatches.
    """
    pipe, m = config.mesh.pipe, config.pipeline.num_microbatches
    if name == "2bw" and m < pipe:
        raise ConfigError(
            f"2bw with pipeline.num_microbatches={m} and mesh.pipe={pipe}: it needs at least as many microbatches as "
            f"ranks. Use pipeline.num_microbatches={pipe} or more, or sync; delay:1 has the same weights and runs with "
            "so few, mostly waiting. How many run without waiting depends on the schedule: experiments/schedule.py "
            "--semantics=2bw tells."
        )
    return make_semantics(name, num_stages=num_stages, batch_size=m)


def _unrolled(
    config: Config, schedule: Schedule, name: str, semantics: Semantics, longer: Callable[[int], Schedule] | None
) -> Windows:
    try:
        return unroll(schedule, semantics, longer)
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.semantics={name} with pipeline.schedule={config.pipeline.schedule}: {error}"
        ) from error
