"""Everything that a run reports, in one place: to `metrics.jsonl`, to `goodput.jsonl`, and to the terminal."""

import logging

from fiddlex.train.record import Record
from fiddlex.train.run.records.goodput import Goodput
from fiddlex.train.run.records.goodput import describe as describe_goodput
from fiddlex.train.run.records.metrics import MetricsWriter
from fiddlex.train.run.records.terminal_lines import Reporter

logger = logging.getLogger(__name__)


class Reports:
    """Reports what a run has done."""

    def __init__(self, writer: MetricsWriter, terminal: Reporter, goodput: Goodput):
        self.terminal = terminal
        self.last_record: Record | None = None  # of the last step that is done
        self.last_evaluation: Record | None = None
        self._writer, self._goodput = writer, goodput

    @property
    def evaluated_step(self) -> int:
        return self._writer.evaluated_step

    def num_evaluations_after(self, step: int) -> int:
        """How many evaluations of later steps than `step` the run has made, before an interruption too."""
        return sum(record["step"] > step for record in self._writer.evaluations)

    def check(self) -> None:
        self._writer.check()

    def step_done(self, record: Record) -> None:
        self.last_record = record
        self.terminal.advance(record["step"])

    def training(self, record: Record) -> None:
        self._writer.write(record)
        self.account(record["step"])
        self.terminal.record(record)

    def evaluation(self, record: Record) -> None:
        self.last_evaluation = record
        self._writer.write(record)
        self.account(record["step"])
        self.terminal.record(record)

    def decision(self, record: Record, text: str) -> None:
        self._writer.write(record)
        self.terminal.line(text)

    def account(self, step: int, *, ended: bool = False) -> None:
        """Accounts for the time until now, unless this process has taken no step: then the run is as it was."""
        if self.last_record:
            self._goodput.write(step, ended=ended)

    def goodput(self) -> Record | None:
        """Writes, logs and returns the goodput of the run, see `Outcome`."""
        record = self._goodput.record()
        if record:
            self._writer.write(record)
            logger.info("Goodput %s.", describe_goodput(record))
        return record
