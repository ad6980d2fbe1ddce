"""A bounded cache of fetched samples that keeps what it has: CoorDL's MinIO cache (Mohan et al., VLDB 2021).

An epoch reads every sample once, in an order that is drawn anew. An LRU cache smaller than the data therefore throws
samples away shortly before they are read again. This cache never throws anything away: once it is full, each epoch
finds exactly the samples that it holds, whatever the order.

Invariant: a cache returns the sample that was put in, bit for bit, or None.
"""

import threading
from typing import Protocol

import numpy as np

from fiddlex.data.counts import FETCHED, HITS, DataCounts
from fiddlex.data.staged_examples import DirectStore, Read, Store

OBJECT_BYTES = 256  # of an array, its number and its entry, in addition to its tokens
_SOURCE_SHIFT = 48  # a key has the number of the source above this bit, and that of the sample below


class Cache(Protocol):
    """Samples by key, an integer of 64 bits; all methods may be called from several threads."""

    def open(self) -> None:
        """Makes ready to keep samples; raises DataError when there is no place to keep them."""

    def get(self, key: int) -> np.ndarray | None:
        """The sample, which the caller must not change; None when it is not in the cache."""

    def put(self, key: int, sample: np.ndarray) -> None:
        """Keeps a sample for which `get` has returned None, if there is room."""


class MemoryCache:
    """Samples in the memory of this process; `limit_bytes` bounds their bytes and those of Python's objects."""

    def __init__(self, limit_bytes: float):
        self._limit_bytes = limit_bytes
        self._num_bytes = 0
        self._samples: dict[int, np.ndarray] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._samples)

    def open(self) -> None:
        """Does nothing: there is memory until it is full."""

    def get(self, key: int) -> np.ndarray | None:
        return self._samples.get(key)

    def put(self, key: int, sample: np.ndarray) -> None:
        size = sample.nbytes + OBJECT_BYTES
        with self._lock:
            if key not in self._samples and self._num_bytes + size <= self._limit_bytes:
                self._samples[key] = sample
                self._num_bytes += size


class CachedStore:
    """Fetches samples from a cache that a blend's sources share, or else from `store`, and lets the cache keep them."""

    def __init__(self, cache: Cache, *, source: int, counts: DataCounts, store: Store | None = None):
        self.cache, self._counts = cache, counts
        self._first_key = source << _SOURCE_SHIFT
        self._store = store or DirectStore()
        counts.add(FETCHED, 0)
        counts.add(HITS, 0)

    def fetch(self, number: int, read: Read) -> np.ndarray:
        key = self._first_key | number
        sample = self.cache.get(key)
        if sample is not None:
            self._counts.add(HITS)
            return sample
        sample = self._store.fetch(number, read)
        self._counts.add(FETCHED)
        self.cache.put(key, sample)
        return sample
