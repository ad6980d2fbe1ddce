"""Bad steps: those whose loss or gradient is not finite, and spikes. What is to blame, and what the run does about it.

A bad step ends the run with advice, is skipped, or makes the run go back to the last good checkpoint
(`train.on_nonfinite`, `train.on_spike`; docs/checkpoints.md). A checkpoint is *good* when its weights cannot be to
blame; the others are moved to `damaged_checkpoints/`.
"""

import logging
from typing import Literal

from fiddlex.cluster import processes
from fiddlex.config.values.every import Every
from fiddlex.data.loader import batch_number
from fiddlex.errors import ConfigError, FaultError, NonFiniteError, SpikeError
from fiddlex.terminal.readable import counted
from fiddlex.train.record import Record
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.faults.faults import Fault, Faults
from fiddlex.train.step.dispatched import Dispatched
from fiddlex.train.trainer import Trainer

logger = logging.getLogger(__name__)


class RollbackError(Exception):
    """A step to go back from. From step `blamed` on, checkpoints may hold weights that are to blame."""

    def __init__(self, fault: Fault, reason: str, *, blamed: int):
        super().__init__(reason)
        self.fault, self.reason, self.blamed = fault, reason, blamed


class BadSteps:
    """Decides what a run does about its bad steps."""

    def __init__(self, trainer: Trainer, checkpoints: Checkpoints, faults: Faults):
        _check_reach(trainer)
        self._trainer, self._checkpoints, self._faults = trainer, checkpoints, faults

    def note(self, record: Record, dispatched: Dispatched) -> str:
        """Notes a step if it was skipped; returns a line for the log, empty for a good step."""
        kind = record.get("skipped")
        if not kind:
            return ""
        self._faults.add(self._fault(record["step"], kind, "skip"))
        what = dispatched.describe(kind, self._trainer.config.train)
        return f"Step {record['step']} is skipped, since it is {what}."

    @property
    def are_too_many(self) -> bool:
        """Whether the run has had more than `train.max_faults` bad steps."""
        return self._faults.first_beyond_limit is not None

    def check(self) -> None:
        """Raises FaultError when the run has had more than `train.max_faults` bad steps.

        The message is the same when a run ends and when the next start finds that it has ended so.
        """
        if fault := self._faults.first_beyond_limit:
            limit = self._faults.limit
            later = ""
            if fault.action == "skip" and fault.step < self._trainer.config.train.num_steps:
                later = f"The run ended after step {fault.step + 1}, which tells whether the weights are good. "
            raise FaultError(
                f"Step {fault.step} is fault number {limit + 1} of this run ({self._faults.path}), and "
                f"train.max_faults={limit}. {later}Look for the cause, such as bad data, too high a learning rate or a "
                f"bad device. Then set train.max_faults higher: the same command with it {self._continuation()}."
            )

    def note_spike(self, error: FaultError, step: int) -> bool:
        """Notes a spike that ends the run, as a skipped step; returns whether the error of the step is one.

        A spike changes no weight, so the state of later steps is that of a run which skipped it, and worth saving. When
        a loss or a gradient is not finite, the weights before the step may be to blame, and earlier ones are no longer
        in memory.
        """
        is_end = isinstance(error, SpikeError) and self._trainer.config.train.on_spike == "stop"
        if is_end:
            self._faults.add(self._fault(step, "spike", "skip"))
        return is_end

    def explained(self, error: FaultError, step: int) -> Exception:
        """The error of a step with advice, or the one that lets the run go back to a checkpoint."""
        # The step computed batch number b = step − 1 with weights up to `delay` updates older than W(b), so every
        # checkpoint from step b − delay on may hold weights that are to blame.
        blamed = max(step - 1 - self._trainer.delay, 0)
        config, before_update = self._trainer.config.train, True
        kind, action = "spike", config.on_spike
        if isinstance(error, NonFiniteError):
            kind, action, before_update = "nonfinite", config.on_nonfinite, error.before_update
        if action == "rollback":
            return RollbackError(self._fault(step, kind, "rollback"), str(error), blamed=blamed)
        others = self._other_actions(f"on_{kind}", can_skip=before_update)
        if not isinstance(error, NonFiniteError):
            others = f"A higher train.spike_bound allows such steps. {others}"
            return type(error)(f"{error} {self._saved_after(step)}\n{self._advice(others)}")
        if before_update and step == 1:
            return NonFiniteError(f"{error}\n{self._advice_at_start()}")
        if before_update:
            self._set_aside(blamed)
        return NonFiniteError(f"{error}\n{self._advice(others)}")

    def explained_evaluation(self, error: NonFiniteError) -> NonFiniteError:
        """The error of an evaluation of the current weights with advice; their checkpoint is set aside."""
        self._set_aside(self._trainer.step)
        return NonFiniteError(f"{error}\n{self._advice()}")

    def go_back(self, error: RollbackError) -> None:
        """Goes back to the last good checkpoint, and leaves the batch of the bad step out from now on."""
        if not self._set_aside(error.blamed, reason=error.reason):
            raise FaultError(
                f"{error.reason}\nThere is no earlier checkpoint to go back to. Save earlier or more often "
                "(train.checkpoint_every), keep more checkpoints (train.keep_last), or choose "
                f"train.on_{error.fault.kind}=skip."
            )
        self._trainer.restore(self._checkpoints)
        self._faults.go_back(self._trainer.step, error.fault)
        self.check()
        self._trainer.leave_out(self._faults.left_out)
        logger.info("Going back to step %d, and leaving batch %d out.", self._trainer.step, error.fault.batch)

    def _fault(self, step: int, kind: str, action: Literal["skip", "rollback"]) -> Fault:
        return Fault(step, batch_number(step - 1, self._faults.left_out), kind, action)

    def _set_aside(self, blamed: int, *, reason: str = "") -> bool:
        """Sets the checkpoints of step `blamed` and later steps aside; returns whether there are earlier ones.

        If there are, `reason` is logged before; else it belongs in an error.
        """
        self._checkpoints.wait()
        steps = processes.told_by_first("checkpoints to go back to", self._checkpoints.steps)
        suspects = [step for step in steps if step >= blamed]
        has_good = len(suspects) < len(steps)
        if reason and has_good and processes.is_first():
            logger.warning("%s", reason)
        if suspects:
            self._checkpoints.set_aside(suspects)
        return has_good

    def _advice(self, others: str = "") -> str:
        """Advice on weights that exploded, or are about to; `others`: sentences on fields that let the run go on."""
        clip_norm = self._trainer.config.optimizer.clip_norm
        clipping = f"an optimizer.clip_norm below {clip_norm:g}" if clip_norm else "optimizer.clip_norm=1.0"
        return (
            f"A lower optimizer.learning_rate, a longer optimizer.warmup_steps or {clipping} often help. {others}The "
            f"same command with such a change {self._continuation()}."
        )

    def _other_actions(self, field: str, *, can_skip: bool) -> str:
        """A sentence about what else than `stop` the field `train.on_…` can be."""
        skip = f"train.{field}=skip goes on without the update of such a step. " if can_skip else ""
        needed = "" if self._trainer.config.train.checkpoint_every else ", with train.checkpoint_every set,"
        back = "goes back to the last good checkpoint and leaves the batch out"
        return f"{skip}train.{field}=rollback{needed} {back}. "

    def _saved_after(self, step: int) -> str:
        """A sentence about what a run has saved that ends because step `step` is a spike."""
        self._checkpoints.wait()
        if (steps := self._checkpoints.steps()) and steps[-1] >= step:
            return f"The run has saved step {steps[-1]}, without an update by step {step}."
        return f"The run has saved nothing, since step {step + 1} is not finite: the weights may be to blame for both."

    def _continuation(self) -> str:
        """Where the next start of the run goes on, as the end of a sentence."""
        self._checkpoints.wait()
        if steps := self._checkpoints.steps():
            return f"goes on from the last good checkpoint, {self._checkpoints.path(steps[-1])}"
        return "starts again, since there is no checkpoint"

    def _advice_at_start(self) -> str:
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


def _check_reach(trainer: Trainer) -> None:
    """Raises ConfigError when all checkpoints that the run keeps may be of steps to blame for a bad step."""
    config, delay = trainer.config.train, trainer.delay
    every = max(Every(config.checkpoint_every), 1)  # `auto` may save after each step
    if "rollback" in (config.on_nonfinite, config.on_spike) and (config.keep_last - 1) * every <= delay:
        raise ConfigError(
            f"A rollback takes a checkpoint from more than {counted(delay, 'step')} before the newest, since steps "
            f"compute with weights up to {counted(delay, 'update')} old. With train.keep_last={config.keep_last} and "
            f"train.checkpoint_every={Every(config.checkpoint_every)} the run may keep none. Set train.keep_last to at "
            f"least {delay // every + 2}."
        )
