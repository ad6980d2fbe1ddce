"""The instruments of a run: they measure and watch its steps and what it does between them, and change nothing."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

from fiddlex.train.record import Record
from fiddlex.train.run.checkpoints.save_interval import Decision, SaveInterval
from fiddlex.train.run.faults.watchdog import Watchdog
from fiddlex.train.run.records.profiling import Profiler
from fiddlex.train.run.records.slow_ranks import SlowRanks
from fiddlex.train.step.stopwatch import Activity, Lap
from fiddlex.train.trainer import Trainer


class Instruments:
    """Measures and watches a run. `writes` says whether a checkpoint is being written in the background."""

    def __init__(self, trainer: Trainer, workdir: Path, *, writes: Callable[[], bool]):
        config = trainer.config.train
        self.profiler = Profiler(workdir, config)  # of the steps of `train.profile_steps`
        # Measures saves, and decides after which steps the run makes one.
        self.saves = SaveInterval(config, trainer.step, writes=writes)
        self._watchdog = Watchdog(workdir, config.step_timeout_s, trainer.stopwatch)
        self._slow_ranks = SlowRanks(trainer.mesh.local_devices[0])
        self._stopwatch, self._lap = trainer.stopwatch, Lap(trainer.stopwatch)
        self._throughput = trainer.throughput
        self._number, self._steps_s = 0, 0.0  # the steps since the last log point, and their seconds
        self._opened = contextlib.ExitStack()

    def __enter__(self) -> "Instruments":
        self._opened.enter_context(self.profiler)
        self._opened.enter_context(self._watchdog)
        return self

    def __exit__(self, *exception: object) -> None:
        self._opened.close()

    def begin(self) -> None:
        """Ends the start of the process: from now on its time belongs to the steps."""
        self._stopwatch.begin(Activity.HOST)
        self._lap.take()

    def begin_step(self, number: int) -> None:
        """Watches the step of this number, until something else is watched."""
        self._watchdog.begin(f"Step {number}")

    def step_done(self, record: Record) -> Decision | None:
        """Notes that the devices have done the step of a record; returns a new decision about saves, or None."""
        self._number, self._steps_s = self._number + 1, self._steps_s + record["step_time_s"]
        return self.saves.step_done()

    def figures(self, record: Record) -> Record:
        """The averages over the steps since the last log point, and lists by process, to add to this record."""
        number, spent = self._number, self._lap.take()
        averages = self._throughput.rates(self._steps_s / number) | {
            "host_time_s": spent[Activity.HOST] / number,
            "data_wait_s": (spent[Activity.DATA] + spent[Activity.STARVED]) / number,
        }
        self._number, self._steps_s = 0, 0.0
        return averages | self._slow_ranks.compare(record | averages)

    def probe(self) -> None:
        """Times the devices of this process alone; to be called while they have nothing else to do."""
        self._slow_ranks.probe()

    @contextlib.contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Watches the body; `what` begins a sentence, such as 'The last checkpoint'."""
        self._watchdog.begin(what)
        yield
        self._watchdog.begin("")

    @contextlib.contextmanager
    def between_steps(self, activity: Activity) -> Iterator[None]:
        """Counts the time of the body for `activity`, and for no step."""
        with self._stopwatch.measure(activity), self.saves.excluding():
            yield

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Measures and watches the body, which begins to save the checkpoint of `step`."""
        measured = self._stopwatch.measure(Activity.CHECKPOINTS)
        with self.watching(f"The checkpoint of step {step}"), measured, self.saves.saving(step):
            yield
