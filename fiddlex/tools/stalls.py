"""Which of fetching, preparation and devices bounds a run, and what would mend it: DS-Analyzer (VLDB 2021).

`measure_loader` measures by difference: batches as the run makes them, batches of samples that are in memory, and
fetches whose samples are dropped; the latter two with one thread and with many. `Analysis` adds the time that the
devices take for a step whose batch is there.

The model of the loader: T threads that take f seconds to fetch a batch and p to prepare it make one in (f + p) / T. No
number of threads makes one in less than F, the time that the store's channel takes for a batch, or P, what the
interpreter and the cores take to prepare it. A cache that holds the share h of the samples multiplies f and F by 1 − h,
from the second epoch on:

    loader(T, h) = max((f·(1 − h) + p) / T, F·(1 − h), P)

The run takes the longer one of loader and devices for a step. The model is scaled so that it gives what was measured
for the loader as it is.
"""

import copy
import dataclasses
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fiddlex.data.blended_examples import BlendedExamples
from fiddlex.data.examples import ExampleSource
from fiddlex.data.loader import Batch, Loader, prefetched
from fiddlex.data.sample_cache import OBJECT_BYTES
from fiddlex.data.staged_examples import Read, StagedExamples, Store
from fiddlex.terminal.readable import readable_time

FETCH, PREPARE, DEVICES = "fetch", "prepare", "devices"
_LEAST_GROUPS = 3  # of as many batches as there are threads
_COUNTED_STEPS = 4  # whose fetches are counted; some examples take more than one
_ROOM = 1.25  # a mend makes the loader that much faster than the devices, since batches do not come evenly
_ROOM_BESIDE_MISSES = 2.0  # the same where a cache has some samples and not others: a miss takes a whole request
_CACHE = "data.sample_cache_gib"
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class LoaderTimes:
    """Seconds that a batch takes, and the size of the data."""

    loader_s: float  # seconds as the run makes batches, with `num_threads` threads
    fetch_one_thread_s: float  # seconds of fetching alone
    # seconds of fetching alone, with `most_threads` threads; 0 where the threads made it faster in proportion
    fetch_limit_s: float
    prepare_one_thread_s: float  # seconds of preparation alone
    # seconds of preparation alone, with `most_threads` threads; 0 where the threads made it faster in proportion
    prepare_limit_s: float
    num_threads: int  # `data.num_threads`
    most_threads: int  # the largest number of threads that was measured, and that a mend has
    num_samples: int  # samples of an epoch
    sample_bytes: float  # bytes that a cache takes for a sample, on average; 0 for one that no store has

    def alone_s(self, stage: str) -> float:
        """Seconds of a batch if there were only this stage, with the threads of the run."""
        one_s, limit_s = {
            FETCH: (self.fetch_one_thread_s, self.fetch_limit_s),
            PREPARE: (self.prepare_one_thread_s, self.prepare_limit_s),
        }[stage]
        return max(one_s / self.num_threads, limit_s)

    def predicted_s(self, *, num_threads: int | None = None, cached: float = 0.0) -> float:
        """Seconds of a batch with another number of threads, and a cache that holds the share `cached` of samples."""
        scale = self.loader_s / self._modelled_s(self.num_threads, 0.0)
        return scale * self._modelled_s(num_threads or self.num_threads, cached)

    def _modelled_s(self, num_threads: int, cached: float) -> float:
        missing = 1.0 - cached
        together_s = (self.fetch_one_thread_s * missing + self.prepare_one_thread_s) / num_threads
        return max(together_s, self.fetch_limit_s * missing, self.prepare_limit_s)


@dataclasses.dataclass(frozen=True)
class Mend:
    """A change of the config, and what a step takes with it."""

    fields: dict[str, float]  # the fields of the config to change, with their values
    step_s: float  # seconds of a step with them, predicted

    def describe(self) -> str:
        """'data.num_threads=4'."""
        return " ".join(f"{name}={value:.3g}" for name, value in self.fields.items())


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What bounds a run."""

    devices_s: float  # seconds that the devices take for a step whose batch is there
    times: LoaderTimes
    epochs: float  # how often the run trains on each sample (`num_epochs`)

    @property
    def step_s(self) -> float:
        return max(self.devices_s, self.times.loader_s)

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step if there were only one of the three."""
        return {DEVICES: self.devices_s} | {stage: self.times.alone_s(stage) for stage in (FETCH, PREPARE)}

    @property
    def bound(self) -> str:
        """What bounds the run: `DEVICES`, `FETCH` or `PREPARE`."""
        if self.times.loader_s <= self.devices_s:
            return DEVICES
        return max((FETCH, PREPARE), key=self.times.alone_s)

    @property
    def mends(self) -> list[Mend]:
        """Changes that make the run faster, the fastest one first; of equally fast ones that with fewer fields.

        Those with a cache hold from the second epoch on.
        """
        if self.bound == DEVICES:
            return []
        found = [self._mend(self._least_threads(0.0), 0.0)]
        if self.times.fetch_one_thread_s and self.epochs > 1:
            threads = self._least_threads(1.0)
            found.append(self._mend(None, self._least_cached(self.times.num_threads)))
            if threads > self.times.num_threads:
                found.append(self._mend(threads, self._least_cached(threads)))
        faster = [mend for mend in found if mend.step_s < 0.95 * self.step_s]
        return sorted(faster, key=lambda mend: (round(mend.step_s / self.devices_s, 2), len(mend.fields)))

    def _mend(self, num_threads: int | None, cached: float) -> Mend:
        fields: dict[str, float] = {}
        if cached:
            fields[_CACHE] = self._cache_gib(cached)
        if num_threads and num_threads != self.times.num_threads:
            fields["data.num_threads"] = num_threads
        loader_s = self.times.predicted_s(num_threads=num_threads, cached=cached)
        return Mend(fields, max(self.devices_s, loader_s))

    def _cache_gib(self, cached: float) -> float:
        return math.ceil(cached * self.times.num_samples) * self.times.sample_bytes / _GIB

    def _least_cached(self, num_threads: int) -> float:
        """The smallest share of the samples whose cache lets the loader keep up with the devices, or all of them."""
        shares = (part / 100 for part in range(1, 101))
        return next((share for share in shares if self._keeps_up(num_threads, share)), 1.0)

    def _least_threads(self, cached: float) -> int:
        """The smallest number of threads that keeps up with the devices, or that is as fast as the most threads are."""
        numbers = range(self.times.num_threads, self.times.most_threads + 1)
        best_s = self.times.predicted_s(num_threads=self.times.most_threads, cached=cached)
        enough = (n for n in numbers if self._keeps_up(n, cached))
        equal = (n for n in numbers if self.times.predicted_s(num_threads=n, cached=cached) <= 1.01 * best_s)
        return next(itertools.chain(enough, equal))

    def _keeps_up(self, num_threads: int, cached: float) -> bool:
        room = _ROOM_BESIDE_MISSES if 0 < cached < 1 else _ROOM
        return self.times.predicted_s(num_threads=num_threads, cached=cached) * room <= self.devices_s

    def describe(self) -> str:
        seconds = self.seconds
        rows = [
            f"devices  {readable_time(seconds[DEVICES])} a step, with its batch there",
            f"prepare  {readable_time(seconds[PREPARE])} a batch, of samples in memory",
            f"fetch    {readable_time(seconds[FETCH])} a batch, its samples dropped",
            f"both     {readable_time(self.times.loader_s)} a batch, as the run makes it "
            f"(data.num_threads={self.times.num_threads})",
        ]
        others = ", ".join(
            f"{name} alone would be {_times(seconds[self.bound] / value)} as fast"
            for name, value in seconds.items()
            if name != self.bound and value
        )
        rows.append(f"bound    by {self.bound}, {readable_time(self.step_s)} a step; {others}")
        for mend in self.mends:
            text = f"{readable_time(mend.step_s)} a step, {_times(self.step_s / mend.step_s)} as fast"
            if _CACHE in mend.fields:
                text += f", from the second of the run's {self.epochs:.3g} epochs on"
            rows.append(f"mend     {mend.describe()}: {text}")
        if not self.mends and self.bound != DEVICES:
            rows.append(
                f"mend     neither a cache nor {self.times.most_threads} threads; runs with the same batches can share "
                "their preparation (data.share)"
            )
        if self.bound == FETCH and self.epochs <= 1:
            rows.append(
                f"cache    of no use to this run, which ends before its second epoch ({self.epochs:.2g} epochs); with "
                "data.sample_cache_folder, later runs on the same data find what it has kept"
            )
        return "\n".join(rows)

    def to_record(self) -> dict[str, Any]:
        """All figures as values of JSON; docs/data_stalls.md explains them."""
        return {
            "bound": self.bound,
            "step_s": self.step_s,
            "devices_s": self.devices_s,
            "fetch_s": self.times.alone_s(FETCH),
            "prepare_s": self.times.alone_s(PREPARE),
            **dataclasses.asdict(self.times),
            "epochs": self.epochs,
            "mends": [dataclasses.asdict(mend) for mend in self.mends],
        }


def _times(ratio: float) -> str:
    """'1.6 times', '840 times'."""
    return f"{ratio:.2g} times" if ratio < 10 else f"{ratio:,.0f} times"


def num_epochs(train: ExampleSource | BlendedExamples, num_examples: int) -> float:
    """How often a run trains on each sample; of a blend, on those of the source that it repeats most often.

    `num_examples` counts the examples that the run trains on, repetitions included.
    """
    if not isinstance(train, BlendedExamples):
        return num_examples / len(train)
    shares = zip(train.sources, train.blend.shares, strict=True)
    return max(num_examples * share / len(source) for source, share in shares)


def measure_loader(
    make: Callable[[ExampleSource | BlendedExamples], Loader],
    train: ExampleSource | BlendedExamples,
    *,
    num_threads: int,
    limit_s: float,
) -> LoaderTimes:
    """Measures how long the loader of a run takes for a batch, and why; `make` makes the loader of given examples.

    While it measures, it replaces the stores of the sources, which must not be in use elsewhere. Each of the five
    measurements takes `limit_s` seconds, and at least three batches for every thread.
    """
    sources = train.sources if isinstance(train, BlendedExamples) else (train,)
    staged = [source for source in sources if isinstance(source, StagedExamples)]
    many = max(8, 4 * num_threads)
    loader = make(train)
    kept = [_Keeping(source.store) for source in staged]
    for source, store in zip(staged, kept, strict=True):
        source.store = store
    try:
        loader_s, num_steps = _seconds(loader.batch, num_threads, limit_s=limit_s)
        asked = sum(store.asked for store in kept)
        for step in range(min(num_steps, _COUNTED_STEPS)):
            num_examples = (step + 1) * len(loader.batch(step)["weights"])
        fetches_per_example = (sum(store.asked for store in kept) - asked) / num_examples
        prepares = [_seconds(lambda step: loader.batch(step % num_steps), n, limit_s=limit_s)[0] for n in (1, many)]
    finally:
        for source, store in zip(staged, kept, strict=True):
            source.store = store.store
    fetches = [0.0, 0.0]
    if staged:
        fetching = make(_replaced(train, [_FetchOnly(source) for source in sources]))
        fetches, start = [], num_steps + 1
        for number in (1, many):
            seconds, taken = _seconds(fetching.batch, number, limit_s=limit_s, start=start)
            fetches.append(seconds * fetches_per_example)
            start += taken
    return LoaderTimes(
        loader_s,
        fetches[0],
        _limit(fetches, many),
        prepares[0],
        _limit(prepares, many),
        num_threads=num_threads,
        most_threads=many,
        num_samples=sum(map(len, sources)),
        sample_bytes=_mean_bytes(staged, kept) * sum(map(len, staged)) / sum(map(len, sources)),
    )


def _mean_bytes(sources: Sequence[StagedExamples], kept: Sequence["_Keeping"]) -> float:
    """Bytes of a sample of these sources, on average; those of sources of which none was drawn are taken for alike."""
    seen = [(len(source), store.mean_bytes) for source, store in zip(sources, kept, strict=True) if store.asked]
    return sum(number * each for number, each in seen) / sum(number for number, _ in seen) if seen else 0.0


def _replaced(
    train: ExampleSource | BlendedExamples, sources: Sequence[ExampleSource]
) -> ExampleSource | BlendedExamples:
    if not isinstance(train, BlendedExamples):
        return sources[0]
    blended = copy.copy(train)
    blended.sources = tuple(sources)
    return blended


def _limit(seconds: Sequence[float], many: int) -> float:
    """What no number of threads goes below, by the seconds with one and with many; 0 where that does not show."""
    one_s, many_s = seconds
    return 0.0 if many_s < 1.5 * one_s / many else min(one_s, many_s)


def _seconds(batch: Callable[[int], Batch], num_threads: int, *, limit_s: float, start: int = 0) -> tuple[float, int]:
    """Seconds that a batch takes with this many threads, and the number of batches made.

    The threads come to the ends of their batches at about the same time, so the median of the seconds of groups of
    `num_threads` batches counts. The first group, in which the threads start, does not.
    """
    times: list[float] = []
    iterator = prefetched(batch, start, num_steps=None, num_threads=num_threads)
    end_s = time.monotonic() + limit_s
    try:
        for number, _ in enumerate(iterator, 1):
            if number % num_threads == 0:
                times.append(time.monotonic())
                if len(times) > _LEAST_GROUPS and times[-1] >= end_s:
                    break
    finally:
        iterator.close()
    groups = np.diff(times)
    return statistics.median(groups.tolist()) / num_threads, len(times) * num_threads


class _Keeping:
    """A store that keeps everything, so that a sample is there when it is fetched again."""

    def __init__(self, store: Store):
        self.store = store
        self.asked = 0
        self._samples: dict[int, np.ndarray] = {}

    @property
    def mean_bytes(self) -> float:
        """Bytes that a cache takes for a sample, on average."""
        return OBJECT_BYTES + statistics.fmean(sample.nbytes for sample in self._samples.values())

    def fetch(self, number: int, read: Read) -> np.ndarray:
        self.asked += 1
        if number not in self._samples:
            self._samples[number] = self.store.fetch(number, read)
        return self._samples[number]


class _FetchOnly:
    """Fetches the samples of a source and makes nothing of them."""

    def __init__(self, source: ExampleSource):
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def example(self, index: int, *, epoch: int) -> Batch:
        if isinstance(self._source, StagedExamples):
            self._source.fetch(index)
        return {"weights": np.zeros(1, np.float32)}
