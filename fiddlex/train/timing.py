"""How long train steps take here: runs of several configs in one process, which take turns.

What else the machine does falls on all of them alike, and only ever adds time: so the fastest of many turns tells what
a step takes, and their spread how busy the machine was.
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

from fiddlex.cluster.mesh import make_mesh, num_cores, request_devices
from fiddlex.config import Config
from fiddlex.data.dataset import Dataset, load_dataset
from fiddlex.train.inference.forward import make_eval_step
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.program import Program
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)

WARMUP_TURNS = 2  # the first fills a pipeline that goes on from batch to batch


class TimedCase(NamedTuple):
    """What is timed: the train step of a config, or its forward pass alone."""

    config: Config
    forward_only: bool = False


def rounds(cases: Sequence[TimedCase]) -> Iterator[list[float]]:
    """Compiles all cases, then gives each a turn of one step in every round, without end.

    Yields:
      Seconds of each case's step.

    Raises:
      ConfigError, DataError, DeviceError: as the Trainer does.
    """
    request_devices(max(config.mesh.num_devices for config, _ in cases))
    datasets: dict[str, Dataset] = {}
    turns = [_start(case, _dataset(case.config, datasets)) for case in cases]
    while True:
        times = []
        for turn in turns:
            start_s = time.perf_counter()
            jax.block_until_ready(turn())
            times.append(time.perf_counter() - start_s)
        yield times


def time_steps(cases: Sequence[TimedCase], *, limit_s: float, min_rounds: int = 3) -> list[list[float]]:
    """Seconds of a step of each case, of every round.

    Args:
      cases: what is timed.
      limit_s: of all rounds together, compilation aside.
      min_rounds: however long they take.

    Raises:
      ConfigError, DataError, DeviceError: as the Trainer does.
    """
    taken: list[list[float]] = []
    for times in rounds(cases):
        if not taken:
            end_s = time.monotonic() + limit_s
        taken.append(times)
        if len(taken) >= min_rounds and time.monotonic() >= end_s:
            break
    return [list(row) for row in zip(*taken, strict=True)]


def about() -> dict[str, str]:
    """This machine, for a profile: `machine`, `jax_version`, `date`."""
    device = jax.devices()[0]
    kind = f"{num_cores()} cores of {platform.machine()}" if device.platform == "cpu" else device.device_kind
    return {"machine": kind, "jax_version": jax.__version__, "date": str(datetime.date.today())}


def _dataset(config: Config, datasets: dict[str, Dataset]) -> Dataset:
    """The data of a config, or of another that has the same."""
    data = dataclasses.asdict(config.data) | {"global_batch_size": 0}
    key = json.dumps([data, config.model.task, config.model.seq_len, config.model.vocab_size])
    if key not in datasets:
        datasets[key] = load_dataset(config)
    return datasets[key]


def _start(case: TimedCase, dataset: Dataset) -> Callable[[], object]:
    """Compiles a case and runs it until it is warm."""
    start_s = time.monotonic()
    turn = _forward(case.config, dataset) if case.forward_only else _train(case.config, dataset)
    for _ in range(WARMUP_TURNS):
        jax.block_until_ready(turn())
    mesh, pipeline = case.config.mesh, case.config.pipeline
    logger.info("Ready after %.0f s: %s, %s.", time.monotonic() - start_s, mesh, pipeline)
    return turn


def _train(config: Config, dataset: Dataset) -> Callable[[], object]:
    trainer = Trainer(config, dataset)
    return lambda: trainer.dispatch().metrics


def _forward(config: Config, dataset: Dataset) -> Callable[[], object]:
    program = Program(config.validate(), make_mesh(config.mesh))
    step = make_eval_step(program.model, config, head=program.model.scores, mesh=program.mesh, layout=program.layout)
    weights, batch = program.init_state().weights, next(Feed(dataset, config, program.mesh).train(0))
    return lambda: step(weights, batch)
