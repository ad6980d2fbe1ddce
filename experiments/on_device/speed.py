"""The stage `sizes`: tokens per second and memory of models of real sizes, beside other systems."""

import functools
import logging
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.benchmarks.comparison import TOLERANCES, compare, first_losses
from experiments.benchmarks.known_systems import IN_FLOAT32, Asked, ask
from experiments.on_device.programs import answer_of
from experiments.on_device.sizes import SIZES, Size, config_of, write_tokens
from experiments.on_device.study import Record, Study
from fiddlex.config import Config
from fiddlex.costs.utilisation import throughput
from fiddlex.errors import ConfigError, FiddlexError

logger = logging.getLogger("fiddlex.gpu")

CHECK_STEPS = 5  # first steps, whose losses are compared


class Options(NamedTuple):
    """How to measure.

    Attributes:
      device: `cpu` or `cuda`.
      device_kind: what jax calls the kind of the device.
      dtype: of arithmetic.
      against: systems to measure beside fiddlex.
      pythons: the Python of each environment.
      clones: the path of each system's clone.
      rounds: turns that each system gets.
      steps: steps in a turn.
    """

    device: str
    device_kind: str
    dtype: str
    against: Sequence[str]
    pythons: Mapping[str, str]
    clones: Mapping[str, str]
    rounds: int
    steps: int


def run_sizes(study: Study, names: Sequence[str], options: Options) -> None:
    """Measures the sizes of these names, at each length of their sequences."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            size, tokens = SIZES[name], pathlib.Path(folder) / f"{name}.bin"
            write_tokens(tokens, size.vocab_size)
            for seq_len in size.microbatch_sizes:
                config = config_of(size, seq_len, dtype=options.dtype, tokens=tokens)
                _measure(study, f"{name} {seq_len} {options.dtype}", size, config, options)


def _measure(study: Study, name: str, size: Size, config: Config, options: Options) -> None:
    """Measures the memory and the speed of a config, each as a part of the study."""
    shape = {"microbatches": config.pipeline.num_microbatches, "microbatch_size": config.microbatch_size}
    program = functools.partial(answer_of, "experiments.on_device.memory", config.to_json(), device=options.device)
    study.measure("memory", name, shape, program)
    asked, missing = [ask("fiddlex", config, pythons={}, clones={})], {}
    for system in options.against:
        try:
            pythons, clones = options.pythons, options.clones
            asked.append(ask(system, config, pythons=pythons, clones=clones, device=options.device))
        except ConfigError as error:
            logger.warning("%s is left out: %s", system, error)
            missing[system] = str(error)
    inputs = shape | {"systems": [each.name for each in asked], "rounds": options.rounds, "steps": options.steps}
    study.measure("speed", name, inputs, lambda: measure_speed(config, size, asked, options) | {"missing": missing})


def measure_speed(config: Config, size: Size, asked: Sequence[Asked], options: Options) -> Record:
    """Compares the systems' losses and times; where one of the others fails, measures fiddlex alone.

    Returns:
      `systems`, the records of `experiments.benchmarks.comparison.Result` with `mfu` and the largest relative
      difference of a loss from float32, `from_float32`; and `error`, how another system or the run in float32 failed.

    Raises:
      FiddlexError: when fiddlex itself fails.
    """
    from experiments.benchmarks.same_start import write_start  # starts jax, on the CPU

    facts: Record = {"check_steps": CHECK_STEPS}
    with tempfile.TemporaryDirectory() as folder:
        cores = sorted(os.sched_getaffinity(0))
        job = write_start(config, pathlib.Path(folder), check_steps=CHECK_STEPS, cores=cores, device=options.device)
        expected = None
        if size.in_float32 and config.model.dtype != "float32":
            try:
                expected = first_losses(ask(IN_FLOAT32, config, pythons={}, clones={}), job)
            except FiddlexError as error:  # it takes more memory than what is measured
                facts["error"] = str(error)
        times = functools.partial(
            compare,
            job=job,
            rounds=options.rounds,
            steps=options.steps,
            tolerance=TOLERANCES[config.model.dtype],
            expected=expected,
        )
        try:
            results = times(asked)
        except FiddlexError as error:
            if len(asked) == 1:
                raise
            facts["error"] = str(error)
            results = times(asked[:1])
    of_step = throughput(config, options.device_kind)
    facts["systems"] = []
    for result in results:
        record = result.to_record(of_step.tokens)
        record["mfu"] = None if result.differs else of_step.rates(record["step_time_s"]).get("mfu")
        record["from_float32"] = None
        if expected and not result.differs:
            pairs = zip(result.losses, expected.losses, strict=True)
            record["from_float32"] = max(abs(ours / wanted - 1) for ours, wanted in pairs)
        facts["systems"].append(record)
    return facts
