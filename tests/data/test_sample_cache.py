"""Caches of fetched samples, in memory and on disk: what they hold, and that it is right whatever happens to them."""

import collections
import os
import pathlib
import random
import signal
import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.config import Config
from fiddlex.data import NextTokenExamples
from fiddlex.data.caching import keep_samples, samples_digest
from fiddlex.data.counts import FETCHED, HITS, DataCounts
from fiddlex.data.disk_cache import SUFFIX, DiskCache
from fiddlex.data.sample_cache import CachedStore, MemoryCache
from fiddlex.errors import ConfigError, DataError

SEQ_LEN, NUM_SAMPLES = 7, 60
TOKENS = np.arange(SEQ_LEN * NUM_SAMPLES + 1, dtype=np.uint16)
RECORD_BYTES = 32 + 2 * (SEQ_LEN + 1)  # of a file
OBJECT_BYTES = 256 + 2 * (SEQ_LEN + 1)  # in memory


class LeastRecentlyUsed:
    """What a page cache does, to compare with."""

    def __init__(self, capacity: int):
        self._capacity, self._samples = capacity, collections.OrderedDict()

    def get(self, key):
        if key in self._samples:
            self._samples.move_to_end(key)
        return self._samples.get(key)

    def put(self, key, sample):
        self._samples[key] = sample
        if len(self._samples) > self._capacity:
            self._samples.popitem(last=False)


def sample(number: int) -> np.ndarray:
    return TOKENS[number * SEQ_LEN : (number + 1) * SEQ_LEN + 1].copy()


def hits_by_epoch(cache, *, seed: int) -> list[int]:
    """The hits of each of three epochs, each in an order of its own; all examples are those of a source without it."""
    counts, rng, plain = DataCounts(), np.random.default_rng(seed), NextTokenExamples(TOKENS, SEQ_LEN)
    cached = NextTokenExamples(TOKENS, SEQ_LEN)
    cached.store = CachedStore(cache, source=0, counts=counts)
    hits = []
    for epoch in range(3):
        for index in rng.permutation(NUM_SAMPLES).tolist():
            example = cached.example(index, epoch=epoch)
            for name, values in plain.example(index, epoch=epoch).items():
                np.testing.assert_array_equal(example[name], values)
        since = counts.take()
        assert sum(since.values()) == NUM_SAMPLES
        hits.append(since[HITS])
    return hits


@pytest.mark.parametrize("kept", [0, 1, 20, 59, 60, 100])
@pytest.mark.parametrize("kind", ["memory", "disk"])
@settings(max_examples=4)
@given(seed=st.integers(0, 2**30))
def test_hits_of_an_epoch_are_the_samples_held(kept, kind, seed, tmp_path_factory):
    if kind == "memory":
        cache = MemoryCache(kept * OBJECT_BYTES + 1)
    else:
        cache = DiskCache(tmp_path_factory.mktemp("cache"), "name", kept * RECORD_BYTES + 1)
    held = min(kept, NUM_SAMPLES)
    assert hits_by_epoch(cache, seed=seed) == [0, held, held]
    assert len(cache) == held


def test_least_recently_used_finds_less():
    hits = [hits_by_epoch(LeastRecentlyUsed(20), seed=seed)[1:] for seed in range(20)]
    assert max(map(max, hits)) < 20  # of the 20 that a cache without eviction finds
    assert np.mean(hits) < 10


def test_sources_of_a_blend_share_a_cache_and_keep_apart():
    cache, counts = MemoryCache(1e6), DataCounts()
    stores = [CachedStore(cache, source=number, counts=counts) for number in range(2)]
    first, second = (
        store.fetch(5, lambda number, start=start: sample(number + start)) for start, store in enumerate(stores)
    )
    for store, expected in zip(stores, (first, second), strict=True):
        np.testing.assert_array_equal(store.fetch(5, None), expected)
    assert counts.totals() == {FETCHED: 2, HITS: 2}


def filled(folder: pathlib.Path, number: int = 10, *, limit_bytes: float = 1e6) -> DiskCache:
    cache = DiskCache(folder, "name", limit_bytes)
    for key in range(number):
        if cache.get(key) is None:
            cache.put(key, sample(key))
    return cache


def found(cache: DiskCache, number: int = 10) -> list[int]:
    """The keys in the cache; all samples are right."""
    keys = []
    for key in range(number):
        if (tokens := cache.get(key)) is not None:
            np.testing.assert_array_equal(tokens, sample(key))
            assert tokens.dtype == np.uint16
            keys.append(key)
    return keys


def test_a_file_outlives_its_process_and_is_shared(tmp_path):
    first = filled(tmp_path, 4)
    second = DiskCache(tmp_path, "name", 1e6)
    assert found(second) == [0, 1, 2, 3]
    second.put(7, sample(7))
    first.put(7, sample(7))  # it is there already
    assert found(first) == found(second) == [0, 1, 2, 3, 7]
    assert first.path.stat().st_size == 5 * RECORD_BYTES
    assert found(DiskCache(tmp_path, "other", 1e6)) == []


@pytest.mark.parametrize("dtype", ["u1", "<u2", "<i4", ">u2", "i8"])
def test_samples_of_any_dtype_and_length(tmp_path, dtype):
    for length in (0, 1, 100):
        DiskCache(tmp_path, "name", 1e6).put(length, np.arange(length, dtype=dtype))
        tokens = DiskCache(tmp_path, "name", 1e6).get(length)
        np.testing.assert_array_equal(tokens, np.arange(length))
        assert tokens.dtype == np.dtype(dtype).newbyteorder("<")


@pytest.mark.parametrize("place", [*range(RECORD_BYTES), *range(4 * RECORD_BYTES, 5 * RECORD_BYTES)])
def test_a_flipped_bit_is_never_a_wrong_sample(tmp_path, place):
    path = filled(tmp_path).path
    content = bytearray(path.read_bytes())
    content[place] ^= 16
    path.write_bytes(content)
    damaged = place // RECORD_BYTES
    cache = DiskCache(tmp_path, "name", 1e6)
    in_header = place % RECORD_BYTES < 32
    assert found(cache) == [key for key in range(10) if key < damaged or (key > damaged and not in_header)]
    assert found(filled(tmp_path)) == list(range(10))  # what lacks is fetched and written again
    assert found(DiskCache(tmp_path, "name", 1e6)) == list(range(10))
    assert path.stat().st_size == 10 * RECORD_BYTES


@pytest.mark.parametrize("left", [0, 1, 31, 32, 47, 48, 49, RECORD_BYTES * 9 + 40])
def test_a_cut_file_is_continued(tmp_path, left):
    live = filled(tmp_path)
    os.truncate(live.path, left)
    assert found(DiskCache(tmp_path, "name", 1e6)) == list(range(left // RECORD_BYTES))
    assert found(filled(tmp_path)) == list(range(10))
    assert live.path.stat().st_size == 10 * RECORD_BYTES
    assert found(live) == list(range(10))


def test_a_full_disk_and_a_file_that_cannot_be_written(tmp_path, monkeypatch, caplog):
    cache, whole = filled(tmp_path, 3), os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: whole(file, data[:20], place))
    cache.put(5, sample(5))
    monkeypatch.undo()
    assert "no more samples are added: No space left on device" in caplog.text
    assert found(cache) == found(DiskCache(tmp_path, "name", 1e6)) == [0, 1, 2]
    assert cache.path.stat().st_size == 3 * RECORD_BYTES
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.sample_cache_folder=.*file: cannot open"):
        DiskCache(tmp_path / "file", "name", 1e6).get(0)


def write_again_and_again(folder: pathlib.Path) -> None:
    while True:
        filled(folder, NUM_SAMPLES)
        (folder / f"name{SUFFIX}").unlink(missing_ok=True)


def forked(work: Callable[[], None]) -> int:
    """The process that does the work."""
    with warnings.catch_warnings(action="ignore"):  # jax warns of forks; the process does not use it
        child = os.fork()
    if not child:
        try:
            work()
        finally:
            os._exit(1)
    return child


def test_killed_writers_leave_nothing_wrong(tmp_path):
    for _ in range(10):
        writers = [forked(lambda: write_again_and_again(tmp_path)) for _ in range(2)]
        time.sleep(random.uniform(0.01, 0.05))
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            os.waitpid(writer, 0)
        assert len(found(DiskCache(tmp_path, "name", 1e6), NUM_SAMPLES)) == len(DiskCache(tmp_path, "name", 1e6))
        assert found(filled(tmp_path, NUM_SAMPLES), NUM_SAMPLES) == list(range(NUM_SAMPLES))


def config(**fields) -> Config:
    result = Config()
    result.data.source = "text:/nowhere"
    for name, value in fields.items():
        setattr(result.data if hasattr(result.data, name) else result.model, name, value)
    return result


def test_the_name_of_samples_has_what_they_follow_from(tmp_path):
    same = [config(), config(global_batch_size=8), config(seed=3), config(share="x"), config(eval_batches=3)]
    assert len({samples_digest(each, "f") for each in same}) == 1
    other = [config(seq_len=64), config(eval_fraction=0.1), config(pack=False), config(source=f"text:{tmp_path}")]
    names = [samples_digest(each, "f") for each in (config(), *other)] + [samples_digest(config(), "g")]
    (tmp_path / "a.txt").write_text("more")
    names.append(samples_digest(other[-1], "f"))
    assert len(set(names)) == len(names)
    megatron = [config(source=f"megatron:{tmp_path}/a", seed=seed) for seed in (0, 1)]
    assert len({samples_digest(each, "f") for each in megatron}) == 2  # the seed orders the documents


def test_what_keeps_nothing_is_refused():
    for fields, message in (
        ({"sample_cache_folder": "/tmp/x"}, "data.sample_cache_gib=0.0: it changes nothing"),
        ({"sample_cache_gib": -1.0}, "data.sample_cache_gib=-1.0 must be at least 0"),
        ({"num_threads": 0}, "data.num_threads=0 must be at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            config(**fields).validate()
    labelled = config(source="tsv:/x", sample_cache_gib=1.0, labels="a,b")
    labelled.model.family, labelled.model.objective = "bert", "classification"
    with pytest.raises(ConfigError, match=r"labelled texts are all in memory, and nothing is fetched\. Use 0"):
        labelled.validate()


def test_a_config_chooses_the_cache(tmp_path):
    for fields in ({}, {"sample_cache_gib": 1.0}, {"sample_cache_gib": 1.0, "sample_cache_folder": str(tmp_path)}):
        source, counts = NextTokenExamples(TOKENS, SEQ_LEN), DataCounts()
        keep_samples(config(**fields), [source], fingerprint="f", counts=counts)
        for _ in range(2):
            source.example(3, epoch=0)
        assert counts.take() == ({FETCHED: 1, HITS: 1} if fields else {})
        assert counts.describe() == ("1 of 2 samples (50.0%) came from the cache" if fields else "")
    assert len(list(tmp_path.glob("*.samples"))) == 1
