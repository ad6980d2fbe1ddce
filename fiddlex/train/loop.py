"""A whole training run in a workdir: the function `train` lists every stage in order.

The host stays one step behind the devices: while they run step k, it reads the metrics of step k − 1, so the devices
never wait for logging. Before a checkpoint or an evaluation, the host also reads the metrics of step k. These say
whether the updated weights are finite, so the run never saves weights that are not.
"""

import contextlib
import dataclasses
import functools
import logging
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from fiddlex.cluster import processes
from fiddlex.cluster.mesh import describe
from fiddlex.config import Config
from fiddlex.costs.sizes import num_parameters
from fiddlex.errors import DataError, NonFiniteError
from fiddlex.simulate.lockstep import describe as describe_schedule
from fiddlex.simulate.steady import describe as describe_windows
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.record import Record
from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.best import DIRECTORY, Best
from fiddlex.train.run.checkpoint import Checkpoints
from fiddlex.train.run.metrics import MetricsWriter, Reporter, readable_time
from fiddlex.train.run.metrics import describe as describe_evaluation
from fiddlex.train.run.original import inherit_original
from fiddlex.train.run.wandb_run import WandbRun
from fiddlex.train.step.dispatched import Dispatched
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)

SAMPLING = SamplingConfig(temperature=0.7)  # for the text sampled at the end of a run


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      step: number of updates done.
      stopped_by: the signal that stopped the run before its end; None when the run reached its end.
      record: the last training record; None when the run took no step.
      evaluation: the last evaluation record, or with `train.patience` the best one; None when the run evaluated
        nothing.
      sample: text sampled at the end; empty unless the config asks for a sample.
    """

    step: int
    stopped_by: signal.Signals | None
    record: Record | None
    evaluation: Record | None
    sample: str

    def to_dict(self) -> Record:
        """One flat JSON object: the last record and evaluation, how the run ended, and the sample."""
        end = {"step": self.step, "interrupted": self.stopped_by is not None, "sample": self.sample}
        if self.evaluation:
            end["eval_step"] = self.evaluation["step"]
        return (self.record or {}) | (self.evaluation or {}) | end


def train(config: Config, workdir: Path) -> Outcome:
    """Trains until `train.num_steps` or `train.patience` ends the run; resumes from the newest good checkpoint.

    After SIGINT, SIGTERM or SIGHUP the function finishes the running step, saves, and returns; a further SIGINT ends
    the run without saving.

    Raises:
      FiddlexError: any subclass. When the loss is not finite, the message names the last good checkpoint.
    """
    start_time = time.monotonic()
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())

        # Mesh, data, model.
        trainer = Trainer(config)
        if config.train.eval_every:
            trainer.require_heldout()
        _log_what_runs(trainer)

        # Resume.
        stack.enter_context(workdirs.claimed(workdir, config, schedule=trainer.layout.pipeline.lowered.schedule))
        checkpoints = stack.enter_context(Checkpoints(workdir, keep=config.train.keep_checkpoints))
        if trainer.restore(checkpoints):
            logger.info("Resuming from step %d (%s).", trainer.step, checkpoints.path(trainer.step))
        elif config.train.init_from:
            trainer.start_from(config.train.init_from)
            if processes.is_first():
                inherit_original(config.train.init_from, workdir)
        if processes.is_first():
            workdirs.write_config(workdir)
        first, last = trainer.step, config.train.num_steps
        if first >= last:
            logger.info("Nothing to train: the checkpoint is of step %d, train.num_steps is %d.", first, last)

        # Train.
        wants_wandb = config.train.wandb_project and processes.is_first()
        wandb_run = WandbRun(workdir, config, resumed_step=first) if wants_wandb else None
        writer = stack.enter_context(MetricsWriter(workdir, resumed_step=first, wandb_run=wandb_run))
        with Reporter(first, last, eval_every=config.train.eval_every) as reporter:
            best = stack.enter_context(Best(workdir, config, resumed_step=first))
            run = _Run(trainer, checkpoints, best, writer, reporter)
            if first and _due(first, config.train.eval_every):
                run.evaluate()  # the run may have been killed during this evaluation
            if run.is_past_best():
                logger.info("Nothing to train: %d evaluations were no better than the best.", config.train.patience)
            elif first < last:
                reporter.compiled(trainer.compile())
            while trainer.step < last and not run.is_past_best() and stop.goes_on(trainer.step):
                run.step()
                if _due(trainer.step, config.train.checkpoint_every):
                    run.save()
                if _due(trainer.step, config.train.eval_every):
                    run.evaluate()
            run.finish_step()
            stopped_by = stop.stopped_by if trainer.step < last and not run.is_past_best() else None

            # Save a last checkpoint and run a last evaluation.
            if config.train.checkpoint_every or stopped_by:
                run.save()
            if config.train.eval_every and not stopped_by:
                run.evaluate()

        checkpoints.wait()
        sample = ""
        if config.train.sample_tokens and not stopped_by:
            logger.info("Sampling %d tokens …", config.train.sample_tokens)
            sample = "".join(trainer.generate("", config.train.sample_tokens, SAMPLING))
    evaluation = best.evaluation if config.train.patience else run.last_evaluation
    outcome = Outcome(trainer.step, stopped_by, run.last_record, evaluation, sample)
    logger.info("%s", _summary(outcome, config, workdir, time.monotonic() - start_time))
    return outcome


class _Run:
    """The bookkeeping of one run: the step in flight, and the last record, evaluation and checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        best: Best,
        writer: MetricsWriter,
        reporter: Reporter,
    ):
        self.last_record: Record | None = None
        self.last_evaluation: Record | None = None
        self._trainer, self._checkpoints, self._best = trainer, checkpoints, best
        self._writer, self._reporter = writer, reporter
        self._in_flight: Dispatched | None = None
        self._saved_step = trainer.step
        self._times: list[float] = []

    def step(self) -> None:
        """Dispatches the next step, then reads the metrics of the previous step."""
        try:
            dispatched = self._trainer.dispatch()
        except DataError:  # the steps before this one are good
            self.save()
            raise
        self.finish_step()
        self._in_flight = dispatched

    def finish_step(self) -> None:
        """Waits for the step in flight, if there is one; writes its record if one is due or the step is the last."""
        if self._in_flight is None:
            return
        config = self._trainer.config.train
        try:
            record = self._trainer.record(self._in_flight)
        except NonFiniteError as error:
            # The step computed batch number b = step − 1 with weights up to `delay` updates older than W(b), so every
            # checkpoint from step b − delay on may hold weights that are to blame.
            blamed = max(self._in_flight.step - 1 - self._trainer.delay, 0)
            if error.before_update and self._in_flight.step == 1:
                raise NonFiniteError(f"{error}\n{self._remedy_at_start()}") from error
            raise NonFiniteError(f"{error}\n{self._remedy(blamed if error.before_update else None)}") from error
        self._in_flight = None
        if decision := self._trainer.decision:
            self._writer.write(decision.to_record())
            self._reporter.line(str(decision))
        self._times.append(record["step_time_s"])
        self._reporter.advance(record["step"])
        self.last_record = record
        if _due(record["step"], config.log_every) or (config.log_every and record["step"] == config.num_steps):
            mean_time = sum(self._times) / len(self._times)
            tokens_per_second = self._trainer.config.tokens_per_step / mean_time
            record |= {"step_time_s": mean_time, "tokens_per_second": tokens_per_second}
            self._times.clear()
            self._writer.write(record)
            self._reporter.record(record)

    def evaluate(self) -> None:
        """Evaluates the current weights, unless this run or an interrupted one has already written their evaluation."""
        self.finish_step()
        if self._writer.evaluated_step == self._trainer.step:
            return
        try:
            with self._reporter.evaluating(self._trainer.step):
                self.last_evaluation = self._trainer.evaluate()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}\n{self._remedy(self._trainer.step)}") from error
        if self._trainer.config.train.patience:
            self._best.offer(self.last_evaluation, functools.partial(self._trainer.save, weights_only=True))
        self._writer.write(self.last_evaluation)
        self._reporter.record(self.last_evaluation)

    def save(self) -> None:
        """Saves the current state, unless it is already on disk."""
        self.finish_step()
        if self._saved_step != self._trainer.step:
            self._trainer.save(self._checkpoints)
            self._saved_step = self._trainer.step

    def is_past_best(self) -> bool:
        """Whether `train.patience` evaluations after the best one were no better."""
        patience, best = self._trainer.config.train.patience, self._best.evaluation
        if not patience or not best:
            return False
        return sum(record["step"] > best["step"] for record in self._writer.evaluations) >= patience

    def _remedy(self, blamed: int | None) -> str:
        """Advice on weights that exploded; sets aside the checkpoints of step `blamed` and later steps."""
        self._checkpoints.wait()
        if bad := [step for step in self._checkpoints.steps() if blamed is not None and step >= blamed]:
            self._checkpoints.set_aside(bad)
        steps = self._checkpoints.steps()
        where = "starts again, since there is no checkpoint"
        if steps:
            where = f"goes on from the last good checkpoint, {self._checkpoints.path(steps[-1])}"
        return (
            "A lower optimizer.learning_rate, a longer optimizer.warmup_steps or optimizer.clip_norm=1.0 often help; "
            f"the same command with them {where}."
        )

    def _remedy_at_start(self) -> str:
        """Advice when the initial weights are to blame, before any update."""
        config = self._trainer.config
        start, remedy = "the initial ones", f"a model.init_std below {config.model.init_std:g}"
        if config.train.init_from:
            start, remedy = f"those of train.init_from={config.train.init_from}", "another run in train.init_from"
        if config.model.dtype != "float32":
            remedy += f" or model.dtype=float32 in place of {config.model.dtype}"
        return (
            f"The weights are still {start}: no update has been made, so a lower optimizer.learning_rate would not "
            f"help. Use {remedy}."
        )


class StopSignals:
    """Turns SIGINT, SIGTERM and SIGHUP into a request to stop after the running step. A context manager.

    A signal to one of several processes stops all of them after the same step.

    A terminal sends SIGHUP when it closes. A run that was started with SIGHUP ignored (`nohup`) continues to ignore it.

    Attributes:
      received: the first signal that this process received; None before any.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._agreed = processes.agreed_stop()
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopSignals":
        if threading.current_thread() is threading.main_thread():  # Python allows no handlers in other threads
            numbers = [signal.SIGINT, signal.SIGTERM]
            if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
                numbers.append(signal.SIGHUP)
            for number in numbers:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    @property
    def stopped_by(self) -> signal.Signals | None:
        """The first signal that any process received; None before the processes have agreed to stop."""
        return None if self._agreed.reason is None else signal.Signals(self._agreed.reason)

    def goes_on(self, step: int) -> bool:
        """Whether to take the step after `step`."""
        return self._agreed.goes_on(step)

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.received:  # launchers may send SIGTERM more than once
            self.received = signal.Signals(number)
            self._agreed.request(number)
            text = "%s: stopping after the running step and saving; Ctrl-C again stops without saving."
            with contextlib.suppress(RuntimeError):  # the signal interrupted another write to this stream
                logger.info(text, self.received.name)


def _log_what_runs(trainer: Trainer) -> None:
    """Logs data, model, schedule and semantics, before the first step."""
    config = trainer.config
    for line in trainer.dataset.description.splitlines():
        logger.info("%s", line)
    logger.info(
        "%s with %s parameters, %s",
        config.model.family,
        f"{num_parameters(config):,}",
        describe(trainer.mesh),
    )

    if config.mesh.pipe > 1:
        layout = trainer.layout
        text = describe_schedule(layout.pipeline.lowered, num_layers=layout.placement.layers_per_stage)
        logger.info("%s%s", "one batch alone, flushed: " if layout.pipeline.windows else "", text)

    for name, windows in trainer.layout.pipeline.windows.items():
        how = "flushed" if not max(windows.semantics.delays) else "from batch to batch"
        logger.info("%s, %s: %s", name, how, describe_windows(windows))
    if len(trainer.layout.pipeline.phases) > 1:
        phases = (f"{p.semantics} in steps {p.start + 1} to {p.end}" for p in trainer.layout.pipeline.phases)
        logger.info("semantics: %s", ", ".join(phases))


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _summary(outcome: Outcome, config: Config, workdir: Path, seconds: float) -> str:
    parts = [f"Stopped by a signal at step {outcome.step}" if outcome.stopped_by else f"Done: step {outcome.step}"]
    if not outcome.stopped_by and outcome.step < config.train.num_steps:
        parts[0] += f" of {config.train.num_steps}, as {config.train.patience} evaluations got no better,"
    parts[0] += f" after {readable_time(seconds)}"
    if outcome.record:
        parts.append(f"loss {outcome.record['loss']:.4f}")
    if outcome.evaluation:
        best = f"best at step {outcome.evaluation['step']}: " * bool(config.train.patience)
        parts.append(f"{best}{describe_evaluation(outcome.evaluation)}")
    saved = "".join(f", {name}/" for name in ("checkpoints", DIRECTORY) if (workdir / name).exists())
    parts.append(f"metrics.jsonl{saved} in {workdir}")
    if outcome.stopped_by:
        parts.append("run the same command again to go on")
    return "; ".join(parts) + "."
