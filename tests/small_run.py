"""A run of a model that trains in seconds: its config, and its command line for a fresh interpreter.

`tests/programs.py` starts programs faster, but cannot attach a terminal or streams that the test chooses.
"""

import json
import os
import pathlib
import sys

from fiddlex.config import Config
from fiddlex.config.files import load_config
from fiddlex.config.overrides import replaced
from fiddlex.config.unused import reset_unused

ROOT = pathlib.Path(__file__).parents[1]
CONFIG = ROOT / "configs/gpt_tiny.py"

# With the tests' own XLA flags and cache of compiled programs (conftest.py), but without what changes the streams.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
ENVIRONMENT["JAX_PLATFORMS"] = "cpu"

SMALL = {
    "model.num_layers": 1,
    "model.hidden_size": 16,
    "model.seq_len": 16,
    "mesh.data": 1,
    "mesh.pipe": 1,
    "mesh.tensor": 1,
    "pipeline.schedule": "1f1b",
    "pipeline.num_chunks": 1,
    "pipeline.num_microbatches": 1,
    "data.global_batch_size": 4,
    "optimizer.schedule": "constant",  # so that a run of any length is the same program
    "optimizer.warmup_steps": 0,  # or each of them would be warned that it ends before the learning rate has risen
    "train.log_every": 1,
    "train.eval_every": 0,
    "train.sample_tokens": 0,
}


def small(text_file: pathlib.Path, **fields: object) -> dict[str, object]:
    """The values of a run's config fields by name; one of `fields` is written as `mesh_data`."""
    source = {"data.source": f"text:{text_file}"}
    return SMALL | source | {name.replace("_", ".", 1): value for name, value in fields.items()}


def train_line(workdir: pathlib.Path, values: dict[str, object]) -> list[str]:
    """The command line of a run with these values."""
    overrides = [f"--config.{name}={value}" for name, value in values.items()]
    return [sys.executable, f"{ROOT}/experiments/train.py", f"--config={CONFIG}", f"--workdir={workdir}", *overrides]


def config_of(values: dict[str, object]) -> Config:
    """The config of a run with these values."""
    config = replaced(load_config(str(CONFIG)), values)
    reset_unused(config, by=values)
    return config.validate()


def steps(workdir: pathlib.Path) -> list[int]:
    """The steps whose records are in the workdir, without the record of goodput."""
    path = workdir / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines() if path.exists() else [])
    return [record["step"] for record in records if "goodput" not in record]
