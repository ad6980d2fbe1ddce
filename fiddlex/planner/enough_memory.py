"""Compares the memory that a program will need with the memory that is free, before anything is compiled.

The fake devices of a CPU share the memory of their machine, and Linux kills a process that goes beyond it without a
message; an accelerator has a memory of its own, and jax raises an error. The need is that of the memory model
(`fiddlex.costs.memory`) and a lower bound on a CPU: docs/memory.md has what it leaves out, as measured. Invariant:
`judge` refuses no program that fits, by all that was measured.
"""

import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fiddlex.config import Config
from fiddlex.config.overrides import overridden, replaced
from fiddlex.costs.backend import CPU, Backend
from fiddlex.costs.memory import scoring_memory
from fiddlex.costs.weight_memory import weight_bytes
from fiddlex.errors import ConfigError, ScheduleError
from fiddlex.planner.predict import needed_memory, pipeline_of
from fiddlex.planner.report import GIB, gib
from fiddlex.terminal.memory_advice import memory_remedies

WARN_SHARE = 0.8  # of the free memory; a larger need is warned of
PROGRAM_BYTES = 100_000_000  # that XLA and the compiled programs add at least to a process that has imported jax
COPIES = 1.5  # of the state while a checkpoint is written: the copy on the host, and what is on its way to the disk
# By how much predictions may be above the truth: the largest errors measured; on a CPU the tolerance of the tests.
MOST_ABOVE = {"cpu": 0.1, "gpu": 0.13, "tpu": 0.28}
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
    """Memory that some processes of a run share."""

    where: str  # as in `on the machine`
    free: int  # bytes
    swap: int = 0  # bytes of swap space behind it
    num_processes: int = 1  # processes of the run that share it


def judge(need: int, free: Free, platform: str) -> Verdict:
    """Whether `need` bytes are there, by a prediction for devices of a platform (`cpu`, `gpu` or `tpu`)."""
    if need > (free.free + free.swap) * (1 + MOST_ABOVE[platform]):
        return Verdict.TOO_LITTLE
    return Verdict.SCARCE if need > WARN_SHARE * free.free else Verdict.ENOUGH


def device_needs(config: Config, backend: Backend, use: Use) -> Needs:
    """Bytes that a program takes of each device's memory at its peak, by purpose; the config must be settled."""
    if use is Use.SCORING:
        return scoring_memory(config, pipeline_of(config).placement, backend).at_peak
    return needed_memory(config, backend).at_peak


def process_needs(config: Config, use: Use, *, num_processes: int) -> Needs:
    """Bytes that a process with fake devices takes of its machine at its peak, by purpose, for a settled config.

    All that each device has counts once for each device, weights too that are the same on several. While a run writes a
    checkpoint beside its steps, it holds copies of the state, in each of which a weight counts once.
    """
    devices, rest = divmod(config.mesh.num_devices, num_processes)
    if rest:
        raise ConfigError(f"{num_processes} processes cannot share {config.mesh.num_devices} devices equally.")
    needs = {name: devices * size for name, size in device_needs(config, CPU, use).items()}
    if use is Use.TRAINING and config.train.checkpoint_every:
        needs["checkpoint"] = int(COPIES * _state_bytes(config) / num_processes)
    return needs | {"program": PROGRAM_BYTES}


def _state_bytes(config: Config) -> int:
    """Bytes of master weights and optimizer state, each once."""
    alone = replaced(config, {"mesh.data": 1, "mesh.pipe": 1, "mesh.tensor": 1})
    state = weight_bytes(alone, config.model.num_layers, CPU)
    return state.master + state.optimizer


def parts_text(needs: Needs) -> str:
    """The parts of at least 1% of all needs, the largest first, in GiB."""
    least = _LEAST_PART * sum(needs.values())
    by_size = sorted(needs.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {gib(size)}" for name, size in by_size if size >= least)


class Question(NamedTuple):
    """Whether the memory that some processes share is enough for a program."""

    config: Config  # valid and settled
    use: Use
    platform: str
    free: Free
    needs: Needs  # what each process takes of the memory, or each device of its own
    needs_of: Callable[[Config], Needs]  # the function that returned `needs` for the config

    @property
    def need(self) -> int:
        """Bytes that all processes need together."""
        return self._together(self.needs)

    @property
    def verdict(self) -> Verdict:
        return judge(self.need, self.free, self.platform)

    def _together(self, needs: Needs) -> int:
        return self.free.num_processes * sum(needs.values())

    def text(self, *, forced: bool = False) -> str:
        """What is needed, by what, what is free, and what may help, in two lines; `forced`: the program goes on."""
        need, (where, free, swap, times) = self.need, self.free
        needs = {name: times * size for name, size in self.needs.items()}
        behind = f", besides {swap / GIB:.2f} GiB of swap space" if swap else ""
        ends = {Verdict.TOO_LITTLE: "--force was given: it goes on." if forced else "--force goes on all the same."}
        end = ends.get(self.verdict, "It goes on, and may end for lack of memory.")
        remedies = "; ".join(self._remedies(need))
        return (
            f"{self._what(need)}, and {free / GIB:.2f} GiB is free {where}{behind}. In GiB: {parts_text(needs)}. "
            f"{end}\nWhat may help, with what is then needed: {remedies} ({_PAGE})."
        )

    def _what(self, need: int) -> str:
        does = {Use.TRAINING: "Training", Use.MEASURING: "Measuring the step", Use.SCORING: "Evaluating"}[self.use]
        if self.platform != "cpu":
            return f"{does} is predicted to need {need / GIB:.2f} GiB of memory on each device"
        whose = f" of {self.free.num_processes} processes" if self.free.num_processes > 1 else ""
        return f"{does} is predicted to need {need / GIB:.2f} GiB of memory for all fake devices{whose} together"

    def _remedies(self, need: int) -> Iterator[str]:
        """Changes, those of the config with the memory that is then needed."""
        if self.platform == "cpu":
            yield "end other programs that use the memory"
        for text, fields in memory_remedies(self.config, fake=self.platform == "cpu").items():
            if not fields and self.use is not Use.SCORING:
                yield text
            elif fields and (after := self._after(fields)) and after < (1 - _LEAST_PART) * need:
                yield f"{text}: {gib(after)} GiB"

    def _after(self, fields: Mapping[str, Any]) -> int | None:
        """Bytes that are needed once these fields are set; None where they suit neither the mesh nor the schedule."""
        try:
            return self._together(self.needs_of(overridden(self.config, fields).validate()))
        except (ConfigError, ScheduleError):
            return None


def worst(questions: Sequence[Question]) -> Question | None:
    """The question of which the memory is the least enough; None where all have enough."""
    scarce = [each for each in questions if each.verdict is not Verdict.ENOUGH]
    return max(
        scarce, key=lambda each: (each.verdict is Verdict.TOO_LITTLE, each.need / max(each.free.free, 1)), default=None
    )
