"""The best weights of a run that ends when it stops improving: `best/` and `best.json` in its workdir.

Invariant: `best.json` is the evaluation of the weights in `best/`, and no later evaluation was better. When a run
resumes after a kill or goes back from a bad step, it sets aside best weights of steps that it trains again, and keeps
those of earlier steps. Weights that may be to blame for a bad step are among the former, since the run goes back to a
checkpoint before them. Nothing is lost: a batch that is left out comes after the evaluated step, so the run makes the
same weights again.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path

from fiddlex.cluster import processes
from fiddlex.config import Config
from fiddlex.errors import CheckpointError
from fiddlex.files.small_files import read_small
from fiddlex.files.whole_files import write_whole
from fiddlex.terminal.progress import phase
from fiddlex.train.inference.evaluation import merit
from fiddlex.train.record import Record, parse_record
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.workdir import writing
from fiddlex.train.step.program import Program
from fiddlex.train.step.state import SavedState

logger = logging.getLogger(__name__)

DIRECTORY, RECORD = "best", "best.json"


class Best:
    """The best weights of one run. A context manager: leaving it waits for the background writer.

    Best weights of steps after `resumed_step` are set aside.
    """

    def __init__(self, workdir: Path, config: Config, *, resumed_step: int):
        self._path, self._task = workdir / RECORD, config.model.task
        self._checkpoints = Checkpoints(workdir, keep_last=1, name=DIRECTORY, waits=True)
        # The evaluation of the best weights; None before there are any.
        self.evaluation = processes.told_by_first("best of the run", lambda: read_best(workdir, self._task))
        if self.evaluation and self.evaluation["step"] > resumed_step:
            self.evaluation = None
        kept = self.evaluation and self.evaluation["step"]
        if config.train.patience:
            steps = processes.told_by_first(f"steps in {DIRECTORY}", self._checkpoints.steps)
            if others := [step for step in steps if step != kept]:
                self._checkpoints.set_aside(others)

    def __enter__(self) -> "Best":
        return self

    def __exit__(self, *exception: object) -> None:
        self._checkpoints.close()

    def offer(self, evaluation: Record, save: Callable[[Checkpoints], None]) -> None:
        """Saves the current weights, by calling `save`, if `evaluation`, which is theirs, is the best so far."""
        if self.evaluation and merit(evaluation, self._task) <= merit(self.evaluation, self._task):
            return
        save(self._checkpoints)
        self._checkpoints.wait()
        self.evaluation = evaluation
        if not processes.is_first():
            return
        with writing(self._path):
            write_whole(self._path, json.dumps(evaluation) + "\n")


def read_best(workdir: Path, task: str) -> Record | None:
    """The evaluation of the weights in `best/`; None when either is missing or cannot be read."""
    path = workdir / RECORD
    try:
        evaluation = parse_record(read_small(path))
        merit(evaluation, task)  # so that a later evaluation can be compared with it
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        logger.warning("%s is not used, since it is no evaluation of the best weights: %s.", path, error)
        return None
    with Checkpoints(workdir, name=DIRECTORY) as checkpoints:
        if evaluation["step"] in checkpoints.steps():
            return evaluation
        logger.warning(
            "%s tells of the best weights, those of step %d, which are not in %s.",
            path,
            evaluation["step"],
            checkpoints.directory,
        )
    return None


def restore_result(workdir: Path, config: Config, program: Program, *, step: int | None = None) -> SavedState | None:
    """A run's final weights in the program's layout: its best if it saves them, else its newest; None without any.

    With `step` they are those of the checkpoint of that step.
    """
    abstract, layers = program.abstract_state, program.layout.placement.layers
    wanted, padded_vocab = SavedState(abstract.step, abstract.weights), program.config.padded_vocab_size
    names = ["checkpoints"]
    keeps_best = bool(config.train.patience) and step is None
    if keeps_best and processes.told_by_first("best of the run", lambda: read_best(workdir, config.model.task)):
        names.insert(0, DIRECTORY)
    for name in names:
        with Checkpoints(workdir, name=name) as checkpoints:
            try:
                with phase("Reading the checkpoint"):
                    state = checkpoints.restore_newest(wanted, layers=layers, padded_vocab=padded_vocab, only=step)
            except CheckpointError as error:
                if name == names[-1]:
                    raise
                if processes.is_first():
                    logger.warning("%s\nThe newest checkpoint is taken in place of the best.", error)
                continue
            if state is not None:
                logger.info("Weights of step %d, %s.", int(state.step), checkpoints.path(int(state.step)))
            return state
    return None
