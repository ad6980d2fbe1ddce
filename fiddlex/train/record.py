"""What training and evaluation say of a step: names and numbers, a line of `metrics.jsonl`."""

from typing import Any

Record = dict[str, Any]
