"""Train steps without data or weights, which are lowered and compiled but not run."""

import copy

import jax

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.train.step.program import Program


def make_program(config: Config) -> Program:
    """The program of a copy of `config`, on this machine's devices.

    Raises:
      ConfigError, DeviceError: under the same conditions as the Trainer.
    """
    config = copy.deepcopy(config.validate())
    return Program(config, make_mesh(config.mesh))


def temporary_bytes(program: Program, step: jax.stages.Wrapped) -> int:
    """Compiles `step`, which takes the inputs of `program`, and returns its bytes of temporaries on one device."""
    memory = step.lower(program.abstract_state, program.source.abstract_inputs).compile().memory_analysis()
    assert memory is not None  # the CPU, CUDA and TPU backends all give it
    return memory.temp_size_in_bytes
