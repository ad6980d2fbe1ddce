"""Train steps without data or weights, to be lowered and compiled and not run."""

import copy

import jax

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.train.step.program import Program


def make_program(config: Config) -> Program:
    """The program of a copy of `config`, on the devices that are there.

    Raises:
      ConfigError, DeviceError: as the Trainer does.
    """
    config = copy.deepcopy(config.validate())
    return Program(config, make_mesh(config.mesh))


def temporary_bytes(program: Program, step: jax.stages.Wrapped) -> int:
    """Bytes of temporaries on one device, of a step that takes what `program` takes; compiles it."""
    memory = step.lower(program.abstract_state, program.source.abstract_inputs).compile().memory_analysis()
    assert memory is not None  # the CPU, CUDA and TPU backends all have it
    return memory.temp_size_in_bytes
