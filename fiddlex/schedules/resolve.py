"""From a config to its pipeline: the only module that combines schedule, semantics and layer placement.

Training, ahead-of-time compilation and predictions start from what `resolve` returns, except where the planner can
predict a long pipeline without lowering it whole (`fiddlex.planner.closed_forms`).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from fiddlex.config import Config
from fiddlex.config.values.schedule_source import Kind, source_of
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.schedules.generators import make_schedule
from fiddlex.schedules.lowering import Lowered, lower
from fiddlex.schedules.pipeline_spec import PipelineSpec, make_spec
from fiddlex.schedules.placement import LayerPlacement, place_layers
from fiddlex.schedules.prediction import check_delays
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.semantics import AUTO, AUTO_SEMANTICS, Phase, Semantics, make_phases, make_semantics
from fiddlex.schedules.weight_stream import WeightStream, stream_weights
from fiddlex.schedules.windows import Windows, common_spec, unroll


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """What the pipeline of a run does."""

    lowered: Lowered  # the schedule of one batch on its ticks
    placement: LayerPlacement
    phases: tuple[Phase, ...]  # of the run; under `auto`, those before the run has decided anything
    # By semantics, where the schedule continues from batch to batch; empty: the run flushes after every batch.
    windows: Mapping[str, Windows]
    # When weights come from the host and gradients go there; None: they are on the devices.
    stream: WeightStream | None = None

    @functools.cached_property
    def spec(self) -> PipelineSpec:
        """The spec of a program that can run every step of the run."""
        if self.windows:
            return common_spec(list(self.windows.values()))
        return make_spec(self.lowered, self.lowered.schedule.num_microbatches, stream=self.stream)

    @property
    def delay(self) -> int:
        """The largest delay of the run: by how many updates the oldest weights that a batch uses lag behind."""
        return self.spec.sizes.versions - 1


def resolve(config: Config) -> Pipeline:
    """The pipeline of a config; raises ConfigError if schedule, sizes, layers, semantics or prediction do not fit."""
    pipeline = config.pipeline
    schedule = schedule_of(config, pipeline.num_microbatches)
    placement = place_layers(schedule.placement, config.model.num_layers, pipeline.layers_per_stage)
    phases = make_phases(pipeline.semantics, pipeline.semantics_schedule, config.train.num_steps)
    may_follow = AUTO_SEMANTICS if pipeline.semantics_schedule == AUTO else ()
    names = dict.fromkeys([*(phase.semantics for phase in phases), *may_follow])
    all_semantics = {name: semantics_of(config, name, num_stages=schedule.num_stages) for name in names}
    check_delays(config, all_semantics)
    windows = {}
    if any(max(semantics.delays) for semantics in all_semantics.values()):
        is_table = source_of(pipeline.schedule).kind is Kind.TABLE
        longer = None if is_table else functools.partial(schedule_of, config)
        windows = {name: _unrolled(config, schedule, name, s, longer) for name, s in all_semantics.items()}
    lowered = lower(schedule, spills=pipeline.spills)
    stream = stream_of(config, lowered, placement) if pipeline.by_chunk else None
    return Pipeline(lowered, placement, phases, windows, stream)


def schedule_of(config: Config, num_microbatches: int) -> Schedule:
    """The schedule of a config for any number of microbatches, proven legal; raises ConfigError where there is none."""
    mesh, pipeline = config.mesh, config.pipeline
    try:
        return make_schedule(
            pipeline.schedule,
            pipe=mesh.pipe,
            chunks=pipeline.num_chunks,
            num_microbatches=num_microbatches,
            order=pipeline.order,
            words=("mesh.pipe", "pipeline.num_chunks", "pipeline.num_microbatches"),
        )
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.schedule={pipeline.schedule} with mesh.pipe={mesh.pipe}, pipeline.num_chunks="
            f"{pipeline.num_chunks}, pipeline.num_microbatches={pipeline.num_microbatches}: {error}"
        ) from error


def stream_of(config: Config, lowered: Lowered, placement: LayerPlacement) -> WeightStream:
    """When weights come from the host, under `pipeline.weights_memory=host`."""
    try:
        return stream_weights(lowered, rows_per_chunk=placement.rows_per_chunk)
    except ScheduleError as error:
        pipeline = config.pipeline
        raise ConfigError(
            f"pipeline.weights_memory={pipeline.weights_memory} with pipeline.schedule={pipeline.schedule} and "
            f"pipeline.num_chunks={pipeline.num_chunks}: {error}"
        ) from error


def semantics_of(config: Config, name: str, *, num_stages: int) -> Semantics:
    pipe, m = config.mesh.pipe, config.pipeline.num_microbatches
    if name == "2bw" and m < pipe:
        raise ConfigError(
            f"2bw with pipeline.num_microbatches={m} and mesh.pipe={pipe}: it needs at least as many microbatches as "
            f"ranks. Use pipeline.num_microbatches={pipe} or more, or sync; delay:1 has the same weights and runs with "
            "so few, mostly waiting. How many run without waiting depends on the schedule: fiddlex schedule "
            "--semantics=2bw tells."
        )
    return make_semantics(name, num_stages=num_stages, batch_size=m)


def _unrolled(
    config: Config, schedule: Schedule, name: str, semantics: Semantics, longer: Callable[[int], Schedule] | None
) -> Windows:
    try:
        return unroll(schedule, semantics, longer, spills=config.pipeline.spills)
    except ScheduleError as error:
        raise ConfigError(
            f"pipeline.semantics={name} with pipeline.schedule={config.pipeline.schedule}: {error}"
        ) from error
