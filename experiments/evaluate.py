"""Scores the held-out data with the newest good checkpoint of a workdir; prints one JSON object last.

    python experiments/evaluate.py --workdir=/tmp/gpt_tiny [--config.mesh.data=1 --config.data.eval_batches=0 …]

Overrides are laid over the workdir's own config, so the data, the batch or the mesh can be another.
"""

import json
import pathlib

from absl import flags

from fiddlex.flags import apply_overrides, define_overrides, define_workdir, run

define_overrides()
_WORKDIR = define_workdir("directory of a training run")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "text: a line for people before the JSON object")


def main(argv: list[str]) -> None:
    """Prints `step`, `eval_loss` and what goes with it."""
    from fiddlex.train.trainer import load_trainer

    record = load_trainer(pathlib.Path(_WORKDIR.value), apply_overrides).evaluate()
    if _FORMAT.value == "text":
        print(f"step {record['step']}: held-out loss {record['eval_loss']:.4f} over {record['eval_tokens']:,} tokens")
    print(json.dumps(record))


if __name__ == "__main__":
    run(main)
