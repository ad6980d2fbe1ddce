"""fiddlex as one of the systems that `experiments/benchmarks/systems.py` starts.

    python -m experiments.benchmarks.fiddlex_driver JOB.json

It reads nothing of the job but the config: its weights come from `train.seed` and its batches from `data`.
"""

import json
import sys

import jax

import fiddlex
from fiddlex.config import Config
from fiddlex.errors import FiddlexError
from fiddlex.train.trainer import Trainer
from third_party.protocol import Job, Training, serve


def start(job: Job) -> Training:
    """Prepares the training of the job's config."""
    jax.config.update("jax_platforms", "cpu")  # only the CPU is measured, and libtpu would warn that it finds no TPU
    trainer = Trainer(Config.from_json(json.dumps(job.config)))
    trainer.compile()
    jax.block_until_ready(trainer.state)

    def train(steps: int) -> list[float]:
        losses = [trainer.dispatch().metrics["loss"] for _ in range(steps)]
        return [float(loss) for loss in jax.block_until_ready(losses)]

    return Training(
        train,
        f"fiddlex {fiddlex.__version__}, jax {jax.__version__}",
        differs=f"its gradients are of weights that are up to {trainer.delay} updates old" if trainer.delay else "",
    )


if __name__ == "__main__":
    try:
        serve(start)
    except FiddlexError as error:
        sys.exit(str(error))
