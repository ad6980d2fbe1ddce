"""Prints the temporary bytes of one device in SpectraX's train step of a job, as XLA assigns them; no step is run.

PYTHON -m third_party.spectrax.temporaries JOB.json
"""

import json
import pathlib
import sys

import jax
import numpy as np

from third_party.protocol import Job
from third_party.spectrax.driver import make_step, optimizer, shardings
from third_party.spectrax.model import parameters


def main() -> None:
    """Compiles the step and prints the bytes."""
    job = Job(**json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")))
    step, mesh = make_step(job)
    weights = parameters(job, mesh.size)
    placed = weights, optimizer(job, weights).init(weights)
    placed = jax.device_put(placed, shardings(placed, mesh))
    tokens, targets = job.batches()
    memory = step.lower(*placed, np.float32(0), tokens[0], targets[0]).compile().memory_analysis()
    assert memory is not None
    print(memory.temp_size_in_bytes)


if __name__ == "__main__":
    main()
