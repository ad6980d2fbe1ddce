"""Fits a profile to the times of a few train steps.

With one replica and no pipeline, a step of m microbatches and L layers takes m·(L·layer + edges) + weights·update +
fixed. The fit solves this equation by least squares, for numbers not below 0, from runs with different m and L. Runs
with more replicas show how much devices that share cores slow each other down: each device has the same work, so the
time grows for no other reason. Runs with a pipeline show the time of a tick in addition to its work: the measured time
minus the prediction so far, divided by the number of ticks.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import scipy.optimize

from fiddlex.config import Config, PipelineConfig
from fiddlex.costs.weight_memory import device_parameters
from fiddlex.errors import ConfigError, DeviceError
from fiddlex.planner.predict import pipeline_of, predict
from fiddlex.planner.profile import Entry, Profile, ProfiledCostModel
from fiddlex.simulate.clock import Costs

FEW = 4  # runs of few layers have a fourth of the layers
MICROBATCHES = 4  # number of microbatches in the runs with several


class Run(NamedTuple):
    """A config and the seconds of its step."""

    config: Config
    seconds: float


class Parts(NamedTuple):
    """Seconds of a step of one replica without a pipeline."""

    layer: float  # a layer, for a microbatch
    edges: float  # a microbatch outside the layers
    update: float  # the optimizer's update, for each weight
    fixed: float  # what every step takes once


def fit_parts(runs: Sequence[Run]) -> Parts:
    """The parts that best explain runs of one replica without a pipeline, by least squares of the relative errors."""
    rows = [
        (
            config.pipeline.num_microbatches * config.model.num_layers,
            config.pipeline.num_microbatches,
            _weights(config),
            1,
        )
        for config, _ in runs
    ]
    seconds = np.asarray([run.seconds for run in runs])
    return Parts(*_not_below_zero(np.asarray(rows, float) / seconds[:, None], np.ones(len(runs))))


def _not_below_zero(matrix: np.ndarray, target: np.ndarray) -> list[float]:
    """Least squares with no unknown below 0, for float [equation, unknown] and float [equation]."""
    scale = np.linalg.norm(matrix, axis=0)  # the unknowns differ by many orders of magnitude
    found: np.ndarray = scipy.optimize.nnls(matrix / scale, target)[0]
    return (found / scale).tolist()


class Calibration(NamedTuple):
    """The configs whose step times determine a profile."""

    base: tuple[Config, ...]  # one replica, no pipeline: few and many layers, one and several microbatches
    forward: Config  # of which only the forward pass is to be run
    replicas: dict[int, tuple[Config, ...]]  # by number of replicas: many layers, with one microbatch and with several
    pipelines: tuple[Config, ...]  # with different numbers of ranks

    @classmethod
    def of(cls, config: Config, devices: Sequence[int]) -> "Calibration":
        """The configs with the model, tensor parallelism, microbatch and recomputation of a valid config.

        Args:
          config: the runs of many layers have all its layers.
          devices: numbers of devices above 1 for which to measure sharing and ticks; empty: measure only an entry.
        """
        many, examples = config.model.num_layers, config.microbatch_size
        if many < 2:
            raise ConfigError(
                f"model.num_layers={many}: a profile takes steps of few layers and of many, to tell what one takes. "
                "Use at least 2."
            )
        few = max(many // FEW, 1)

        def sized(layers: int, m: int, *, data: int = 1, pipe: int = 1) -> Config:
            mesh = dataclasses.replace(config.mesh, data=data, pipe=pipe)
            pipeline = PipelineConfig(num_microbatches=m, recompute=config.pipeline.recompute)
            batch = dataclasses.replace(config.data, global_batch_size=data * m * examples)
            model = dataclasses.replace(config.model, num_layers=layers)
            return dataclasses.replace(config, model=model, mesh=mesh, pipeline=pipeline, data=batch)

        numbers = (1, MICROBATCHES)
        return cls(
            tuple(sized(layers, m) for layers in (few, many) for m in numbers),
            sized(many, MICROBATCHES),
            {number: tuple(sized(many, m, data=number) for m in numbers) for number in devices},
            tuple(sized(many, MICROBATCHES, pipe=number) for number in devices if 2 * number <= many),
        )

    @property
    def configs(self) -> list[Config]:
        """All configs except for `forward`, in the order in which `fit` takes their times."""
        return [*self.base, *(config for row in self.replicas.values() for config in row), *self.pipelines]

    def fit(self, seconds: Sequence[float], forward_s: float, about: Mapping[str, str]) -> Profile:
        """The profile that fits the measured times.

        Args:
          seconds: seconds of a step of each of `configs`, in their order.
          forward_s: seconds of the forward pass of `forward`.
          about: `machine`, `jax_version` and `date` of the profile.
        """
        timed = map(Run, self.configs, seconds)
        take = lambda configs: tuple(itertools.islice(timed, len(configs)))  # noqa: E731
        base = take(self.base)
        replicas = {number: take(configs) for number, configs in self.replicas.items()}
        parts, config = fit_parts(base), base[0].config
        share = _forward_share(parts, Run(self.forward, forward_s))
        forward_s, backward_s = share * parts.layer, (1 - share) * parts.layer
        entry = Entry.of(config, forward_s=forward_s, backward_s=backward_s, edges_s=parts.edges)
        sharing, exchange = {1: 1.0}, {1: 0.0}
        for number, runs in sorted(replicas.items()):
            sharing[number], exchange[number] = _replicated(runs, base, parts, number, least=max(sharing.values()))
        profile = Profile(
            machine=about["machine"],
            jax_version=about["jax_version"],
            date=about["date"],
            optimizer=config.optimizer.name,
            devices=tuple(sharing),
            sharing=tuple(sharing.values()),
            tick_s=(0.0,) * len(sharing),
            exchange_s=tuple(exchange.values()),
            update_s=parts.update,
            fixed_s=parts.fixed,
            entries=(entry,),
        )
        ticks = {1: 0.0} | {run.config.mesh.num_devices: tick_seconds(run, profile) for run in take(self.pipelines)}
        numbers = sorted(ticks)
        row = np.interp(profile.devices, numbers, [ticks[number] for number in numbers])
        return dataclasses.replace(profile, tick_s=tuple(row.tolist()))


def _forward_share(parts: Parts, forward: Run) -> float:
    """The forward pass's share of a layer's time; a third of the time outside the layers is the head's forward pass."""
    m, layers = forward.config.pipeline.num_microbatches, forward.config.model.num_layers
    if not parts.layer:
        raise DeviceError(
            "the steps do not tell what a layer takes: those of many layers took no longer than those of few. Measure "
            "longer (--seconds, --rounds) on a machine that is less busy, or larger layers."
        )
    seconds = (forward.seconds / m - parts.edges / 3) / layers
    return min(max(seconds / parts.layer, 0.1), 0.5)


def _replicated(
    runs: Sequence[Run], base: Sequence[Run], parts: Parts, number: int, *, least: float
) -> tuple[float, float]:
    """How many times as long work takes on `number` devices, and the seconds of exchange for each weight."""
    few, many = sorted(runs, key=lambda run: run.config.pipeline.num_microbatches)
    same = sorted(
        (run for run in base if run.config.model.num_layers == few.config.model.num_layers),
        key=lambda run: run.config.pipeline.num_microbatches,
    )
    slower = max((many.seconds - few.seconds) / (same[-1].seconds - same[0].seconds), least)
    once = few.seconds - (same[-1].seconds - same[0].seconds) / _more(same) * slower
    weights = _weights(few.config)
    update = weights / (number if few.config.optimizer.zero1 else 1) * parts.update * slower
    return slower, max(once - update - parts.fixed, 0.0) / weights


def _more(runs: Sequence[Run]) -> int:
    return runs[-1].config.pipeline.num_microbatches - runs[0].config.pipeline.num_microbatches


def tick_seconds(run: Run, profile: Profile) -> float:
    """Seconds of a tick that the work in it does not explain."""
    config, unit = run.config, Costs(0.0, 0.0, 0.0, tick=1.0)
    predicted = predict(config, ProfiledCostModel(config, profile)).seconds
    return max(run.seconds - predicted, 0.0) / pipeline_of(config).batch_seconds(unit)


def _weights(config: Config) -> int:
    return device_parameters(config, pipeline_of(config).placement.rows_per_rank)
