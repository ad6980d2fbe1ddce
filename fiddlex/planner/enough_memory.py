"""Compares the memory that a program will need with the memory that is free, before anything is compiled.

The fake devices of a CPU share the memory of their machine, and Linux kills a process that goes beyond it without a
message; an accelerator has a memory of its own, and jax raises an error. The need is that of the memory model
(`fiddlex.costs.memory`) and a lower bound on a CPU: docs/memory.md has what it leaves out, as measured. Invariant:
`judge` refuses no program that fits, by all that was measured.
"""

import contextlib
import enum
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.config.memory_advice import memory_remedies
from fiddlex.config.overrides import replaced
from fiddlex.costs.backend import CPU, Backend
from fiddlex.costs.memory import scoring_memory
from fiddlex.costs.weight_memory import weight_bytes
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.planner.predict import needed_memory, pipeline_of
from fiddlex.planner.report import gib

WARN_SHARE = 0.8  # of the free memory; a larger need is warned of
PROGRAM_BYTES = 100_000_000  # that XLA and the compiled programs add at least to a process that has imported jax
MOST_ABOVE = {"cpu": 0.0, "gpu": 0.13, "tpu": 0.28}  # largest errors by which predictions were above what was measured
_PAGE = "docs/memory.md#before-memory-runs-out"
_LEAST_PART = 0.01  # of the need; smaller parts are left out of messages

Needs = Mapping[str, int]  # bytes by purpose


class Use(enum.Enum):
    """What a program does with a config."""

    TRAINING = "training"
    MEASURING = "measuring"  # steps that save nothing
    SCORING = "scoring"


class Verdict(enum.Enum):
    """Whether memory is enough."""

    ENOUGH = "enough"
    SCARCE = "scarce"  # enough by the prediction, or too little by less than its error, or with swap space
    TOO_LITTLE = "too little"


class Free(NamedTuple):
    """Memory that some processes of a run share.

    Attributes:
      where: what has the memory, as in `on the machine`.
      free: bytes that are free.
      swap: bytes of swap space behind it.
      num_processes: number of processes of the run that share it.
    """

    where: str
    free: int
    swap: int = 0
    num_processes: int = 1


def judge(need: int, free: Free, platform: str) -> Verdict:
    """Whether `need` bytes are there, by a prediction for devices of a platform (`cpu`, `gpu` or `tpu`)."""
    if need > (free.free + free.swap) * (1 + MOST_ABOVE[platform]):
        return Verdict.TOO_LITTLE
    return Verdict.SCARCE if need > WARN_SHARE * free.free else Verdict.ENOUGH


def device_needs(config: Config, backend: Backend, use: Use) -> Needs:
    """Bytes that a program takes of each device's memory at its peak, by purpose.

    Args:
      config: a valid and settled config.
      backend: the backend that compiles the program.
      use: what the program does.

    Raises:
      ConfigError: when the config has no pipeline, as in `pipeline_of`.
    """
    if use is Use.SCORING:
        return scoring_memory(config, pipeline_of(config).placement, backend).at_peak
    return needed_memory(config, backend).at_peak


def process_needs(config: Config, use: Use, *, num_processes: int) -> Needs:
    """Bytes that a process with fake devices takes of its machine at its peak, by purpose.

    All that each device has counts once for each device, weights too that are the same on several. While a run saves a
    checkpoint beside its steps, it holds a copy of the state, each weight once.

    Args:
      config: a valid and settled config.
      use: what the program does.
      num_processes: number of processes that share the devices of the mesh equally.

    Raises:
      ConfigError: when the config has no pipeline, as in `pipeline_of`.
    """
    devices = config.mesh.num_devices // num_processes
    needs = {name: devices * size for name, size in device_needs(config, CPU, use).items()}
    if use is Use.TRAINING and config.train.checkpoint_every:
        needs["checkpoint"] = _state_bytes(config) // num_processes
    return needs | {"program": PROGRAM_BYTES}


def _state_bytes(config: Config) -> int:
    """Bytes of master weights and optimizer state, each once."""
    alone = replaced(config, {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1})
    state = weight_bytes(alone, config.model.num_layers, CPU)
    return state.master + state.optimizer


class Question(NamedTuple):
    """Whether the memory that some processes share is enough for a program.

    Attributes:
      config: a valid and settled config.
      use: what the program does with it.
      platform: the platform of its devices.
      free: the memory.
      needs: takes a config, and returns what each process takes of the memory, or each device of its own.
    """

    config: Config
    use: Use
    platform: str
    free: Free
    needs: Callable[[Config], Needs]

    @property
    def need(self) -> int:
        """Bytes that all processes need together."""
        return self._need(self.config)

    @property
    def verdict(self) -> Verdict:
        """The answer."""
        return judge(self.need, self.free, self.platform)

    def _need(self, config: Config) -> int:
        return self.free.num_processes * sum(self.needs(config).values())

    def text(self, *, forced: bool = False) -> str:
        """What is needed, by what, what is free and what may help, for people.

        Args:
          forced: whether the program goes on although memory is too little.
        """
        need, (where, free, swap, num_processes) = self.need, self.free
        by_size = sorted(self.needs(self.config).items(), key=lambda part: -part[1])
        shown = [(name, num_processes * size) for name, size in by_size if num_processes * size >= _LEAST_PART * need]
        parts = ", ".join(f"{name} {gib(size)}" for name, size in shown)
        behind = f" and {gib(swap)} of swap space" if swap else ""
        end = {
            Verdict.TOO_LITTLE: "It goes on by --force." if forced else "--force runs it all the same.",
            Verdict.SCARCE: "It goes on, and may end for lack of memory.",
            Verdict.ENOUGH: "",
        }[self.verdict]
        return (
            f"{self._what()} {gib(need)} GiB of memory, and {gib(free)} GiB are free{behind} {where}: {parts}. "
            f"What may help: {self._remedies(need)}. {end} ({_PAGE})"
        )

    def _what(self) -> str:
        does = {Use.TRAINING: "Training", Use.MEASURING: "Measuring the step", Use.SCORING: "The evaluation"}[self.use]
        if self.platform != "cpu":
            return f"{does} needs on each device"
        if self.free.num_processes > 1:
            return f"{does} needs for the fake devices of {self.free.num_processes} processes together"
        return f"{does} needs for all fake devices together"

    def _remedies(self, need: int) -> str:
        """Changes of the config with the memory that is then needed, and those that have no figure."""
        said = ["end other programs that use it"] * (self.platform == "cpu")
        for text, fields in memory_remedies(self.config, fake=self.platform == "cpu").items():
            if not fields:
                said += [text] * (self.use is not Use.SCORING)
                continue
            with contextlib.suppress(ConfigError, ScheduleError):  # not for this schedule or mesh
                after = self._need(replaced(self.config, fields).validate())
                if after < (1 - _LEAST_PART) * need:
                    said.append(f"{text} (then {gib(after)} GiB)")
        return ", or ".join(said)


def worst(questions: Sequence[Question]) -> Question | None:
    """The question of which the memory is the least enough; None where all have enough."""
    scarce = [each for each in questions if each.verdict is not Verdict.ENOUGH]
    return max(
        scarce, key=lambda each: (each.verdict is Verdict.TOO_LITTLE, each.need / max(each.free.free, 1)), default=None
    )
