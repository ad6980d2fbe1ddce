"""What tests need that compile for devices which are not there."""

import importlib.util
import json
import pathlib
from typing import Any

import pytest

from fiddlex.config import Config
from tests.programs import call

_PLUGINS = "jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13"

needs_cuda_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins") is None or not any(map(importlib.util.find_spec, _PLUGINS)),
    reason="compiling for GPUs takes jax's CUDA plugin, of the extra `aot-gpu`",
)


def answer_of(
    program: str, folder: pathlib.Path, config: Config, topology: str, *, xla_flags: str = ""
) -> dict[str, Any]:
    """The JSON object that a program prints last for a config and a topology, without the tests' own XLA flags.

    The program runs in a process of its own, since that for which to compile has to be set before jax starts.
    """
    path = folder / "program.py"
    path.write_text(program)
    done = call(path, config.to_json(), topology, environment={"XLA_FLAGS": xla_flags})
    return json.loads(done.stdout.splitlines()[-1])
