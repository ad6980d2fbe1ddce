"""A study on one machine: each part adds a line to its results as soon as it ends, and a failed part stops no other."""

import datetime
import logging
import pathlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from experiments.results import append_result, read_results

logger = logging.getLogger("fiddlex.gpu")

Record = dict[str, Any]


class Study:
    """The results of a study, which a later run continues.

    Args:
      path: the JSON Lines file of the results, read and added to.
      machine: the machine of this run (`experiments.on_device.machine`).
      after: what to call when a result has been added.

    Attributes:
      records: all results of the file.
      failed: the parts that failed in this run.

    Raises:
      ConfigError: when the file has other lines.
    """

    def __init__(self, path: pathlib.Path, machine: Record, after: Callable[[list[Record]], None]):
        self._path, self._machine, self._after = path, machine, after
        self.failed: list[str] = []
        self.records = read_results(path, ["stage", "name", "inputs", "machine", "seconds", "date"])

    def measure(self, stage: str, name: str, inputs: Mapping[str, Any], function: Callable[[], Record]) -> None:
        """Adds the result of a part, unless it is there from the same inputs on the same kind of machine.

        Args:
          stage: the stage that the part belongs to.
          name: the part.
          inputs: what else decides about the result, as JSON has it.
          function: computes the result; the field `error` says that it is no good, so that a later run tries again.
        """
        key = {"stage": stage, "name": name, "inputs": dict(inputs), "machine": self._machine}
        if any(key.items() <= record.items() and "error" not in record for record in self.records):
            logger.info("%s, %s: is there already.", stage, name)
            return
        logger.info("%s, %s: begins.", stage, name)
        start = time.monotonic()
        try:
            result = function()
        except Exception as error:  # whatever it is, the other parts are worth having
            logger.debug("%s, %s", stage, name, exc_info=True)
            result = {"error": str(error) or repr(error)}
        took = {"seconds": round(time.monotonic() - start, 1), "date": str(datetime.date.today())}
        self.records.append(key | took | result)
        append_result(self._path, self.records[-1])
        self._after(self.records)
        if "error" in result:
            self.failed.append(f"{stage}, {name}")
            logger.error("%s, %s: %s", stage, name, result["error"])
