"""The record of a training step or an evaluation: names and numbers, one line of `metrics.jsonl`."""

from typing import Any

from fiddlex.files.small_files import json_object

Record = dict[str, Any]


def parse_record(line: str | bytes) -> Record:
    """The record in a line of JSON.

    Raises ValueError when the line is not a JSON object with a step, or a result of an evaluation is no number.
    """
    record = json_object(line)
    step = record.get("step")
    if type(step) is not int or not 0 <= step < 2**63:
        raise ValueError("it has no step")
    for name, value in record.items():
        if name.startswith("eval_") and type(value) not in (int, float):
            raise ValueError(f"its {name} is no number")
    return record
