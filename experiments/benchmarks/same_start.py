"""What all systems of a comparison start from: initial weights, batches, and learning rates of the first steps."""

import pathlib
import tempfile
from typing import Any

import jax
import numpy as np

from experiments.benchmarks.known_systems import as_json
from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.data.dataset import load_dataset
from fiddlex.errors import ConfigError, DataError
from fiddlex.interop.huggingface import write_weights
from fiddlex.interop.safetensors_files import TensorFolder
from fiddlex.train.step.feed import Feed
from fiddlex.train.step.optimizer import learning_rate_schedule
from fiddlex.train.step.program import Program
from third_party.protocol import Job

# What the drivers compute; they read no other field of these.
_COMPUTED = {
    "model.family": "gpt",
    "model.task": "lm",
    "model.dropout": 0.0,
    "model.post_norm": False,
    "optimizer.name": "adamw",
}


def require_comparable(config: Config) -> None:
    """Raises ConfigError when the drivers do not compute the config's model or its update rule."""
    for path, computed in _COMPUTED.items():
        section, name = path.split(".")
        value = getattr(getattr(config, section), name)
        if value != computed:
            raise ConfigError(
                f"{path}={value} with --against: the drivers of other systems compute a GPT-2 without dropout, "
                f"trained by AdamW. Use {computed}."
            )


def write_start(
    config: Config, folder: pathlib.Path, *, check_steps: int, cores: list[int], device: str = "cpu"
) -> Job:
    """Writes the weights and the first batches of a run of fiddlex, and returns the job of all systems.

    Args:
      config: the config, which `require_comparable` accepts.
      folder: an empty folder.
      check_steps: number of steps whose losses are compared. A batch is written for each; a system that goes on takes
        the first one again.
      cores: the cores that systems are bound to.
      device: the device that systems train on, `cpu` or `cuda`; this function itself computes on the CPU.

    Raises:
      DataError: when a batch has positions that do not count, which drivers do not know.
    """
    jax.config.update("jax_platforms", "cpu")
    program = Program(config, make_mesh(config.mesh))
    with tempfile.TemporaryDirectory() as written:
        path, rows = pathlib.Path(written), program.layout.placement.rows
        write_weights(path, config, program.model, program.init_state().weights, rows, "float32")
        tensors = TensorFolder(path)
        _write(folder / "weights.npz", {name: tensors[name] for name in tensors.places})
    feed = Feed(load_dataset(config), config, program.mesh).train(0)
    batches = [{name: np.asarray(values) for name, values in next(feed).items()} for _ in range(check_steps)]
    if not all((batch["weights"] == 1).all() for batch in batches):
        raise DataError(
            f"data.source={config.data.source}: some positions do not count for the loss, and the drivers of other "
            "systems count all. Use data.source=stdlib or text:PATH."
        )
    fields = ("tokens", "targets")
    _write(folder / "batches.npz", {name: np.stack([batch[name] for batch in batches]) for name in fields})
    rate = learning_rate_schedule(config.optimizer, config.train.num_steps)
    return Job(
        config=as_json(config),
        cores=cores,
        folder=str(folder),
        learning_rates=[float(rate(step)) for step in range(check_steps)],
        check_steps=check_steps,
        device=device,
    )


def _write(path: pathlib.Path, arrays: dict[str, Any]) -> None:
    np.savez(path, **arrays)
