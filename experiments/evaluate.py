"""Scores the held-out data with the newest good checkpoint of a workdir; prints one JSON object last.

    python experiments/evaluate.py --workdir=/tmp/gpt_tiny [--config.mesh.data=1 --config.data.eval_batches=0 …]

Overrides are laid over the workdir's own config, so the data, the batch or the mesh can be another.
"""

import json
import pathlib

from absl import flags

from fiddlex.flags import apply_overrides, define_overrides, run

define_overrides()
_WORKDIR = flags.DEFINE_string("workdir", None, "directory of a training run", required=True)


def main(argv: list[str]) -> None:
    """Prints `step`, `eval_loss` and what goes with it."""
    from fiddlex.train.trainer import load_trainer

    trainer = load_trainer(pathlib.Path(_WORKDIR.value), apply_overrides)
    print(json.dumps(trainer.evaluate()))


if __name__ == "__main__":
    run(main)
