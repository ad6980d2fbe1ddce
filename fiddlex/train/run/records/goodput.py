"""Goodput: the share of a run's wall time, its restarts included, in which it took steps that count.

`goodput.jsonl` in the workdir has a line for each interval of each process that led the run: its end, the step it has
come to, and its seconds by kind. The first process appends a line wherever it writes a record or saves a checkpoint, so
a kill loses at most one interval, whose seconds then belong to the restart. Invariant: the intervals and the gaps
between processes cover the time from the start of the run to its last line without overlap, so all shares add up to 1.

Kinds of seconds in a line: `steps` (devices at work, or the host between two steps), `compilation` (of the train step),
`data_wait` (no batch was ready, and the devices had nothing to do), `checkpoints` (the host was held), `evaluation`
(and the sample at the end), `profiling` (of `train.profile_steps`: starting and writing the profile), and `starting`
(from the start of the process to its first step, without compilation). Two more kinds are found when the file is read:
`restarts`, from the last line of a process to the start of the next one, and `repeated`, the steps and their data wait
that a later process took once more, from an older checkpoint.
"""

import contextlib
import itertools
import json
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from fiddlex.cluster import processes
from fiddlex.files.small_files import json_object
from fiddlex.files.whole_files import write_whole
from fiddlex.terminal.readable import readable_time
from fiddlex.train.record import Record
from fiddlex.train.run.workdir import writing
from fiddlex.train.step.stopwatch import Activity, Lap, Stopwatch

FILE = "goodput.jsonl"
_KINDS = {
    Activity.STARTING: "starting",
    Activity.COMPILATION: "compilation",
    Activity.HOST: "steps",
    Activity.DEVICES: "steps",
    Activity.DATA: "steps",
    Activity.STARVED: "data_wait",
    Activity.CHECKPOINTS: "checkpoints",
    Activity.EVALUATION: "evaluation",
    Activity.PROFILING: "profiling",
}
_DECIMALS = 6  # of seconds
_MOST_LINE = 2**16  # bytes of an interval
_MOST_SECONDS = 1e11  # 3,000 years
_REPEATABLE = ("steps", "data_wait")
LOSSES = ("compilation", "data_wait", "checkpoints", "evaluation", "profiling", "starting", "restarts", "repeated")


class Interval(NamedTuple):
    """A line of `goodput.jsonl`: what a process did since its line before, or since its start."""

    time_s: float  # its end, in seconds since 1970
    step: int  # number of steps done at its end
    seconds: dict[str, float]  # by kind
    resumed_step: int | None = None  # number of steps done when the process started; None after a process's first line
    ended: bool = False  # whether the run ended here, so that the time until it is continued does not count

    @property
    def start_s(self) -> float:
        return self.time_s - sum(self.seconds.values())


class Goodput:
    """Accounts for the wall time of a run. A context manager.

    Only the first process of several reads and writes the file; to the others, every method does nothing. When a run
    starts afresh (`resumed_step` is 0) where another run has ended, the account begins anew.
    """

    def __init__(self, workdir: Path, stopwatch: Stopwatch, *, resumed_step: int):
        self._path = workdir / FILE
        self._stopwatch, self._lap = stopwatch, Lap(stopwatch)
        self._resumed_step: int | None = resumed_step
        self._ended_s = time.time() - (time.monotonic() - stopwatch.start_s)  # then the monotonic clock tells the time
        self._intervals: list[Interval] = []
        if not processes.is_first():
            return
        with writing(self._path):
            if self._path.exists():
                self._intervals = _read(self._path)
            if resumed_step == 0 and self._intervals and self._intervals[-1].ended:
                self._intervals = []
            write_whole(self._path, "".join(map(_line, self._intervals)))  # without a line that a kill has cut short
            self._file = self._path.open("a", encoding="utf-8")

    def resume(self, step: int) -> None:
        """Notes that this process goes back to `step`, and repeats the steps after it."""
        self._resumed_step = step

    def write(self, step: int, *, ended: bool = False) -> None:
        """Appends a line for the time since the last one; `step` and `ended` are those of an `Interval`."""
        if not processes.is_first():
            return
        seconds = dict.fromkeys(_KINDS.values(), 0.0)
        for activity, spent_s in self._lap.take().items():
            seconds[_KINDS[activity]] += spent_s
        self._ended_s += sum(seconds.values())
        rounded = {kind: round(spent_s, _DECIMALS) for kind, spent_s in seconds.items()}  # as the file will have them
        interval = Interval(round(self._ended_s, _DECIMALS), step, rounded, self._resumed_step, ended)
        self._resumed_step = None
        self._intervals.append(interval)
        with writing(self._path):
            self._file.write(_line(interval))
            self._file.flush()

    def record(self) -> Record | None:
        """The record of the run so far, see `account`; None before the first line."""
        return account(self._intervals) if self._intervals else None

    def __enter__(self) -> "Goodput":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if processes.is_first():
            self._file.close()  # every line has been flushed


def account(intervals: Sequence[Interval]) -> Record:
    """How the wall time of a run was spent, by at least one line of its file.

    Returns:
      `step`; `wall_time_s`, the seconds from the start of the run to its last line; `goodput`, the share of them in
      which it took steps that it did not have to repeat; and the share of each kind in `LOSSES`, as
      `compilation_share`.
    """
    seconds = dict.fromkeys(("steps", *LOSSES), 0.0)
    kept_step: float = math.inf  # of what came before, the steps after this one were repeated
    runs = _by_process(intervals)
    for run in reversed(runs):
        first = resumed_step = run[0].resumed_step or 0
        for interval in run:
            repeated = _share_after(kept_step, first, interval.step)
            for kind, spent_s in interval.seconds.items():
                lost_s = repeated * spent_s if kind in _REPEATABLE else 0.0
                seconds[kind] += spent_s - lost_s
                seconds["repeated"] += lost_s
            first = interval.step
        kept_step = min(kept_step, resumed_step)
    for before, after in itertools.pairwise(runs):
        if not before[-1].ended:  # 0 where another host's clock is behind
            seconds["restarts"] += max(after[0].start_s - before[-1].time_s, 0.0)
    total = sum(seconds.values())
    record = {"step": intervals[-1].step, "wall_time_s": total, "goodput": seconds["steps"] / total}
    return record | {f"{kind}_share": seconds[kind] / total for kind in LOSSES}


def describe(record: Record) -> str:
    """The record as text: '81.2% of 3 h 05 min; 9.7% restarts, 9.1% compilation'."""
    losses = sorted(((record[f"{kind}_share"], kind) for kind in LOSSES), reverse=True)
    parts = [f"{share:.1%} {kind.replace('_', ' ')}" for share, kind in losses if share >= 0.0005]
    text = f"{record['goodput']:.1%} of {readable_time(record['wall_time_s'])}"
    return f"{text}; {', '.join(parts)}" if parts else text


def _share_after(kept_step: float, first: int, last: int) -> float:
    """Of the steps after `first` up to `last`, the share after `kept_step`."""
    if first == last:
        return float(last > kept_step)
    return max(last - max(first, kept_step), 0.0) / (last - first)


def _by_process(intervals: Iterable[Interval]) -> list[list[Interval]]:
    runs: list[list[Interval]] = []
    for interval in intervals:
        if interval.resumed_step is not None or not runs:
            runs.append([])
        runs[-1].append(interval)
    return runs


def _line(interval: Interval) -> str:
    values: dict[str, Any] = {
        "time_s": interval.time_s,
        "step": interval.step,
        "seconds": {kind: spent_s for kind, spent_s in interval.seconds.items() if spent_s},
    }
    if interval.resumed_step is not None:
        values["resumed_step"] = interval.resumed_step
    return json.dumps(values | ({"ended": True} if interval.ended else {})) + "\n"


def _read(path: Path) -> list[Interval]:
    """The intervals of a file, without lines that are none, such as the last line of a killed process."""
    intervals = []
    with path.open("rb") as file:
        while line := file.readline(_MOST_LINE):
            with contextlib.suppress(ValueError):
                intervals.append(_interval(json_object(line)))
    return intervals


def _interval(values: dict[str, Any]) -> Interval:
    """The interval of a line; raises ValueError when a value is missing, of another type or no such number."""
    seconds, resumed_step = values.get("seconds"), values.get("resumed_step")
    if not isinstance(seconds, dict):
        raise ValueError(f"seconds={seconds!r:.80}")
    return Interval(
        _number(values, "time_s"),
        _step(values.get("step")),
        {kind: _number(seconds, kind) if kind in seconds else 0.0 for kind in _KINDS.values()},
        None if resumed_step is None else _step(resumed_step),
        values.get("ended") is True,
    )


def _number(values: dict[str, Any], name: str) -> float:
    value: Any = values.get(name)
    if type(value) not in (int, float) or not 0 <= value < _MOST_SECONDS:
        raise ValueError(f"{name}={value!r:.80}")
    return float(value)


def _step(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError(f"step={value!r:.80}")
    return value
