"""Scores the held-out data with the best or newest good checkpoint of a workdir; prints one JSON object last.

    python experiments/evaluate.py --workdir=/tmp/gpt_tiny [--config.mesh.data=1 --config.data.eval_batches=0 …]
    python experiments/evaluate.py --workdir=/tmp/gpt_tiny --config.data.eval_stride=32
    python experiments/evaluate.py --workdir=/tmp/gpt_tiny --config.data.eval_source=jsonl:/tmp/lines.jsonl

Overrides are laid over the workdir's own config, so the data, the batch or the mesh can be another. With a stride,
windows over long documents overlap, so that every token is scored with at least seq_len − stride tokens before it. A
JSONL file gives a GPT texts to go on with, one on each line: {"text": …} asks for its last word, {"context": …,
"continuation": …} for that, and {"context": …, "choices": […], "label": 0} for the likeliest choice.
"""

import json
import pathlib

from absl import flags, logging

from fiddlex.flags import apply_overrides, define_overrides, define_workdir, run

define_overrides()
_WORKDIR = define_workdir("directory of a training run")
_FORMAT = flags.DEFINE_enum("format", "text", ["text", "json"], "text: a line for people before the JSON object")


def main(argv: list[str]) -> None:
    """Prints `step`, `eval_loss` and what goes with it (`fiddlex.train.evaluation.summarise`)."""
    from fiddlex.train.metrics import describe
    from fiddlex.train.trainer import load_trainer

    trainer = load_trainer(pathlib.Path(_WORKDIR.value), apply_overrides)
    for line in trainer.dataset.description.splitlines():
        logging.info("%s", line)
    record = trainer.evaluate()
    if _FORMAT.value == "text":
        counts = ("tokens", "examples", "lines")
        over = " and ".join(f"{record[f'eval_{name}']:,} {name}" for name in counts if f"eval_{name}" in record)
        print(f"step {record['step']}: {describe(record)}, over {over}")
    print(json.dumps(record))


if __name__ == "__main__":
    run(main)
