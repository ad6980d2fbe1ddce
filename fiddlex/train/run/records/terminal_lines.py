"""What a person sees of a run that trains: a line of progress on a terminal, one line for each record elsewhere."""

import contextlib
import logging
import time
from collections.abc import Iterator

from fiddlex.terminal import progress
from fiddlex.terminal.readable import counted, readable_time
from fiddlex.train.record import Record
from fiddlex.train.run.records.metrics import describe, describe_loss

logger = logging.getLogger(__name__)


class Reporter:
    """Shows a run's progress, records and remarks. A context manager.

    An evaluation follows every `eval_every` steps, and the last step; with 0 there is none.
    """

    def __init__(self, start_step: int, num_steps: int, *, eval_every: int = 0):
        self._num_steps, self._eval_every = num_steps, eval_every
        self._start_step, self._start_time = start_step, time.monotonic()
        self._step, self._step_time = start_step, self._start_time
        self._evaluated_step, self._evaluation_s, self._evaluations_s = start_step, 0.0, 0.0
        self._stack = contextlib.ExitStack()
        self._phase: progress.Phase | None = None

    def __enter__(self) -> "Reporter":
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def compiled(self, seconds: float, *, was_kept: bool) -> None:
        done = (
            "Traced the train step, and found it compiled by an earlier run," if was_kept else "Compiled the train step"
        )
        self.line(f"{done} in {readable_time(seconds)}.")

    def begin(self) -> None:
        """Begins the steps: the estimate of the time left starts here."""
        self._start_time = self._step_time = time.monotonic()
        shown = progress.phase("Training", total=self._num_steps, unit="steps", time_left=self._time_left, logged=False)
        self._phase = self._stack.enter_context(shown)
        self._phase.advance(self._start_step)

    def advance(self, step: int) -> None:
        self._step, self._step_time = step, time.monotonic()
        if self._phase:
            self._phase.advance(step)

    @contextlib.contextmanager
    def evaluating(self, step: int) -> Iterator[None]:
        """Wraps an evaluation and measures how long it takes."""
        start = time.monotonic()
        yield
        self._evaluation_s = time.monotonic() - start
        self._evaluations_s += self._evaluation_s
        self._step_time += self._evaluation_s
        self._evaluated_step = step

    def record(self, record: Record) -> None:
        step = record["step"]
        if "eval_loss" in record:
            self.line(f"step {step}/{self._num_steps}  {describe(record)}")
            return
        loss, speed = describe_loss(record), f"{record['tokens_per_second']:,.0f} tokens/s"
        if self._phase and progress.is_shown():
            self._phase.advance(step, loss, speed)
        else:
            self.line(f"step {step}/{self._num_steps}  {loss}  {speed}  {self._time_left()}".rstrip())

    def line(self, text: str) -> None:
        logger.info("%s", text)

    def _time_left(self) -> str:
        """The time left until the final evaluation ends, as text, if every evaluation takes as long as the last one."""
        step = self._step
        done = step - self._start_step
        if done <= 0 or step >= self._num_steps:
            return ""
        seconds = (self._step_time - self._start_time - self._evaluations_s) / done * (self._num_steps - step)
        evaluations = 0
        if self._eval_every:
            evaluations = -(-self._num_steps // self._eval_every) - self._evaluated_step // self._eval_every
        if evaluations and not self._evaluation_s:  # nobody knows yet how long one takes
            return f"{readable_time(seconds)} and {counted(evaluations, 'evaluation')} left"
        return f"{readable_time(seconds + evaluations * self._evaluation_s)} left"
