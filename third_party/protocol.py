"""What a driver of a system and the benchmark that starts it say to each other.

The benchmark (`experiments/benchmarks/against.py`) starts a driver as a program with one argument, the path of a JSON
file with a `Job`. Both then write lines of JSON:

1. The driver trains `job.check_steps` steps on the first batches of the job, and prints `{"losses": […], "versions":
   "torch 2.13.0"}`. `"differs"` may say why the system cannot compute the same model.
2. For each line of its input, a number of steps, the driver trains that many steps and prints `{"seconds": …,
   "cpu_seconds": …, "peak_bytes": …}`. While it waits for a line, it does no work.
3. At the end of its input, the driver ends.

Everything else that a driver prints goes to standard error, and a driver that cannot go on says why there. Drivers run
in other people's environments, so this module needs only numpy beside the standard library.
"""

import dataclasses
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np


@dataclasses.dataclass(frozen=True)
class Job:
    """What a driver is to train.

    Attributes:
      config: fiddlex's config, as `Config.to_json` writes it.
      cores: the cores that the driver is bound to.
      folder: the folder with `weights.npz`, the initial weights, and `batches.npz`, the batches. Weights have the names
        and shapes that transformers gives those of a GPT-2. Batches are `tokens` and `targets`, int32 [batch, example,
        position].
      learning_rates: the learning rate of each of the first steps; all later steps use the last one.
      check_steps: number of steps whose losses are compared.
      options: the options that the user gave this system.
      clone: path of the system's source code, where the driver needs one; else empty.
      device: the device that trains, `cpu` or `cuda`; a driver of one device takes the first GPU.
    """

    config: dict[str, Any]
    cores: list[int]
    folder: str = ""
    learning_rates: list[float] = dataclasses.field(default_factory=list)
    check_steps: int = 0
    options: dict[str, str] = dataclasses.field(default_factory=dict)
    clone: str = ""
    device: str = "cpu"

    @property
    def model(self) -> dict[str, Any]:
        """The section `model` of the config."""
        return self.config["model"]

    @property
    def dtype(self) -> str:
        """The dtype of activations and matrix products, `float32` or `bfloat16`; weights are float32."""
        return self.config["model"]["dtype"]

    @property
    def num_microbatches(self) -> int:
        """Microbatches in a batch."""
        return self.config["pipeline"]["num_microbatches"]

    def learning_rate(self, step: int) -> float:
        """The learning rate of a step, counted from 0."""
        return self.learning_rates[min(step, len(self.learning_rates) - 1)]

    def weights(self) -> dict[str, np.ndarray]:
        """The initial weights by name, float32."""
        with np.load(pathlib.Path(self.folder) / "weights.npz") as file:
            return {name: file[name] for name in file.files}

    def batches(self) -> tuple[np.ndarray, np.ndarray]:
        """Tokens and targets; a step after the last batch takes the first one again."""
        with np.load(pathlib.Path(self.folder) / "batches.npz") as file:
            return file["tokens"], file["targets"]


class Training(NamedTuple):
    """A model in training.

    Attributes:
      train: trains that many further steps, waits until the device has done them, and returns their losses before each
        update.
      versions: names and versions of what computes the steps.
      cpu_seconds: CPU seconds so far, over all threads of all processes of the system.
      differs: why the model is not that of the job; empty when it is.
      peak_bytes: the most bytes of the device's memory that the driver's arrays have had at once since it started; None
        where the device does not count them, as CPUs do not.
    """

    train: Callable[[int], list[float]]
    versions: str
    cpu_seconds: Callable[[], float] = time.process_time
    differs: str = ""
    peak_bytes: Callable[[], int | None] = lambda: None


def serve(start: Callable[[Job], Training]) -> None:
    """Does what the module's text says, with the training that `start` prepares for a job."""
    job = Job(**json.loads(pathlib.Path(sys.argv[1]).read_text(encoding="utf-8")))
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print

    def answer(**fields: object) -> None:
        print(json.dumps(fields), file=answers, flush=True)

    training = start(job)
    answer(losses=training.train(job.check_steps), versions=training.versions, differs=training.differs)
    for line in sys.stdin:
        cpu_s, start_s = training.cpu_seconds(), time.perf_counter()
        training.train(int(line))
        seconds = time.perf_counter() - start_s
        cpu_seconds = training.cpu_seconds() - cpu_s
        answer(seconds=seconds, cpu_seconds=cpu_seconds, peak_bytes=training.peak_bytes())
