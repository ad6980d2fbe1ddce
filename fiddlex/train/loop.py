"""A whole training run in a workdir: the function `train` lists every stage in order."""

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from fiddlex.cluster import processes
from fiddlex.cluster.mesh import describe
from fiddlex.config import Config
from fiddlex.config.unused import unused_fields
from fiddlex.config.values.source import lies_in
from fiddlex.config.warmup import long_warmup
from fiddlex.costs.sizes import num_parameters
from fiddlex.data.caching import require_folders
from fiddlex.errors import CheckpointError
from fiddlex.hardware.topology import catalogue
from fiddlex.models.flash import kernel_on
from fiddlex.planner.enough_memory import Use
from fiddlex.planner.settle import with_settled
from fiddlex.schedules.text import order_to_text
from fiddlex.simulate.lockstep import describe as describe_schedule
from fiddlex.simulate.steady import describe as describe_windows
from fiddlex.simulate.steady import no_gain
from fiddlex.terminal import library_log, progress
from fiddlex.terminal.memory_advice import is_lack_of_memory
from fiddlex.terminal.progress import phase
from fiddlex.terminal.readable import counted
from fiddlex.train.bad_steps import BadSteps, RollbackError
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.instruments import Instruments
from fiddlex.train.run import workdir as workdirs
from fiddlex.train.run.best import Best
from fiddlex.train.run.changed_rate import changed_rate
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.faults.faults import Faults
from fiddlex.train.run.faults.require_memory import predicted_text, require_host_memory, require_memory
from fiddlex.train.run.faults.stop_signals import StopSignals
from fiddlex.train.run.kept_schedule import with_kept_schedule
from fiddlex.train.run.records.goodput import Goodput
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.run.records.outcome import Outcome
from fiddlex.train.run.records.reports import Reports
from fiddlex.train.run.records.terminal_lines import Reporter
from fiddlex.train.run.records.wandb_run import WandbRun
from fiddlex.train.run.transfer.original import inherit_original
from fiddlex.train.run_steps import RunSteps, is_due
from fiddlex.train.step.optimizer import num_updates
from fiddlex.train.step.stopwatch import Activity, Stopwatch
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)

SAMPLING = SamplingConfig(temperature=0.7)  # for the text sampled at the end of a run


def train(
    config: Config, workdir: Path, *, start_s: float | None = None, given: Config | None = None, force: bool = False
) -> Outcome:
    """Trains until `train.num_steps` or `train.patience` ends the run; resumes from the newest good checkpoint.

    After SIGINT, SIGTERM, SIGHUP, SIGUSR1 or SIGUSR2 the function finishes the running step, saves, and returns; a
    further SIGINT ends the run without saving.

    Args:
      config: `train` validates it. Where the source of its schedule is gone, a run that goes on takes the table kept in
        its workdir.
      workdir: the directory of the run.
      start_s: when the process started, by the monotonic clock, for the account of its time; None: now.
      given: the config that the user gave, which the workdir keeps; None: `config`. An elastic run that has lost
        processes trains with a smaller one.
      force: whether to train although the memory will not be enough (`fiddlex.train.run.faults.require_memory`).

    Raises:
      FiddlexError: any subclass. When the loss is not finite, the message names the last good checkpoint.
    """
    stopwatch = Stopwatch(start_s)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopSignals())

        # Mesh, data, model.
        given = given or config
        config = with_kept_schedule(config, workdir)
        require_host_memory(config)
        trainer = Trainer(config, workdir=workdir, stopwatch=stopwatch)
        config, kept = trainer.config, with_settled(given, trainer.config)
        if config.train.eval_every:
            trainer.require_heldout()
        require_folders(config, trainer.dataset.sources)
        _log_what_runs(trainer)
        require_memory(config, trainer.mesh, Use.TRAINING, force=force)

        # Resume.
        digests = trainer.dataset.digests(kept)
        stack.enter_context(workdirs.claimed(workdir, kept, digests=digests))
        library_log.keep_in(workdir)
        checkpoints = stack.enter_context(
            Checkpoints(workdir, keep_last=config.train.keep_last, keep_every=config.train.keep_every)
        )
        if trainer.restore(checkpoints):
            logger.info("Resuming from step %d (%s).", trainer.step, checkpoints.path(trainer.step))
            if processes.is_first():
                updates = int(num_updates(trainer.state.optimizer))
                jump = changed_rate(workdirs.read_config(workdir), config, updates)
                if jump and trainer.step < config.train.num_steps:
                    logger.warning("%s", jump)
        elif config.train.init_from:
            trainer.start_from(config.train.init_from)
            if processes.is_first():
                inherit_original(config.train.init_from, workdir)
        if processes.is_first():
            schedule = trainer.layout.pipeline.lowered.schedule
            workdirs.write_config(workdir, kept, schedule=schedule, digests=digests)
        if trainer.step < config.train.num_steps and (problem := long_warmup(config)):
            logger.warning("%s", problem)
        goodput = stack.enter_context(Goodput(workdir, stopwatch, resumed_step=trainer.step))
        faults = Faults(workdir, config.train, resumed_step=trainer.step)
        trainer.leave_out(faults.left_out)

        # Train; after a step that is rolled back, from an earlier checkpoint on.
        bad_steps = BadSteps(trainer, checkpoints, faults)
        outcome = None
        while outcome is None:
            try:
                with _explaining_lack_of_memory(trainer, checkpoints):
                    outcome = _train_on(
                        trainer, workdir, checkpoints=checkpoints, bad_steps=bad_steps, goodput=goodput, stop=stop
                    )
            except RollbackError as error:
                bad_steps.go_back(error)
                goodput.resume(trainer.step)
    logger.info("%s", outcome.summary(config, workdir, time.monotonic() - stopwatch.start_s))
    return outcome


def _train_on(
    trainer: Trainer,
    workdir: Path,
    *,
    checkpoints: Checkpoints,
    bad_steps: BadSteps,
    goodput: Goodput,
    stop: StopSignals,
) -> Outcome:
    """Trains from the trainer's step to the end of the run, or until a signal or a RollbackError."""
    config, first, last = trainer.config.train, trainer.step, trainer.config.train.num_steps
    if first >= last:
        logger.info("Nothing to train: the checkpoint is of step %d, train.num_steps is %d.", first, last)
    with contextlib.ExitStack() as stack:
        wants_wandb = config.wandb_project and processes.is_first()
        wandb_run = WandbRun(workdir, trainer.config, resumed_step=first) if wants_wandb else None
        writer = stack.enter_context(MetricsWriter(workdir, resumed_step=first, wandb_run=wandb_run))
        instruments = stack.enter_context(Instruments(trainer, workdir, writes=checkpoints.is_writing))
        best = stack.enter_context(Best(workdir, trainer.config, resumed_step=first))
        with Reporter(first, last, eval_every=config.eval_every) as terminal:
            reports = Reports(writer, terminal, goodput)
            run = RunSteps(
                trainer,
                checkpoints=checkpoints,
                best=best,
                bad_steps=bad_steps,
                reports=reports,
                instruments=instruments,
                stop=stop,
            )
            if first and is_due(first, config.eval_every):
                run.evaluate()  # the run may have been killed during this evaluation
            if run.is_past_best():
                logger.info("Nothing to train: %d evaluations were no better than the best.", config.patience)
            elif first < last:
                bad_steps.check()  # an earlier process may have ended because of them
                run.begin()
            while trainer.step < last and not run.is_past_best() and stop.goes_on(trainer.step):
                run.step()
                if instruments.saves.is_due(trainer.step):
                    run.save()
                if is_due(trainer.step, config.eval_every):
                    run.evaluate()
            run.finish_step()
            stopped_by = stop.stopped_by if trainer.step < last and not run.is_past_best() else None

            # Save a last checkpoint and run a last evaluation.
            if config.checkpoint_every or stopped_by:
                run.save()
            bad_steps.check()  # the last step may have been one too many
            if config.eval_every and not stopped_by and not stop.ends_now:
                run.evaluate()
            run.finish_checkpoints()
            stopped_by = stopped_by or stop.ends_now

        sample = ""
        if not stopped_by:
            stop.nothing_to_save()
            sample = _sampled(trainer)
        reports.account(trainer.step, ended=not stopped_by)
        if counts := trainer.dataset.counts.describe():
            logger.info("Data: %s.", counts)
        spent = reports.goodput()
    evaluation = best.evaluation if config.patience else reports.last_evaluation
    return Outcome(trainer.step, stopped_by, reports.last_record, evaluation, sample, spent)


def _sampled(trainer: Trainer) -> str:
    """The text that is sampled at the end of a run; empty where the config asks for none."""
    number, texts = trainer.config.train.sample_tokens, []
    if not number:
        return ""
    sampling = phase("Sampling", total=number, unit="tokens")
    with trainer.stopwatch.measure(Activity.EVALUATION), sampling as shown:
        if not progress.is_shown():
            logger.info("Sampling %s …", counted(number, "token"))
        for text in trainer.generate("", number, SAMPLING):
            texts.append(text)
            shown.advance(len(texts))
    return "".join(texts)


@contextlib.contextmanager
def _explaining_lack_of_memory(trainer: Trainer, checkpoints: Checkpoints) -> Iterator[None]:
    """Adds notes to jax's error for a lack of memory: what was predicted, and from where the run can go on."""
    try:
        yield
    except Exception as error:
        if is_lack_of_memory(error):
            error.add_note(predicted_text(trainer.config, trainer.mesh))
            with contextlib.suppress(CheckpointError):  # of the last save, of which the run has told
                checkpoints.close()
            steps = checkpoints.steps()
            error.add_note(
                f"The same command, also with such a change, goes on from the checkpoint of step {steps[-1]}."
                if steps
                else "There is no checkpoint yet."
            )
        raise


def _log_what_runs(trainer: Trainer) -> None:
    """Logs data, model, schedule, semantics, and fields that change nothing, before the first step."""
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
    if device.platform != "cpu":
        logger.info("%s", kernel_on(trainer.mesh, config, dropout=config.model.dropout > 0))
    if trainer.throughput.peak_flops is None and device.platform != "cpu":
        text = "Records have no mfu: the peak of %s in %s is not known. Name it by train.topology: %s, or a .toml file."
        logger.info(text, device.device_kind, config.model.dtype, ", ".join(catalogue()))

    layout = trainer.layout
    pipeline, num_layers = layout.pipeline, layout.placement.layers_per_stage
    if len(num_layers) > 1:
        text = describe_schedule(pipeline.lowered, num_layers=num_layers, stream=pipeline.stream)
        alone = "one batch alone, flushed: " if pipeline.windows else ""
        logger.info("%s%s", alone, text)
        if order := order_to_text(pipeline.lowered, "pipeline.order"):
            logger.info("%spipeline.order=%s: %s", alone, config.pipeline.order, order)

    for name, windows in pipeline.windows.items():
        how = "flushed" if not max(windows.semantics.delays) else "from batch to batch"
        logger.info("%s, %s: %s", name, how, describe_windows(windows))
        if reason := no_gain(windows, "pipeline.order"):
            logger.info("%s: %s", name, reason)
    if len(pipeline.phases) > 1:
        phases = (f"{p.semantics} in steps {p.start + 1} to {p.end}" for p in pipeline.phases)
        logger.info("semantics: %s", ", ".join(phases))
    spec = pipeline.spec
    if not config.train.checkpoint_every:
        logger.warning(
            "train.checkpoint_every=0: a run that comes to its end keeps no weights. Set a number of steps, or auto."
        )
    if config.data.eval_source and lies_in(config.data.eval_source, config.data.source):
        logger.warning(
            "data.eval_source=%s lies in data.source=%s: held-out losses are of what the run trains on.",
            config.data.eval_source,
            config.data.source,
        )
    for line in unused_fields(config, host_stash_slots=spec.sizes.slots.host_stash, has_whole=spec.has_whole):
        logger.info("%s", line)
