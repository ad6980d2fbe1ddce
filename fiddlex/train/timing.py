"""Times train steps on this machine: several configs run in one process and take turns, one step each.

Other load on the machine affects all configs alike and only ever adds time. The fastest of many turns therefore
measures the step itself, and the spread of the turns measures how busy the machine was.
"""

import dataclasses
import datetime
import json
import logging
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax

from fiddlex.cluster import processes
from fiddlex.cluster.mesh import make_mesh, num_cores, request_devices
from fiddlex.config import Config
from fiddlex.data import Batch, ExampleSource
from fiddlex.data.dataset import Dataset, load_dataset
from fiddlex.planner.enough_memory import Use
from fiddlex.planner.fit import Calibration
from fiddlex.planner.profile import Profile
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted, readable_time
from fiddlex.train.inference.forward import make_eval_step
from fiddlex.train.run.faults.require_memory import require_memory
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)

WARMUP_TURNS = 2  # the first turn fills a pipeline that continues from batch to batch
_LEAST_STEPS = 5


class TimedCase(NamedTuple):
    """A case to time: the train step of a config, or its forward pass alone."""

    config: Config
    forward_only: bool = False


def rounds(cases: Sequence[TimedCase], *, force: bool = False) -> Iterator[list[float]]:
    """Compiles all cases, then yields without end, for each round, the seconds of each case's step.

    With `force` it runs although the memory will not be enough (`fiddlex.train.run.faults.require_memory`).
    """
    request_devices(max(config.mesh.num_devices for config, _ in cases))
    datasets: dict[str, Dataset] = {}
    turns = [_start(case, _dataset(case.config, datasets), force=force) for case in cases]
    while True:
        times = []
        for turn in turns:
            start_s = time.perf_counter()
            jax.block_until_ready(turn())
            times.append(time.perf_counter() - start_s)
        yield times


def time_steps(
    cases: Sequence[TimedCase], *, limit_s: float, min_rounds: int = 3, force: bool = False
) -> list[list[float]]:
    """The seconds of each case's step in every round, one list per case.

    No round begins later than `limit_s` after the end of the first one, except the first `min_rounds`.
    """
    taken: list[list[float]] = []
    end_s = 0.0

    def is_over() -> bool:
        return time.monotonic() >= end_s

    with phase("Measuring", total=limit_s, unit="s") as measuring:
        for times in rounds(cases, force=force):
            if not taken:
                end_s = time.monotonic() + limit_s
            taken.append(times)
            measuring.advance(time.monotonic() - (end_s - limit_s), counted(len(taken), "round"))
            # Every process of a run must take as many turns; the first one decides.
            if len(taken) >= min_rounds and processes.told_by_first("end of the turns", is_over):
                break
    return [list(row) for row in zip(*taken, strict=True)]


def time_with_data_there(config: Config, dataset: Dataset, *, limit_s: float, force: bool = False) -> list[float]:
    """The seconds of steps whose batches take no time to make: all rows are the first example of the data.

    No step begins after `limit_s`, except the first `_LEAST_STEPS`.
    """
    same = dataclasses.replace(dataset, train=_SameExample(dataset.sources[0]))
    turn = _start(TimedCase(config), same, force=force)
    times: list[float] = []
    end_s = time.monotonic() + limit_s
    while len(times) < _LEAST_STEPS or time.monotonic() < end_s:
        start_s = time.perf_counter()
        jax.block_until_ready(turn())
        times.append(time.perf_counter() - start_s)
    return times


def measured_profile(calibration: Calibration, *, limit_s: float, min_rounds: int, force: bool = False) -> Profile:
    """The profile of this machine that the fastest turns (`time_steps`) of a calibration's steps determine."""
    cases = [*map(TimedCase, calibration.configs), TimedCase(calibration.forward, forward_only=True)]
    *seconds, forward_s = map(min, time_steps(cases, limit_s=limit_s, min_rounds=min_rounds, force=force))
    return calibration.fit(seconds, forward_s, about())


def about() -> dict[str, str]:
    """A description of this machine for a profile: `machine`, `jax_version`, `date`."""
    device = jax.devices()[0]
    kind = f"{num_cores()} cores of {platform.machine()}" if device.platform == "cpu" else device.device_kind
    return {"machine": kind, "jax_version": jax.__version__, "date": str(datetime.date.today())}


class _SameExample:
    """As many examples as a source has, all of which are its first one."""

    def __init__(self, source: ExampleSource):
        self._example, self._length = source.example(0, epoch=0), len(source)

    def __len__(self) -> int:
        return self._length

    def example(self, index: int, *, epoch: int) -> Batch:
        return self._example


def _dataset(config: Config, datasets: dict[str, Dataset]) -> Dataset:
    """The dataset of a config, shared by all configs that use the same data."""
    data = dataclasses.asdict(config.data) | {"global_batch_size": 0}
    key = json.dumps([data, config.model.task, config.model.seq_len, config.model.vocab_size])
    if key not in datasets:
        datasets[key] = load_dataset(config)
    return datasets[key]


def _start(case: TimedCase, dataset: Dataset, *, force: bool) -> Callable[[], object]:
    """Compiles a case and runs its warm-up turns; returns the function that takes a turn."""
    start_s = time.monotonic()
    make = _forward if case.forward_only else _train
    turn = make(case.config, dataset, force=force)
    for _ in range(WARMUP_TURNS):
        jax.block_until_ready(turn())
    pipeline = case.config.pipeline
    logger.info(
        "Ready to measure after %s: %s of %s, schedule %s, num_microbatches %d.",
        readable_time(time.monotonic() - start_s),
        "the forward pass" if case.forward_only else "the train step",
        f"mesh {case.config.mesh.text}",
        pipeline.schedule,
        pipeline.num_microbatches,
    )
    return turn


def _train(config: Config, dataset: Dataset, *, force: bool) -> Callable[[], object]:
    trainer = Trainer(config, dataset)
    require_memory(trainer.config, trainer.mesh, Use.MEASURING, force=force)
    return lambda: trainer.dispatch().metrics


def _forward(config: Config, dataset: Dataset, *, force: bool) -> Callable[[], object]:
    program = Program(config.validate(), make_mesh(config.mesh))
    require_memory(program.config, program.mesh, Use.SCORING, force=force)
    step = make_eval_step(
        program.model, program.config, head=program.model.scores, mesh=program.mesh, layout=program.layout
    )
    weights, batch = program.init_state().weights, next(Feed(dataset, config, program.mesh).train(0))
    return lambda: step(weights, batch)
