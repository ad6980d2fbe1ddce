"""fiddlex as one of the systems that `experiments/benchmarks/systems.py` starts.

    python -m experiments.benchmarks.fiddlex_driver JOB.json

It reads nothing of the job but the config and the device: its weights come from `train.seed` and its batches from
`data`. On a GPU jax reserves no memory in advance, since other systems wait for their turns on the same GPU.
"""

import json
import os
import sys

import jax

import fiddlex
from fiddlex.config import Config
from fiddlex.errors import FiddlexError
from fiddlex.train.trainer import Trainer
from third_party.protocol import Job, Training, serve


def start(job: Job) -> Training:
    """Prepares the training of the job's config."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when jax starts its GPUs
    jax.config.update("jax_platforms", job.device)  # on CPUs libtpu would warn that it finds no TPU
    trainer = Trainer(Config.from_json(json.dumps(job.config)))
    trainer.compile()
    jax.block_until_ready(trainer.state)

    def train(steps: int) -> list[float]:
        losses = [trainer.dispatch().metrics["loss"] for _ in range(steps)]
        jax.block_until_ready((losses, trainer.state))
        return [float(loss) for loss in losses]

    def peak_bytes() -> int | None:
        stats = trainer.mesh.devices.flat[0].memory_stats() or {}
        peak: int | None = stats.get("peak_bytes_in_use")
        return peak

    return Training(
        train,
        f"fiddlex {fiddlex.__version__}, jax {jax.__version__}",
        differs=f"its gradients are of weights that are up to {trainer.delay} updates old" if trainer.delay else "",
        peak_bytes=peak_bytes,
    )


if __name__ == "__main__":
    try:
        serve(start)
    except FiddlexError as error:
        sys.exit(str(error))
