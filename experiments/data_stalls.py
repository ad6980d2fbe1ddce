"""The tables of docs/data_stalls.md: the cache, shared preparation, and verdicts of `fiddlex benchmark --data`.

    python -m experiments.data_stalls [--only=cache] [--output=FILE.jsonl]

Each table is printed, and each of its rows is a line of JSON in the file.
"""

import collections
import dataclasses
import json
import multiprocessing
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import app, flags

from fiddlex.data import Loader, NextTokenExamples
from fiddlex.data.counts import HITS, PREPARED, DataCounts
from fiddlex.data.sample_cache import Cache, CachedStore, MemoryCache
from fiddlex.data.shared_batches import SharedBatches
from fiddlex.data.staged_examples import SlowStore, StagedExamples
from fiddlex.tools.stalls import DEVICES, FETCH, PREPARE, Analysis, Mend, measure_loader

_ONLY = flags.DEFINE_multi_enum("only", ["cache", "shared", "stalls"], ["cache", "shared", "stalls"], "tables to make")
_OUTPUT = flags.DEFINE_string("output", None, "JSON Lines file to write the rows to")
_TURNS = flags.DEFINE_integer("turns", 3, "turns of the runs of the last two tables", lower_bound=1)

Row = dict[str, Any]


def main(argv: list[str]) -> None:
    """Makes the tables."""
    tables: dict[str, Callable[[], Iterator[Row]]] = {"cache": cache_rows, "shared": shared_rows, "stalls": stall_rows}
    rows = []
    for name in dict.fromkeys(_ONLY.value):
        for row in tables[name]():
            print(json.dumps(row), flush=True)
            rows.append({"table": name} | row)
    if _OUTPUT.value:
        pathlib.Path(_OUTPUT.value).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


# The cache against an LRU of the same size.

_CACHED_SAMPLES, _TOKENS = 2000, 64


class LeastRecentlyUsed:
    """What a page cache does, to compare with."""

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._samples: collections.OrderedDict[int, np.ndarray] = collections.OrderedDict()

    def open(self) -> None:
        """Does nothing."""

    def get(self, key: int) -> np.ndarray | None:
        """The sample, or None."""
        if key in self._samples:
            self._samples.move_to_end(key)
        return self._samples.get(key)

    def put(self, key: int, sample: np.ndarray) -> None:
        """Keeps the sample in place of the one that was not asked for longest."""
        self._samples[key] = sample
        if len(self._samples) > self._capacity:
            self._samples.popitem(last=False)


def cache_rows() -> Iterator[Row]:
    """Hits of three epochs of 2,000 samples, read in the loader's order; caches that hold a share of the samples."""
    tokens = np.zeros(_CACHED_SAMPLES * _TOKENS + 1, np.uint16)
    object_bytes = 256 + 2 * (_TOKENS + 1)
    for share in (0.25, 0.5, 0.75):
        held = int(share * _CACHED_SAMPLES)
        caches: dict[str, Cache] = {"kept": MemoryCache(held * object_bytes), "lru": LeastRecentlyUsed(held)}
        for name, cache in caches.items():
            counts, source = DataCounts(), NextTokenExamples(tokens, _TOKENS)
            source.store = CachedStore(cache, source=0, counts=counts)
            loader = Loader(source, global_batch_size=50, seed=0, vocab_size=2)
            hits = []
            for epoch in range(3):
                steps = _CACHED_SAMPLES // 50
                for step in range(epoch * steps, (epoch + 1) * steps):
                    loader.batch(step)
                hits.append(counts.take()[HITS])
            yield {"cache": name, "held": held, "samples": _CACHED_SAMPLES, "hits_by_epoch": hits}


# Four runs that share their preparation.

_RUNS, _SHARED_STEPS, _SHARED_ROWS = 4, 100, 8


class BusyExamples(StagedExamples):
    """Examples whose preparation keeps a core busy: numpy sorts numbers."""

    def __len__(self) -> int:
        return 10_000

    def read(self, number: int) -> np.ndarray:
        """One token."""
        return np.array([number % 100], np.uint16)

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Ten thousand tokens; which they are does not matter."""
        numbers = np.random.default_rng(index).random(50_000)
        numbers.sort()
        return {"tokens": sample.astype(np.int32), "weights": numbers[:1000].astype(np.float32)}


def shared_rows() -> Iterator[Row]:
    """Seconds that four runs take for the same batches, in turns alone and together."""
    for turn in range(_TURNS.value):
        for shares in (False, True):
            yield {"turn": turn, "shares": shares} | _time_runs(shares)


def _time_runs(shares: bool) -> Row:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ready, results = context.Barrier(_RUNS), context.SimpleQueue()
        runs = [context.Process(target=_run, args=(folder if shares else "", ready, results)) for _ in range(_RUNS)]
        for run in runs:
            run.start()
        found = [results.get() for _ in runs]
        for run in runs:
            run.join()
    seconds = max(end for _, _, end in found) - min(start for _, start, _ in found)
    prepared = sum(number for number, _, _ in found)
    consumed = _RUNS * _SHARED_STEPS * _SHARED_ROWS
    return {
        "examples_prepared": prepared,
        "examples_trained": consumed,
        "prepared_per_example_of_the_data": prepared / (_SHARED_STEPS * _SHARED_ROWS),
        "seconds": seconds,
        "examples_per_second": consumed / seconds,
    }


def _run(folder: str, ready: Any, results: Any) -> None:
    counts = DataCounts()
    loader = Loader(BusyExamples(), global_batch_size=_SHARED_ROWS, seed=0, vocab_size=100)
    loader.batch(10**6)  # imports what it needs
    batches: Loader | SharedBatches = loader
    if folder:
        batches = SharedBatches(
            pathlib.Path(folder), "batches", make=loader.batch, num_rows=_SHARED_ROWS, num_threads=2, counts=counts
        )
        batches.join(0)  # all have joined before the first batch
    ready.wait()
    start_s = time.monotonic()
    for _ in batches.iterate(0, num_steps=_SHARED_STEPS):
        time.sleep(0.001)  # the devices
    prepared = counts.totals().get(PREPARED, _SHARED_STEPS * _SHARED_ROWS)
    results.put((prepared, start_s, time.monotonic()))
    ready.wait()  # the last one leaves when nobody prepares ahead


# Verdicts and mended runs.

_ROWS, _NUM_EXAMPLES = 2, 4000
_EPOCHS = 2.0  # of a run whose cache is full, as the mended ones have it
# Seconds of a request and a preparation, of an example, and of the devices, of a step. They are long, because a busy
# machine wakes a sleeping thread some milliseconds late.
_CASES = {
    FETCH: (0.040, 0.008, 0.040),
    PREPARE: (0.008, 0.040, 0.040),
    DEVICES: (0.020, 0.020, 0.040),
}


class SleepingExamples(StagedExamples):
    """Examples whose preparation takes a given time and no core."""

    def __init__(self, prepare_s: float):
        self._prepare_s = prepare_s

    def __len__(self) -> int:
        return _NUM_EXAMPLES

    def read(self, number: int) -> np.ndarray:
        """500 tokens."""
        return np.full(500, number, np.uint16)

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """The tokens, after a while."""
        time.sleep(self._prepare_s)
        return {"tokens": sample.astype(np.int32), "weights": np.ones(1, np.float32)}


@dataclasses.dataclass(frozen=True)
class Case:
    """A run with sleeps in place of work.

    Attributes:
      bound: what bounds it.
      ratio: by how much.
      latency_s: seconds of a request to the store.
      prepare_s: seconds of the preparation of an example.
      devices_s: seconds of a step on the devices.
    """

    bound: str
    ratio: float
    latency_s: float
    prepare_s: float
    devices_s: float

    def analyse(self) -> Analysis:
        """What the analysis says of the run."""
        source = SleepingExamples(self.prepare_s)
        source.store = SlowStore(latency_s=self.latency_s)

        def make(examples: Any) -> Loader:
            return Loader(examples, global_batch_size=_ROWS, seed=0, vocab_size=_NUM_EXAMPLES)

        times = measure_loader(make, source, num_threads=2, limit_s=0.5)
        return Analysis(statistics.median(_slept(self.devices_s) for _ in range(21)), times, _EPOCHS)

    def run_s(self, fields: dict[str, float]) -> float:
        """Seconds of a step of the run with these fields, once its cache is full."""
        threads = int(fields.get("data.num_threads", 2))
        source, cache = SleepingExamples(self.prepare_s), MemoryCache(fields.get("data.sample_cache_gib", 0) * 2**30)
        for number in range(_NUM_EXAMPLES):
            cache.put(number, source.read(number))
        source.store = CachedStore(cache, source=0, counts=DataCounts(), store=SlowStore(latency_s=self.latency_s))
        loader = Loader(source, global_batch_size=_ROWS, seed=0, vocab_size=_NUM_EXAMPLES, num_threads=threads)
        ends = []
        for _ in loader.iterate(0, num_steps=15 * threads):
            time.sleep(self.devices_s)
            ends.append(time.monotonic())
        groups = np.diff(ends[4 * threads :: threads])
        return float(np.median(groups)) / threads


def _slept(seconds: float) -> float:
    start_s = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - start_s


def stall_rows() -> Iterator[Row]:
    """Nine runs: what bounds them, what the analysis says, and how fast they are when they are mended; medians."""
    for bound, (latency_s, prepare_s, devices_s) in _CASES.items():
        for ratio in (1.5, 2.0, 4.0):
            scales: Sequence[float] = [ratio if bound == each else 1.0 for each in (FETCH, PREPARE, DEVICES)]
            case = Case(bound, ratio, latency_s * scales[0], prepare_s * scales[1], devices_s * scales[2])
            turns = [_predicted_and_mended(case) for _ in range(_TURNS.value)]
            yield {
                "bound": bound,
                "ratio": ratio,
                "verdicts": [turn["verdict"] for turn in turns],
                "mends": [turn["mend"] for turn in turns],
                **{name: statistics.median(turn[name] for turn in turns) for name in ("step_s", "run_s")},
                **{name: statistics.median(turn[name] for turn in turns) for name in ("predicted_s", "mended_s")},
                "errors": [turn["predicted_s"] / turn["mended_s"] - 1 for turn in turns],
            }


def _predicted_and_mended(case: Case) -> Row:
    analysis = case.analyse()
    mend = analysis.mends[0] if analysis.mends else Mend({}, analysis.step_s)
    return {
        "verdict": analysis.bound,
        "mend": mend.describe(),
        "step_s": analysis.step_s,
        "run_s": case.run_s({}),
        "predicted_s": mend.step_s,
        "mended_s": case.run_s(mend.fields),
    }


if __name__ == "__main__":
    app.run(main)
