"""Stores between a source and its files: that they give the same samples, and how slow a slow one is."""

import threading
import time

import numpy as np
import pytest

from fiddlex.data import NextTokenExamples
from fiddlex.data.staged_examples import SlowStore

TOKENS = np.arange(1001, dtype=np.uint16)


def seconds(store: SlowStore, *, num_threads: int, num_samples: int) -> float:
    source = NextTokenExamples(TOKENS, 50)  # samples of 102 bytes
    source.store = store
    start_s = time.monotonic()

    def fetch() -> None:
        for number in range(num_samples):
            np.testing.assert_array_equal(source.fetch(number), TOKENS[50 * number : 50 * number + 51])

    threads = [threading.Thread(target=fetch) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - start_s


@pytest.mark.parametrize("num_threads", [1, 4])
def test_a_slow_store_is_as_slow_as_it_is_told_to_be(num_threads):
    # Latencies pass at the same time, and bytes one after the other.
    latency = seconds(SlowStore(latency_s=0.01), num_threads=num_threads, num_samples=10)
    assert 0.1 <= latency < 0.1 * num_threads + 0.2 * (num_threads == 1)
    channel = seconds(SlowStore(bytes_per_s=102 / 0.01), num_threads=num_threads, num_samples=5)
    assert channel >= 0.05 * num_threads
