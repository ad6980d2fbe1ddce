"""The memory of a config's train step on the device at hand: as fiddlex predicts it, and as XLA assigns it.

    python -m experiments.on_device.memory CONFIG

takes the config as JSON, compiles its step for the first device of JAX_PLATFORMS, and prints a line of JSON. The
compiled step is kept where a run of the same config finds it.
"""

import dataclasses
import json
import sys
from typing import Any

from fiddlex.cluster.mesh import make_mesh
from fiddlex.cluster.program_cache import keep_programs
from fiddlex.config import Config
from fiddlex.costs.backend import CPU, GPU
from fiddlex.errors import FiddlexError
from fiddlex.models.flash import compute_capability
from fiddlex.planner.predict import needed_memory
from fiddlex.xla.ahead_of_time import compile_ahead, report


def facts(config: Config) -> dict[str, Any]:
    """Compiles the step of a valid config.

    Returns:
      `predicted_bytes` and `xla_bytes` of a device; whether the step `fits`, None where that is not known; in which
      kernel `attention` runs; `trace_s` and `compile_s`.

    Raises:
      ConfigError, DeviceError: when `make_mesh` raises them.
    """
    mesh = make_mesh(config.mesh)
    on_gpu = mesh.devices.flat[0].platform == "gpu"
    backend = dataclasses.replace(GPU, capability=compute_capability(mesh)) if on_gpu else CPU
    found = report(config, compile_ahead(config, mesh))
    sizes = {"predicted_bytes": needed_memory(config, backend).peak, "xla_bytes": found["needed_bytes"]}
    return sizes | {name: found[name] for name in ("fits", "attention", "trace_s", "compile_s")}


def main() -> None:
    """Prints the facts of the config of the command line."""
    config = Config.from_json(sys.argv[1]).validate()
    keep_programs(config.train.compilation_cache)
    print(json.dumps(facts(config)))


if __name__ == "__main__":
    try:
        main()
    except FiddlexError as error:
        sys.exit(str(error))
