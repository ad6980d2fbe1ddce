"""A whole training run in a workdir: the function `train` lists every stage in order.

The host stays one step behind the devices: while they run step k, it reads the metrics of step k − 1, so the devices
never wait for logging. Before a checkpoint or an evaluation, the host also reads the metrics of step k. These say
whether the updated weights are finite, so the run never saves weights that are not.
"""

import contextlib
import functools
import logging
import time
from pathlib import Path
from typing import Literal

from fiddlex.cluster import processes
from fiddlex.cluster.mesh import describe
from fiddlex.cluster.topology import catalogue
from fiddlex.config import Config
from fiddlex.costs.sizes import num_parameters
from fiddlex.data.loader import batch_number
from fiddlex.errors import DataError, FaultError, NonFiniteError
from fiddlex.simulate.lockstep import describe as describe_schedule
from fiddlex.simulate.steady import describe as describe_windows
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.record import Record
from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.best import Best
from fiddlex.train.run.checkpoint import Checkpoints
from fiddlex.train.run.faults import Fault, Faults
from fiddlex.train.run.goodput import Goodput
from fiddlex.train.run.goodput import describe as describe_goodput
from fiddlex.train.run.metrics import MetricsWriter, Reporter
from fiddlex.train.run.original import inherit_original
from fiddlex.train.run.outcome import Outcome
from fiddlex.train.run.profiling import Profiler
from fiddlex.train.run.save_interval import SaveInterval
from fiddlex.train.run.slow_ranks import SlowRanks
from fiddlex.train.run.stop_signals import StopSignals
from fiddlex.train.run.wandb_run import WandbRun
from fiddlex.train.run.watchdog import Watchdog
from fiddlex.train.step.dispatched import Dispatched
from fiddlex.train.step.stopwatch import Activity, Lap, Stopwatch
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)

_FAULTS = {"nonfinite": "its loss or gradient is not finite", "spike": "it is a spike (train.spike_bound)"}
SAMPLING = SamplingConfig(temperature=0.7)  # for the text sampled at the end of a run


def train(config: Config, workdir: Path, *, start_s: float | None = None, given: Config | None = None) -> Outcome:
    """Trains until `train.num_steps` or `train.patience` ends the run; resumes from the newest good checkpoint.

    After SIGINT, SIGTERM or SIGHUP the function finishes the running step, saves, and returns; a further SIGINT ends
    the run without saving.

    Args:
      config: the config; `train` validates it.
      workdir: the directory of the run.
      start_s: when the process started, by the monotonic clock, for the account of its time; None: now.
      given: the config that the user gave, which the workdir keeps; None: `config`. An elastic run that has lost
        processes trains with a smaller one.

    Raises:
      FiddlexError: any subclass. When the loss is not finite, the message names the last good checkpoint.
    """
    stopwatch = Stopwatch(start_s)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())

        # Mesh, data, model.
        trainer = Trainer(config, workdir=workdir, stopwatch=stopwatch)
        if config.train.eval_every:
            trainer.require_heldout()
        _log_what_runs(trainer)

        # Resume.
        schedule = trainer.layout.pipeline.lowered.schedule
        stack.enter_context(workdirs.claimed(workdir, given or config, schedule=schedule))
        checkpoints = stack.enter_context(
            Checkpoints(workdir, keep_last=config.train.keep_last, keep_every=config.train.keep_every)
        )
        if trainer.restore(checkpoints):
            logger.info("Resuming from step %d (%s).", trainer.step, checkpoints.path(trainer.step))
        elif config.train.init_from:
            trainer.start_from(config.train.init_from)
            if processes.is_first():
                inherit_original(config.train.init_from, workdir)
        if processes.is_first():
            workdirs.write_config(workdir)
        goodput = stack.enter_context(Goodput(workdir, stopwatch, resumed_step=trainer.step))
        faults = Faults(workdir, config.train, resumed_step=trainer.step)
        while True:
            trainer.leave_out(faults.left_out)
            try:
                outcome = _train_on(trainer, checkpoints, workdir, stop, goodput, faults)
                break
            except _RollbackError as error:
                _go_back(trainer, checkpoints, faults, error)
                goodput.resume(trainer.step)
    logger.info("%s", outcome.summary(config, workdir, time.monotonic() - stopwatch.start_s))
    return outcome


class _RollbackError(Exception):
    """A step that the run shall go back from.

    Args:
      fault: the step and its batch.
      reason: what is wrong with it.
      blamed: the first step whose checkpoint may hold weights that are to blame.
    """

    def __init__(self, fault: Fault, reason: str, blamed: int):
        super().__init__(reason)
        self.fault, self.reason, self.blamed = fault, reason, blamed


def _go_back(trainer: Trainer, checkpoints: Checkpoints, faults: Faults, error: _RollbackError) -> None:
    """Goes back to the last good checkpoint, and notes the batch to leave out."""
    if processes.is_first():
        logger.warning("%s", error.reason)
    checkpoints.wait()
    steps = processes.told_by_first("checkpoints to go back to", checkpoints.steps)
    if bad := [step for step in steps if step >= error.blamed]:
        checkpoints.set_aside(bad)
    if len(bad) == len(steps):
        raise FaultError(
            f"{error.reason}\nThere is no earlier checkpoint to go back to. Save more often "
            "(train.checkpoint_every), or choose skip in place of rollback."
        )
    faults.add(error.fault)
    trainer.restore(checkpoints)
    faults.resume(trainer.step)
    logger.info("Going back to step %d, and leaving batch %d out.", trainer.step, error.fault.batch)


def _train_on(
    trainer: Trainer, checkpoints: Checkpoints, workdir: Path, stop: StopSignals, goodput: Goodput, faults: Faults
) -> Outcome:
    """Trains from the trainer's step to the end of the run, or until a signal.

    Raises:
      _RollbackError: when the run shall go back to a checkpoint.
    """
    config, stopwatch = trainer.config, trainer.stopwatch
    first, last = trainer.step, config.train.num_steps
    if first >= last:
        logger.info("Nothing to train: the checkpoint is of step %d, train.num_steps is %d.", first, last)
    with contextlib.ExitStack() as stack:
        wants_wandb = config.train.wandb_project and processes.is_first()
        wandb_run = WandbRun(workdir, config, resumed_step=first) if wants_wandb else None
        writer = stack.enter_context(MetricsWriter(workdir, resumed_step=first, wandb_run=wandb_run))
        profiler = stack.enter_context(Profiler(workdir, config.train))
        watchdog = Watchdog(workdir, config.train.step_timeout_s, stopwatch)
        with Reporter(first, last, eval_every=config.train.eval_every) as reporter, watchdog:
            best = stack.enter_context(Best(workdir, config, resumed_step=first))
            saves = SaveInterval(config.train, first, writes=checkpoints.is_writing)
            run = _Run(trainer, checkpoints, saves, faults, best, writer, reporter, goodput, watchdog, profiler)
            if first and _due(first, config.train.eval_every):
                run.evaluate()  # the run may have been killed during this evaluation
            if run.is_past_best():
                logger.info("Nothing to train: %d evaluations were no better than the best.", config.train.patience)
            elif first < last:
                reporter.compiled(trainer.compile())
                run.begin()
            while trainer.step < last and not run.is_past_best() and stop.goes_on(trainer.step):
                run.step()
                if saves.is_due(trainer.step):
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
            run.finish_checkpoints()

        sample = ""
        if config.train.sample_tokens and not stopped_by:
            logger.info("Sampling %d tokens …", config.train.sample_tokens)
            with stopwatch.measure(Activity.EVALUATION):
                sample = "".join(trainer.generate("", config.train.sample_tokens, SAMPLING))
        spent = run.end(finished=not stopped_by)
    evaluation = best.evaluation if config.train.patience else run.last_evaluation
    return Outcome(trainer.step, stopped_by, run.last_record, evaluation, sample, spent)


class _Run:
    """The bookkeeping of one run: the step in flight, and the last record, evaluation and checkpoint."""

    def __init__(
        self,
        trainer: Trainer,
        checkpoints: Checkpoints,
        saves: SaveInterval,
        faults: Faults,
        best: Best,
        writer: MetricsWriter,
        reporter: Reporter,
        goodput: Goodput,
        watchdog: Watchdog,
        profiler: Profiler,
    ):
        self.last_record: Record | None = None
        self.last_evaluation: Record | None = None
        self._trainer, self._checkpoints, self._best = trainer, checkpoints, best
        self._saves, self._faults = saves, faults
        self._writer, self._reporter = writer, reporter
        self._goodput, self._watchdog, self._profiler = goodput, watchdog, profiler
        self._stopwatch, self._lap = trainer.stopwatch, Lap(trainer.stopwatch)
        self._slow_ranks = SlowRanks(trainer.mesh.local_devices[0])
        self._in_flight: Dispatched | None = None
        self._saved_step = trainer.step
        self._times: list[float] = []

    def begin(self) -> None:
        """Ends the start of the process: from now on its time belongs to the steps."""
        self._stopwatch.begin(Activity.HOST)
        self._lap.take()

    def step(self) -> None:
        """Dispatches the next step, then reads the metrics of the previous step."""
        number = self._trainer.step + 1
        self._watchdog.begin(f"Step {number}")
        if self._profiler.starts_with(number):
            self.finish_step()
            with self._stopwatch.measure(Activity.PROFILING), self._saves.excluding():
                self._profiler.start()
        try:
            dispatched = self._trainer.dispatch()
        except DataError:  # the steps before this one are good
            if processes.num_processes() == 1:  # of several, the others may have no error, and would not save too
                self.save()
            raise
        self.finish_step()
        self._in_flight = dispatched
        if self._profiler.ends_with(number):
            self.finish_step()
            with self._stopwatch.measure(Activity.PROFILING), self._saves.excluding():
                self._profiler.stop()

    def finish_step(self) -> None:
        """Waits for the step in flight, if there is one; writes its record if one is due or the step is the last."""
        if self._in_flight is None:
            return
        config = self._trainer.config.train
        try:
            record = self._trainer.record(self._in_flight)
        except FaultError as error:
            raise self._explained(error, self._in_flight.step) from error
        if kind := record.get("skipped"):
            self._faults.add(self._fault(record["step"], kind, "skip"))
            self._reporter.line(f"Step {record['step']} is skipped: {_FAULTS[kind]}.")
        self._in_flight = None
        if decision := self._trainer.decision:
            self._writer.write(decision.to_record())
            self._reporter.line(str(decision))
        self._times.append(record["step_time_s"])
        self._reporter.advance(record["step"])
        if interval := self._saves.step_done():
            self._writer.write({"step": record["step"], **interval.to_record()})
            self._reporter.line(str(interval))
        self.last_record = record
        if _due(record["step"], config.log_every) or (config.log_every and record["step"] == config.num_steps):
            number, spent = len(self._times), self._lap.take()
            record |= self._trainer.throughput.rates(sum(self._times) / number) | {
                "host_time_s": spent[Activity.HOST] / number,
                "data_wait_s": (spent[Activity.DATA] + spent[Activity.STARVED]) / number,
            }
            record |= self._slow_ranks.compare(record) | self._trainer.dataset.counts.take()
            self._times.clear()
            self._writer.write(record)
            self._goodput.write(record["step"])
            self._reporter.record(record)

    def _fault(self, step: int, kind: str, action: Literal["skip", "rollback"]) -> Fault:
        return Fault(step, batch_number(step - 1, self._faults.left_out), kind, action)

    def _explained(self, error: FaultError, step: int) -> Exception:
        """The error of a step with advice, or that which lets the run go back to a checkpoint."""
        # The step computed batch number b = step − 1 with weights up to `delay` updates older than W(b), so every
        # checkpoint from step b − delay on may hold weights that are to blame.
        blamed = max(step - 1 - self._trainer.delay, 0)
        config, before_update = self._trainer.config.train, True
        kind, action = "spike", config.on_spike
        if isinstance(error, NonFiniteError):
            kind, action, before_update = "nonfinite", config.on_nonfinite, error.before_update
        if action == "rollback":
            return _RollbackError(self._fault(step, kind, "rollback"), str(error), blamed)
        if not isinstance(error, NonFiniteError):
            return type(error)(f"{error}\n{self._remedy(None)}")
        if before_update and step == 1:
            return NonFiniteError(f"{error}\n{self._remedy_at_start()}")
        return NonFiniteError(f"{error}\n{self._remedy(blamed if before_update else None)}")

    def evaluate(self) -> None:
        """Evaluates the current weights, unless this run or an interrupted one has already written their evaluation."""
        self.finish_step()
        if self._writer.evaluated_step == self._trainer.step:
            return
        self._watchdog.begin(f"The evaluation at step {self._trainer.step}")
        measured = self._stopwatch.measure(Activity.EVALUATION)
        try:
            with self._reporter.evaluating(self._trainer.step), measured, self._saves.excluding():
                self._slow_ranks.probe()
                self.last_evaluation = self._trainer.evaluate()
        except NonFiniteError as error:
            raise NonFiniteError(f"{error}\n{self._remedy(self._trainer.step)}") from error
        if self._trainer.config.train.patience:
            with self._stopwatch.measure(Activity.CHECKPOINTS), self._saves.excluding():
                self._best.offer(self.last_evaluation, functools.partial(self._trainer.save, weights_only=True))
        self._watchdog.begin("")
        self._writer.write(self.last_evaluation)
        self._account()
        self._reporter.record(self.last_evaluation)

    def save(self) -> None:
        """Saves the current state, unless it is already on disk, or its weights may be to blame for a bad step."""
        self.finish_step()
        if self.last_record and self.last_record.get("skipped") == "nonfinite":
            return
        if self._saved_step != self._trainer.step:
            self._watchdog.begin(f"The checkpoint of step {self._trainer.step}")
            with self._stopwatch.measure(Activity.CHECKPOINTS), self._saves.saving(self._trainer.step):
                self._slow_ranks.probe()
                self._trainer.save(self._checkpoints)
            self._watchdog.begin("")
            self._saved_step = self._trainer.step
            self._account()

    def finish_checkpoints(self) -> None:
        """Waits until all checkpoints are on disk."""
        self._watchdog.begin("The last checkpoint")
        with self._stopwatch.measure(Activity.CHECKPOINTS):
            self._checkpoints.wait()
        self._watchdog.begin("")

    def end(self, *, finished: bool) -> Record | None:
        """Writes and returns the goodput of the run, see `Outcome`.

        Args:
          finished: whether the run has come to its end, so that what follows is not lost time.
        """
        self._account(ended=finished)
        if counts := self._trainer.dataset.counts.describe():
            logger.info("Data: %s.", counts)
        goodput = self._goodput.record()
        if goodput:
            self._writer.write(goodput)
            logger.info("Goodput %s.", describe_goodput(goodput))
        return goodput

    def _account(self, *, ended: bool = False) -> None:
        """Accounts for the time until now, unless this process has taken no step: then the run is as it was."""
        if self.last_record:
            self._goodput.write(self._trainer.step, ended=ended)

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
    device = trainer.mesh.devices.flat[0]
    if trainer.throughput.peak_flops is None and device.platform != "cpu":
        text = "Records have no mfu: the peak of %s in %s is not known. Name it by train.topology: %s, or a .toml file."
        logger.info(text, device.device_kind, config.model.dtype, ", ".join(catalogue()))

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
