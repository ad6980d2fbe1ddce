"""What bounds a run: the model of the loader, the verdict, and predictions against runs that are mended."""

import time
from fractions import Fraction

import numpy as np
import pytest

from fiddlex.data import Loader
from fiddlex.data.blended_examples import BlendedExamples
from fiddlex.data.counts import DataCounts
from fiddlex.data.sample_cache import OBJECT_BYTES, CachedStore, MemoryCache
from fiddlex.data.staged_examples import SlowStore, StagedExamples
from fiddlex.tools.stalls import (
    DEVICES,
    FETCH,
    PREPARE,
    Analysis,
    LoaderTimes,
    _Keeping,
    _mean_bytes,
    measure_loader,
    num_epochs,
)

ROWS = 2
EPOCHS = 3.5
NUM_EXAMPLES = 4000  # with few examples, to compute their order takes milliseconds


class SleepingExamples(StagedExamples):
    """Examples whose preparation takes a given time, on any number of threads at once or one after the other."""

    def __init__(self, num_examples: int, prepare_s: float):
        self._num_examples, self._prepare_s = num_examples, prepare_s

    def __len__(self) -> int:
        return self._num_examples

    def read(self, number: int) -> np.ndarray:
        return np.full(500, number, np.uint16)

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        time.sleep(self._prepare_s)
        assert sample[0] == index
        return {"tokens": sample.astype(np.int32), "weights": np.ones(1, np.float32)}


def times(**changes: float) -> LoaderTimes:
    """Two threads, 10 ms to fetch and 10 to prepare: 10 ms a batch."""
    fields = {
        "loader_s": 0.01,
        "fetch_one_thread_s": 0.01,
        "fetch_limit_s": 0.0,
        "prepare_one_thread_s": 0.01,
        "prepare_limit_s": 0.0,
        "num_threads": 2,
        "most_threads": 8,
        "num_samples": 1000,
        "sample_bytes": 2**30 / 1000,
    }
    return LoaderTimes(**(fields | changes))


# The store's channel bounds, which no number of threads makes faster.
CHANNEL = {
    "fetch_one_thread_s": 0.03,
    "fetch_limit_s": 0.015,
    "prepare_one_thread_s": 0.001,
    "loader_s": 0.0155,
}


@pytest.mark.parametrize("ratio", [1.5, 2, 4])
@pytest.mark.parametrize("bound", [FETCH, PREPARE, DEVICES])
def test_the_verdict(bound, ratio):
    # Without a bound each of the three takes 10 ms a step.
    of_loader = {f"{bound}_one_thread_s": 0.02 * ratio} if bound != DEVICES else {}
    both = {"fetch_one_thread_s": 0.02, "prepare_one_thread_s": 0.02} | of_loader
    loader_s = sum(both.values()) / 2
    analysis = Analysis(loader_s * ratio if bound == DEVICES else 0.01, times(loader_s=loader_s, **both), EPOCHS)
    assert analysis.bound == bound
    assert bool(analysis.mends) == (bound != DEVICES)
    assert f"by {bound}, " in analysis.describe()


def test_predictions_of_the_model():
    free = times()
    assert free.predicted_s() == pytest.approx(0.01)
    assert free.predicted_s(num_threads=4) == pytest.approx(0.005)
    assert free.predicted_s(cached=1.0) == pytest.approx(0.005)
    assert times(loader_s=0.02).predicted_s(num_threads=4) == pytest.approx(0.01)  # what is measured counts
    channel = times(fetch_limit_s=0.01)
    assert channel.predicted_s(num_threads=8) == pytest.approx(0.01)
    assert channel.predicted_s(cached=0.5, num_threads=8) == pytest.approx(0.005)
    assert times(prepare_limit_s=0.01).predicted_s(num_threads=8, cached=1.0) == pytest.approx(0.01)


def test_mends_are_the_least_that_keep_up():
    def fields(devices_s: float, **changes: float) -> list[dict[str, float]]:
        return [mend.fields for mend in Analysis(devices_s, times(**changes), EPOCHS).mends]

    assert fields(0.005)[0] == {"data.num_threads": 5}  # a quarter more than it takes
    assert fields(0.02) == []
    # The channel alone bounds: a cache of so much of 1 GiB that a batch takes half a step, which no threads replace.
    (cache,) = fields(0.01, **CHANNEL)
    assert cache == {"data.sample_cache_gib": pytest.approx(0.71)}
    analysis = Analysis(0.002, times(prepare_limit_s=0.01), EPOCHS)
    assert analysis.mends == []
    assert "neither a cache nor 8 threads; runs with the same batches can share" in analysis.describe()


def test_a_cache_is_advised_to_runs_of_more_than_an_epoch():
    longer = Analysis(0.01, times(**CHANNEL), EPOCHS)
    assert longer.describe().splitlines()[-1] == (
        "mend     data.sample_cache_gib=0.71: 10 ms a step, 1.6 times as fast, "
        "from the second of the run's 3.5 epochs on"
    )
    shorter = Analysis(0.01, times(**CHANNEL), 1.0)
    assert shorter.mends == []
    assert shorter.describe().splitlines()[-1] == (
        "cache    of no use to this run, which ends before its second epoch (1 epochs); with data.sample_cache_folder, "
        "later runs on the same data find what it has kept"
    )
    assert [mend.fields for mend in Analysis(0.005, times(), 0.5).mends] == [{"data.num_threads": 5}]


def test_epochs_of_a_run():
    one, other = SleepingExamples(10, 0.0), SleepingExamples(100, 0.0)
    assert num_epochs(one, 25) == 2.5
    # A quarter of 80 examples are those of the first source.
    assert num_epochs(BlendedExamples([one, other], [Fraction(1), Fraction(3)]), 80) == 2.0


def measured(devices_s: float, *, latency_s: float, prepare_s: float, num_threads: int = 2) -> Analysis:
    source = SleepingExamples(NUM_EXAMPLES, prepare_s)
    source.store = store = SlowStore(latency_s=latency_s)

    def make(examples) -> Loader:
        return Loader(examples, global_batch_size=ROWS, seed=0, vocab_size=NUM_EXAMPLES)

    found = measure_loader(make, source, num_threads=num_threads, limit_s=0.3)
    assert source.store is store
    return Analysis(devices_s, found, EPOCHS)


def run_s(fields: dict[str, float], devices_s: float, *, latency_s: float, prepare_s: float) -> float:
    """Seconds of a step of a run with these fields, in a later epoch."""
    source = SleepingExamples(NUM_EXAMPLES, prepare_s)
    threads = int(fields.get("data.num_threads", 2))
    cache = MemoryCache(fields.get("data.sample_cache_gib", 0.0) * 2**30)
    for number in range(NUM_EXAMPLES):
        cache.put(number, source.read(number))
    source.store = CachedStore(cache, source=0, counts=DataCounts(), store=SlowStore(latency_s=latency_s))
    loader = Loader(source, global_batch_size=ROWS, seed=0, vocab_size=NUM_EXAMPLES, num_threads=threads)
    ends = []
    for _ in loader.iterate(0, num_steps=11 * threads):
        time.sleep(devices_s)
        ends.append(time.monotonic())
    skipped = 4 * threads  # those that were prepared before the first step ended
    return float(np.median(np.diff(ends[skipped::threads]))) / threads


CASES = {
    FETCH: (0.030, 0.006, 0.030),  # seconds of a request and a preparation, of an example; of the devices, of a step
    PREPARE: (0.006, 0.030, 0.030),
    DEVICES: (0.015, 0.015, 0.030),
}


def test_stages_are_measured_apart():
    # A sleep can be longer than it should be, and is never shorter.
    slow_store = measured(1.0, latency_s=0.04, prepare_s=0.0).times
    assert slow_store.fetch_one_thread_s >= 0.04 * ROWS
    assert slow_store.loader_s >= 0.04 * ROWS / 2
    assert slow_store.prepare_one_thread_s < 0.02 * ROWS
    slow_preparation = measured(1.0, latency_s=0.0, prepare_s=0.04).times
    assert slow_preparation.prepare_one_thread_s >= 0.04 * ROWS
    assert slow_preparation.fetch_one_thread_s < 0.02 * ROWS
    assert slow_preparation.sample_bytes == 1000 + OBJECT_BYTES


def test_the_bytes_of_a_blend_are_those_of_its_samples():
    """Sources count by their samples; one of which nothing was drawn while measuring is taken for like the others."""

    class Larger(SleepingExamples):
        def read(self, number: int) -> np.ndarray:
            return np.full(5000, number, np.uint16)

        def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
            return super().prepare(sample[:500], index, epoch=epoch)

    def make(examples) -> Loader:
        return Loader(examples, global_batch_size=ROWS, seed=0, vocab_size=NUM_EXAMPLES)

    many, few = SleepingExamples(900, 0.0), Larger(100, 0.0)
    many.store = few.store = SlowStore()
    found = measure_loader(make, BlendedExamples([many, few], [Fraction(1)] * 2), num_threads=1, limit_s=0.02)
    assert found.sample_bytes == pytest.approx(0.9 * 1000 + 0.1 * 10_000 + OBJECT_BYTES)
    drawn, other = _Keeping(SlowStore()), _Keeping(SlowStore())
    drawn.fetch(0, many.read)
    assert _mean_bytes([many, few], [drawn, other]) == 1000 + OBJECT_BYTES
    assert _mean_bytes([few], [other]) == 0


@pytest.mark.long  # it needs a machine that wakes sleeping threads in time
@pytest.mark.parametrize(
    ("bound", "ratio"),
    [(bound, ratio) for bound in (FETCH, PREPARE, DEVICES) for ratio in (1.5, 2, 4)],
)
def test_measured_verdicts_and_mended_runs(bound, ratio):
    latency_s, prepare_s, devices_s = CASES[bound]
    if bound == DEVICES:
        devices_s *= ratio
    elif bound == FETCH:
        latency_s *= ratio
    else:
        prepare_s *= ratio
    # A busy machine wakes sleeping threads late, so a wrong prediction is one that is wrong three times.
    for last in (False, False, True):
        analysis = measured(slept(devices_s), latency_s=latency_s, prepare_s=prepare_s)
        fields, predicted_s = {}, analysis.step_s
        if analysis.mends:
            fields, predicted_s = analysis.mends[0].fields, analysis.mends[0].step_s
        mended_s = run_s(fields, devices_s, latency_s=latency_s, prepare_s=prepare_s)
        found, expected = (analysis.bound, mended_s), (bound, pytest.approx(predicted_s, rel=0.1))
        if last or found == expected:
            assert found == expected
            return


def slept(seconds: float) -> float:
    """What it takes to sleep for these seconds."""
    times = [time.monotonic()]
    for _ in range(11):
        time.sleep(seconds)
        times.append(time.monotonic())
    return float(np.median(np.diff(times)))
