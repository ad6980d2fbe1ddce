"""Profiles some steps of a run (`train.profile_steps`): a trace that TensorBoard's profile plugin opens.

The trace is in `tensorboard/plugins/profile/steps-FIRST-LAST/`, with a file for each process in `train.profile_ranks`,
which the plugin shows as a host. The host waits for the devices before and after these steps, so the trace has all of
them and no other step.
"""

import logging
import os
import shutil
from pathlib import Path

import jax

from fiddlex.cluster import processes
from fiddlex.cluster.platforms import libtpu_is_loaded
from fiddlex.config import TrainConfig
from fiddlex.config.values.profiled import check_ranks, parse_ranks, parse_steps
from fiddlex.errors import DeviceError
from fiddlex.train.run.workdir import writing

logger = logging.getLogger(__name__)


class Profiler:
    """Starts and ends the trace of this process. A context manager: leaving it ends a trace that is still running."""

    def __init__(self, workdir: Path, config: TrainConfig):
        self._steps = parse_steps("train.profile_steps", config.profile_steps, num_steps=config.num_steps)
        check_ranks("train.profile_ranks", config.profile_ranks, num_processes=processes.num_processes())
        ranks = parse_ranks("train.profile_ranks", config.profile_ranks)
        if self._steps:
            _check_profiler()
            if ranks is not None and jax.process_index() not in ranks:
                self._steps = range(0)
        self._directory = workdir / "tensorboard"
        self._is_running = False

    def __enter__(self) -> "Profiler":
        return self

    def __exit__(self, *exception: object) -> None:
        if self._is_running:
            self.stop()

    def starts_with(self, step: int) -> bool:
        """Whether the trace is to start before `step`, counted from 1, is dispatched."""
        return step in self._steps and not self._is_running

    def ends_with(self, step: int) -> bool:
        """Whether the trace is to end when `step` is done."""
        return self._is_running and step == self._steps[-1]

    def start(self) -> None:
        """Starts the trace; logs a warning when there is already another one in this process."""
        try:
            jax.profiler.start_trace(self._temporary)
            self._is_running = True
        except RuntimeError as error:
            logger.warning("The steps in train.profile_steps are not profiled: %s", error)
            self._steps = range(0)

    def stop(self) -> None:
        self._is_running = False
        name = f"steps-{self._steps[0]}-{self._steps[-1]}"
        target = self._directory / "plugins" / "profile" / name
        with writing(target):
            jax.profiler.stop_trace()
            target.mkdir(parents=True, exist_ok=True)
            for path in self._temporary.glob("plugins/profile/*/*"):
                os.replace(path, target / f"rank{jax.process_index()}-{path.name}")
            shutil.rmtree(self._temporary)
        logger.info("Profiled steps %d to %d: %s", self._steps[0], self._steps[-1], target)

    @property
    def _temporary(self) -> Path:
        """Where jax writes: under a name of its own, which processes of one host would share."""
        return self._directory / f".profile-rank{jax.process_index()}"


def _check_profiler() -> None:
    """Raises DeviceError where jax has loaded libtpu but found no TPU: there, its profiler ends with a segfault."""
    if jax.default_backend() == "cpu" and libtpu_is_loaded():
        raise DeviceError(
            "train.profile_steps: jax's profiler crashes where jax has loaded libtpu and there is no TPU. Set "
            "JAX_PLATFORMS=cpu, which keeps jax from loading it, or leave train.profile_steps empty."
        )
