"""The train step of a config without data or weights, to be lowered and compiled and not run."""

import copy
from typing import NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from fiddlex.config import Config
from fiddlex.mesh import make_mesh
from fiddlex.models import make_model
from fiddlex.models.gpt import GPT
from fiddlex.parallel.sharding import BATCH
from fiddlex.train.optimizer import learning_rate_schedule, make_optimizer
from fiddlex.train.state import Layout, TrainState, abstract_state, make_blocks, make_layout, state_specs
from fiddlex.train.step import make_train_step

AbstractBatch = dict[str, jax.ShapeDtypeStruct]


class Program(NamedTuple):
    """A train step and what it takes.

    Attributes:
      step: `(state, batch) -> (state, metrics)`, as the Trainer compiles it.
      state: shapes, dtypes and shardings.
      batch: likewise.
      config: a copy of the config.
      model: of the config.
      optimizer: its update.
      mesh: the mesh that it runs on.
      layout: of weights and schedule.
      specs: of the state.
    """

    step: jax.stages.Wrapped
    state: TrainState
    batch: AbstractBatch
    config: Config
    model: GPT
    optimizer: optax.GradientTransformation
    mesh: Mesh
    layout: Layout
    specs: TrainState


def make_program(config: Config) -> Program:
    """Builds the train step of a config.

    Raises:
      ConfigError, DeviceError, ScheduleError: as the Trainer does.
    """
    config = copy.deepcopy(config.validate())
    mesh, model = make_mesh(config.mesh), make_model(config)
    layout = make_layout(model, config)
    optimizer = make_optimizer(
        config.optimizer, num_steps=config.train.num_steps, blocks=make_blocks(model, config, layout)
    )
    specs = state_specs(optimizer, layout)
    step = make_train_step(
        model,
        config,
        optimizer,
        learning_rate=learning_rate_schedule(config.optimizer, config.train.num_steps),
        mesh=mesh,
        layout=layout,
        specs=specs,
    )
    state = abstract_state(model, optimizer, mesh=mesh, layout=layout, specs=specs)
    return Program(step, state, abstract_batch(config, mesh), config, model, optimizer, mesh, layout, specs)


def abstract_batch(config: Config, mesh: Mesh) -> AbstractBatch:
    """Shapes, dtypes and shardings of a global batch."""
    shape, sharding = (config.data.global_batch_size, config.model.seq_len), NamedSharding(mesh, BATCH)
    dtypes = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


def temporary_bytes(program: Program, step: jax.stages.Wrapped) -> int:
    """Bytes of temporaries on one device, of a step that takes what `program` takes; compiles it."""
    memory = step.lower(program.state, program.batch).compile().memory_analysis()
    assert memory is not None  # the CPU, CUDA and TPU backends all have it
    return memory.temp_size_in_bytes
