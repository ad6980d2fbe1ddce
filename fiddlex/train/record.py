"""The record of a training step or an evaluation: names and numbers, one line of `metrics.jsonl`."""

from typing import Any

Record = dict[str, Any]
