"""How much longer a step of a run takes than the compiled step alone: the host's share.

    python -m experiments.benchmarks.host_time [--rounds=15 --steps=20 --config.mesh.data=2 …]

A run reads and prepares a batch for each step, dispatches the step, and reads the record of the step before. The
compiled step alone repeats one batch, and its records are not read. Both belong to the same config, in one process, and
take turns. On CPUs the host's work takes cores from the devices, so the difference holds both. Prints a Markdown table
of medians, with the middle half of the turns.
"""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
from absl import flags

from experiments.benchmarks.comparison import between, quartiles
from experiments.benchmarks.programs import make_program
from experiments.benchmarks.sizes import base_config
from fiddlex.cluster.mesh import request_devices
from fiddlex.config import Config
from fiddlex.parallel.sharding import on_devices
from fiddlex.terminal.command_line import define_changes, run
from fiddlex.train.trainer import Trainer

_CONFIG = define_changes(base_config(pipe=1))
_ROUNDS = flags.DEFINE_integer("rounds", 15, "turns of each", lower_bound=2)
_STEPS = flags.DEFINE_integer("steps", 20, "steps in a turn", lower_bound=1)


def main(argv: list[str]) -> None:
    """Prints the table."""
    config = _CONFIG.value.validate()
    request_devices(config.mesh.num_devices)
    turns = {"a run": in_a_run(config), "the compiled step alone": alone(config)}
    for take in turns.values():
        take(_STEPS.value)
    times: dict[str, list[float]] = {name: [] for name in turns}
    for _ in range(_ROUNDS.value):
        for name, take in turns.items():
            start = time.perf_counter()
            take(_STEPS.value)
            times[name].append((time.perf_counter() - start) / _STEPS.value * 1e3)
    times["the host's share"] = [one - other for one, other in zip(*times.values(), strict=True)]
    print("| a step of | ms | middle half of turns |\n|---|---:|---:|")
    for name, found in times.items():
        print(f"| {name} | {statistics.median(found):.2f} | {between(quartiles(found))} |")


def in_a_run(config: Config) -> Callable[[int], None]:
    """Takes steps as a run does."""
    trainer = Trainer(config)

    def take(num_steps: int) -> None:
        for _ in trainer.steps(num_steps):
            pass

    return take


def alone(config: Config) -> Callable[[int], None]:
    """Takes steps with one batch of random tokens, and waits for the last of them."""
    program = make_program(config)
    step, state = program.compile(program.lower()), program.init_state()
    random = np.random.default_rng(0)

    def array(like: jax.ShapeDtypeStruct) -> jax.Array:
        return on_devices(random.integers(0, 2, like.shape).astype(like.dtype), like.sharding)

    inputs = jax.tree.map(array, program.source.abstract_inputs)

    def take(num_steps: int) -> None:
        nonlocal state
        for _ in range(num_steps):
            state, metrics = step(state, inputs)
        jax.block_until_ready(metrics)

    return take


if __name__ == "__main__":
    run(main)
