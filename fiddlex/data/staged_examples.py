"""The two stages in which an example is made: *fetch* reads its stored sample, *prepare* makes the example of it.

    example(index, epoch) = prepare(fetch(index), index, epoch)

A sample is what a source has stored: the tokens of a window or of pieces of documents, in the dtype of the file. It
does not depend on the epoch, so that it can be kept (`fiddlex.data.sample_cache`). Masks, special tokens and padding
belong to the preparation. The terms are those of Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training"
(VLDB 2021, arXiv:2007.06775).
"""

import abc
import math
import threading
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

Read = Callable[[int], np.ndarray]


class Store(Protocol):
    """Where samples come from."""

    def fetch(self, number: int, read: Read) -> np.ndarray:
        """Sample `number`, which `read(number)` reads from the source's files; callable from several threads."""


class DirectStore:
    """Reads each sample from the source's files."""

    def fetch(self, number: int, read: Read) -> np.ndarray:
        return read(number)


class SlowStore:
    """A store that is slow on purpose, to test and to find out what a run would do on it.

    Each request takes `latency_s` before its first byte; requests of several threads wait at the same time. The bytes
    of all requests go through one channel of `bytes_per_s`, one request after the other.
    """

    def __init__(self, *, bytes_per_s: float = math.inf, latency_s: float = 0.0, store: Store | None = None):
        self._bytes_per_s, self._latency_s = bytes_per_s, latency_s
        self._store = store or DirectStore()
        self._lock = threading.Lock()
        self._free_s = 0.0  # when the channel has sent all that was requested, by the monotonic clock

    def fetch(self, number: int, read: Read) -> np.ndarray:
        start_s = time.monotonic() + self._latency_s
        sample = self._store.fetch(number, read)
        with self._lock:
            self._free_s = max(self._free_s, start_s) + sample.nbytes / self._bytes_per_s
            end_s = self._free_s if math.isfinite(self._bytes_per_s) else start_s
        if (wait_s := end_s - time.monotonic()) > 0:
            time.sleep(wait_s)
        return sample


def checked(index: int, length: int) -> int:
    """`index`; raises IndexError unless it is the number of one of `length` examples."""
    if not 0 <= index < length:
        raise IndexError(f"example {index} of {length}")
    return index


class StagedExamples(abc.ABC):
    """An `ExampleSource` whose examples are made in two stages."""

    store: Store = DirectStore()  # where samples are fetched from; at first the source's own files

    @abc.abstractmethod
    def __len__(self) -> int:
        """Number of examples in an epoch, and of samples."""

    @abc.abstractmethod
    def read(self, number: int) -> np.ndarray:
        """Reads sample `number` from the source's files: integers [tokens], a copy in memory."""

    @abc.abstractmethod
    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Makes example `index` of `epoch` of its sample; may fetch further samples. Does not change `sample`."""

    def fetch(self, number: int) -> np.ndarray:
        """Sample `number` from the store; the caller must not change it."""
        return self.store.fetch(number, self.read)

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        checked(index, len(self))
        return self.prepare(self.fetch(index), index, epoch=epoch)
