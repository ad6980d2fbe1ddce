"""Which checkpoints a run keeps: the newest `train.keep_last`, and with `train.keep_every` older ones too.

Invariant: a run deletes no checkpoint that `train.keep_every` has kept without being told to. Where the field has
changed so that the next save would delete some, the run does not start.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fiddlex.config import TrainConfig
from fiddlex.errors import ConfigError
from fiddlex.files.places import steps_in

_NAMED = 8  # steps that a message names


class Kept(NamedTuple):
    """Which checkpoints to keep when another one was saved, as orbax asks for it."""

    last: int  # how many of the newest
    every: int  # of every so many steps, the first checkpoint is kept too; 0: of none

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        """Whether to keep each of the checkpoints, which are in the order of their steps."""
        steps = [each.step for each in checkpoints]
        kept = {*steps[-self.last :], *first_of_each(steps, self.every)}
        return [step in kept for step in steps]


def first_of_each(steps: Sequence[int], every: int) -> list[int]:
    """The first of `steps`, which ascend, in every span of `every` steps from step `every` on; with 0 none."""
    spans = [step // every for step in steps] if every else []
    return [step for i, (step, span) in enumerate(zip(steps, spans, strict=False)) if span and span not in spans[:i]]


def check_keeps(saved: TrainConfig, config: TrainConfig, directory: Path) -> None:
    """Raises ConfigError when a run would delete checkpoints in `directory` that `saved.keep_every` has kept."""
    steps = steps_in(directory)
    newest = [*steps, steps[-1] + 1] if steps and steps[-1] < config.num_steps else steps  # with the next save
    kept = {*newest[-config.keep_last :], *first_of_each(steps, config.keep_every)}
    if lost := [step for step in first_of_each(steps, saved.keep_every) if step not in kept]:
        before = f"train.keep_every={saved.keep_every}"
        which = "checkpoint of step" if len(lost) == 1 else "checkpoints of steps"
        named = ", ".join(map(str, lost[:_NAMED])) + ", …" * (len(lost) > _NAMED)
        raise ConfigError(
            f"train.keep_every={config.keep_every}: with {before} the run has kept the {which} {named}, which the next "
            f"save would delete. Set {before} again; or move them out of {directory} or delete them, and run the same "
            "command."
        )
