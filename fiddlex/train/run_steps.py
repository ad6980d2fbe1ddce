"""The steps of a run, one of which is in flight, and what the run does between them: evaluations and saves.

The host stays one step behind the devices: while they run step k, it reads the metrics of step k − 1, so the devices
never wait for logging. Before a checkpoint or an evaluation, the host also reads the metrics of step k. These say
whether the updated weights are finite, so the run never saves weights that are not.
"""

import contextlib
import functools
from collections.abc import Iterator

from fiddlex.cluster import processes
from fiddlex.errors import CheckpointError, DataError, FaultError, FiddlexError, NonFiniteError
from fiddlex.terminal.memory_advice import is_lack_of_memory
from fiddlex.terminal.progress import phase
from fiddlex.train.bad_steps import BadSteps, RollbackError
from fiddlex.train.inference.scorer import LeftError
from fiddlex.train.instruments import Instruments
from fiddlex.train.record import Record
from fiddlex.train.run.best import Best
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.faults.stop_signals import StopSignals
from fiddlex.train.run.records.reports import Reports
from fiddlex.train.step.dispatched import Dispatched
from fiddlex.train.step.stopwatch import Activity
from fiddlex.train.trainer import Trainer


class RunSteps:
    """Takes the steps of a run, evaluates and saves; a signal that `stop` has got also ends an evaluation."""

    def __init__(
        self,
        trainer: Trainer,
        *,
        checkpoints: Checkpoints,
        best: Best,
        bad_steps: BadSteps,
        reports: Reports,
        instruments: Instruments,
        stop: StopSignals,
    ):
        self._trainer, self._config = trainer, trainer.config.train
        self._checkpoints, self._best, self._bad_steps = checkpoints, best, bad_steps
        self._reports, self._instruments, self._stop = reports, instruments, stop
        self._in_flight: Dispatched | None = None
        self._saved_step = trainer.step

    def begin(self) -> None:
        """Compiles the train step, which ends the start of the process."""
        if compilation := self._trainer.compile():
            self._reports.terminal.compiled(compilation.seconds, was_kept=compilation.was_kept)
        self._trainer.make_state()  # now, since a signal that comes before the first step ends the run at once
        self._reports.terminal.begin()
        self._instruments.begin()

    def step(self) -> None:
        """Dispatches the next step, then reads the metrics of the previous step.

        Raises FaultError when the run has had more than `train.max_faults` bad steps. Steps that were skipped changed
        no weight, so the run saves before it ends, unless this step shows that its weights may be to blame.
        """
        if self._checkpoints.has_failed():
            self.save()
        number, profiler = self._trainer.step + 1, self._instruments.profiler
        self._instruments.begin_step(number)
        if profiler.starts_with(number):
            self.finish_step()
            with self._instruments.between_steps(Activity.PROFILING):
                profiler.start()
        try:
            with self._saving_for_lack_of_memory():
                dispatched = self._trainer.dispatch()
        except DataError:  # the steps before this one are good
            if processes.num_processes() == 1:  # of several, the others may have no error, and would not save too
                self.save()
            raise
        previous, self._in_flight = self._in_flight, dispatched
        self._finish(previous)
        if profiler.ends_with(number):
            self.finish_step()
            with self._instruments.between_steps(Activity.PROFILING):
                profiler.stop()
        if self._bad_steps.are_too_many:
            self.save()  # reads the metrics of this step first, which tell whether the weights before it are good
            self._bad_steps.check()

    def finish_step(self) -> None:
        """Waits for the step in flight, if there is one.

        Writes its record if one is due, if the step was skipped or if it is the last; with `log_every=0` none.

        Raises RollbackError when the run shall go back from the step, and FaultError when the step is not finite or a
        spike, and ends the run. After a spike the run has saved, unless the step after it shows that its weights may be
        to blame.
        """
        dispatched, self._in_flight = self._in_flight, None
        self._finish(dispatched)

    def _finish(self, dispatched: Dispatched | None) -> None:
        """`finish_step` for a step that is no longer in flight, or for none."""
        if dispatched is None:
            return
        try:
            record = self._trainer.record(dispatched)
        except FaultError as error:
            if self._bad_steps.note_spike(error, dispatched.step):
                with contextlib.suppress(FaultError, RollbackError):  # of the next step; this one comes first
                    self.save()
            raise self._bad_steps.explained(error, dispatched.step) from error
        if skipped := self._bad_steps.note(record, dispatched):
            self._reports.terminal.line(skipped)
        if decision := self._trainer.decision:
            self._reports.decision(decision.to_record(), str(decision))
        self._reports.step_done(record)
        if interval := self._instruments.step_done(record):
            self._reports.decision({"step": record["step"], **interval.to_record()}, str(interval))
        is_last = record["step"] == self._config.num_steps
        is_logged = is_last or skipped or is_due(record["step"], self._config.log_every)
        if self._config.log_every and is_logged:
            record |= self._instruments.figures(record) | self._trainer.dataset.counts.take()
            self._reports.training(record)

    def evaluate(self) -> None:
        """Evaluates the current weights, unless this run or an interrupted one has already written their evaluation.

        A signal leaves the evaluation unfinished; the run evaluates when it is continued.
        """
        self.finish_step()
        step = self._trainer.step
        if self._reports.evaluated_step == step:
            return
        with self._instruments.watching(f"The evaluation at step {step}"):
            try:
                evaluation = self._evaluation(step)
            except LeftError:
                self._reports.terminal.line(f"The evaluation at step {step} is left for when the run goes on.")
                return
            if self._config.patience:
                with self._instruments.between_steps(Activity.CHECKPOINTS):
                    self._best.offer(evaluation, functools.partial(self._trainer.save, weights_only=True))
        self._reports.evaluation(evaluation)

    def _evaluation(self, step: int) -> Record:
        measured = self._instruments.between_steps(Activity.EVALUATION)
        try:
            with self._saving_for_lack_of_memory(), self._reports.terminal.evaluating(step), measured:
                self._instruments.probe()
                return self._trainer.evaluate(goes_on=lambda: self._stop.ends_now is None)
        except NonFiniteError as error:
            raise self._bad_steps.explained_evaluation(error) from error

    @contextlib.contextmanager
    def _saving_for_lack_of_memory(self) -> Iterator[None]:
        """Saves where the body runs out of memory and the state before it is still there: saving needs less."""
        try:
            yield
        except Exception as error:
            # Of several processes the others may have had enough memory, and would not save too.
            if is_lack_of_memory(error) and processes.num_processes() == 1 and self._trainer.holds_state:
                with contextlib.suppress(FiddlexError, RuntimeError):  # the lack of memory comes first
                    self.save()
            raise

    def save(self) -> None:
        """Saves the current state, unless it is already on disk, or its weights may be to blame for a bad step.

        Raises CheckpointError when the save cannot begin, or it fails like the save before, which failed in the
        background.
        """
        self.finish_step()
        record, step = self._reports.last_record, self._trainer.step
        if self._saved_step == step and not self._checkpoints.has_failed():
            return
        self._reports.check()
        if record and record.get("skipped") == "nonfinite":
            self._reports.terminal.line(f"Nothing is saved after step {step}: its weights may be to blame for it.")
            return
        with self._instruments.saving(step), phase(f"Saving step {step}"):
            self._instruments.probe()
            is_last_try = self._last_save_failed(step)
            self._trainer.save(self._checkpoints)
            if is_last_try:
                self._checkpoints.wait()
        self._saved_step = step
        self._reports.account(step)

    def _last_save_failed(self, step: int) -> bool:
        """Waits for the last save; tells of its error if it has failed in the background.

        With several processes it raises that error, since the save may have failed in one of them alone.
        """
        try:
            self._checkpoints.wait()
        except CheckpointError as error:
            if processes.num_processes() > 1:
                raise
            self._reports.terminal.line(f"{error} The run tries it once more, with step {step}.")
            return True
        return False

    def finish_checkpoints(self) -> None:
        watched = self._instruments.watching("The last checkpoint")
        with watched, phase("Writing the last checkpoint"), self._instruments.between_steps(Activity.CHECKPOINTS):
            self._checkpoints.wait()

    def is_past_best(self) -> bool:
        """Whether `train.patience` evaluations after the best one were no better."""
        patience, best = self._config.patience, self._best.evaluation
        if not patience or not best:
            return False
        return self._reports.num_evaluations_after(best["step"]) >= patience


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every `every` steps happens after `step`; 0: never."""
    return every > 0 and step % every == 0
