"""Runs that prepare each batch once for all: who prepares what, and that nobody gets another batch than alone."""

import collections
import os
import pathlib
import random
import signal
import threading
import time

import numpy as np
import pytest

from fiddlex.data import shared_batches
from fiddlex.data.caching import batches_digest
from fiddlex.data.counts import PREPARED, TAKEN, DataCounts
from fiddlex.data.shared_batches import KEPT, SharedBatches
from fiddlex.errors import DataError
from tests.data.test_sample_cache import config, forked

ROWS, STEPS = 3, 40


def made(step: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {"tokens": rng.integers(0, 99, (ROWS, 50), np.int32), "weights": rng.random((ROWS, 50), np.float32)}


def assert_right(batch: dict[str, np.ndarray], step: int) -> None:
    expected = made(step)
    assert batch.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(batch[name], values)
        assert batch[name].dtype == values.dtype


class Run:
    """A run that has joined, and what it has prepared."""

    def __init__(self, folder: pathlib.Path, *, step: int = 0, digest: str = "batches"):
        self.steps, self.counts = [], DataCounts()
        self.batches = SharedBatches(folder, digest, make=self.make, num_rows=ROWS, num_threads=2, counts=self.counts)
        self.batches.join(step)

    def make(self, step: int) -> dict[str, np.ndarray]:
        self.steps.append(step)
        return made(step)

    def take(self, *steps: int) -> None:
        for step in steps:
            assert_right(self.batches.batch(step), step)


def files(folder: pathlib.Path) -> list[int]:
    return sorted(int(path.stem) for path in folder.glob("*/*.npz"))


def test_each_batch_is_prepared_once_and_removed_when_all_have_it(tmp_path):
    runs = [Run(tmp_path) for _ in range(3)]
    for step in range(STEPS):
        for run in runs[step % 3 :] + runs[: step % 3]:
            assert files(tmp_path) == ([] if run is runs[step % 3] else [step])
            run.take(step)
    assert [run.steps for run in runs] == [list(range(first, STEPS, 3)) for first in range(3)]
    prepared, taken = (sum(run.counts.totals()[name] for run in runs) for name in (PREPARED, TAKEN))
    assert (prepared, taken) == (STEPS * ROWS, 2 * STEPS * ROWS)
    assert runs[1].counts.describe() == "other runs had prepared 81 of 120 examples"


def test_threads_of_runs_in_step_prepare_each_batch_once(tmp_path):
    runs, together = [Run(tmp_path) for _ in range(4)], threading.Barrier(4)
    errors = []

    def train(run: Run) -> None:
        try:
            for step in range(STEPS):
                together.wait(20)
                run.take(step)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    times = collections.Counter(step for run in runs for step in run.steps)
    assert set(times.values()) == {1}
    assert times.keys() >= set(range(STEPS))


def test_a_run_alone_writes_nothing(tmp_path):
    run = Run(tmp_path)
    run.take(*range(5))
    assert (run.steps, files(tmp_path)) == ([0, 1, 2, 3, 4], [])
    assert [len(batch["tokens"]) for batch in run.batches.iterate(5, num_steps=30)] == [ROWS] * 30
    assert not list(tmp_path.glob("*/members/*"))


def test_a_slow_run_and_a_late_one_prepare_for_themselves_in_a_bounded_folder(tmp_path):
    fast, slow = Run(tmp_path), Run(tmp_path)
    fast.take(*range(3 * KEPT))
    assert files(tmp_path) == list(range(KEPT))  # those that the slow run needs next
    slow.take(*range(2 * KEPT))
    assert slow.steps == list(range(KEPT, 2 * KEPT))  # it took the others
    late = Run(tmp_path, step=2 * KEPT)
    late.take(2 * KEPT)
    slow.take(2 * KEPT)
    assert late.steps + slow.steps[KEPT:] == [2 * KEPT]  # the two are near each other
    slow.batches.leave()
    late.batches.leave()
    assert files(tmp_path) == []


def test_other_batches_do_not_meet_and_what_dead_runs_left_is_removed(tmp_path):
    first, second = Run(tmp_path), Run(tmp_path)
    first.take(0)
    assert files(tmp_path) == [0]
    for run in (first, second):
        os.close(run.batches._member._close.detach()[2][0])  # as when the process is killed
    other = Run(tmp_path, digest="other")
    assert files(tmp_path) == []
    other.take(0)
    assert other.steps == [0]


def test_a_run_does_not_wait_for_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_batches, "_LEAST_PATIENCE_S", 0.05)
    run, other = Run(tmp_path), Run(tmp_path)
    has_lock, gate = threading.Event(), threading.Event()

    def hang(step: int):
        has_lock.set()
        gate.wait(30)
        return made(step)

    other.batches._make = hang
    hanging = threading.Thread(target=other.batches.batch, args=(0,))
    hanging.start()
    has_lock.wait(30)
    run.take(0)
    assert {0, 1} <= set(run.steps)  # while it waited it prepared the next one
    monkeypatch.setattr(shared_batches, "_LEAST_PATIENCE_S", 1e6)
    run.take(64)  # of the same lock, for which it does not wait again
    gate.set()
    hanging.join()


@pytest.mark.parametrize("share", [0.0, 0.02, 0.1, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("damage", ["flip", "cut"])
def test_a_damaged_batch_is_made_again(tmp_path, share, damage):
    first, second = Run(tmp_path), Run(tmp_path)
    first.take(0)
    (path,) = tmp_path.glob("*/0.npz")
    content = bytearray(path.read_bytes())
    place = int(share * len(content))
    content[place] ^= 64
    path.write_bytes(content[:place] if damage == "cut" else content)
    second.take(0)


def test_a_full_disk_and_a_folder_that_cannot_be_used(tmp_path, monkeypatch, caplog):
    first, second = Run(tmp_path), Run(tmp_path)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    for run in (first, second):
        run.take(0, 1)
        assert run.steps == [0, 1]
    assert caplog.text.count("No space left on device. Each run prepares the batches that it does not find") == 1
    assert not list(tmp_path.glob("*/*.tmp"))
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.share=.*file: .*best below /dev/shm"):
        Run(tmp_path / "file")


@pytest.mark.parametrize("fails", ["_awaited", "_sweep"])
def test_a_passing_error_stops_no_later_sharing(tmp_path, monkeypatch, fails):
    first, second = Run(tmp_path), Run(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(first.batches, fails, lambda *args: (_ for _ in ()).throw(OSError(24, "Too many open files")))
        first.take(0)
    second.take(0)
    for step in range(1, STEPS):
        first.take(step)
        second.take(step)
    assert first.steps == list(range(STEPS))
    assert second.steps == ([0] if fails == "_awaited" else [])  # that batch alone was not published
    assert not files(tmp_path)


def test_an_error_in_a_batch_is_raised_by_the_step_that_needs_it(tmp_path):
    run, _ = Run(tmp_path), Run(tmp_path)

    def broken(step: int):
        if step == 2:
            raise DataError("step 2 is bad")
        return made(step)

    run.batches._make = broken
    assert run.batches._prepare_ahead(1)
    assert files(tmp_path) == [3]
    run.take(0, 1)
    with pytest.raises(DataError, match="step 2 is bad"):
        run.batches.batch(2)
    run.take(3)


def work(folder: pathlib.Path, name: str) -> None:
    """A process that trains, and logs what it prepares and takes."""
    run = Run(folder)
    with (folder.parent / f"{name}-prepared").open("a", buffering=1) as prepared:
        run.batches._make = lambda step: (prepared.write(f"{step}\n"), made(step))[1]
        for step in range(STEPS):
            assert_right(run.batches.batch(step), step)
            time.sleep(0.002)
    run.batches.leave()
    (folder.parent / f"{name}-done").touch()


def test_killed_runs_leave_the_others_nothing_to_lack(tmp_path):
    folder = tmp_path / "share"
    runs = [forked(lambda name=name: work(folder, name)) for name in "abcd"]
    for run in runs[:2]:
        time.sleep(random.uniform(0.01, 0.1))
        os.kill(run, signal.SIGKILL)
    for run in runs:
        os.waitpid(run, 0)
    assert {path.name for path in tmp_path.glob("*-done")} >= {"c-done", "d-done"}
    Run(folder).batches.leave()  # a killed process may have died after the others left
    assert files(folder) == []
    assert not list(folder.glob("*/members/*"))


def test_the_name_of_batches_has_what_they_follow_from():
    def name(rows=(0, 1), **fields) -> str:
        return batches_digest(config(**fields), "f", rows=rows)

    assert len({name(), name(num_threads=3), name(sample_cache_gib=1.0), name(share="x"), name(eval_batches=2)}) == 1
    other = [
        name(),
        name((2, 3)),
        name(seed=1),
        name(global_batch_size=8),
        name(vocab_size=300),
        name(mask_fraction=0.2),
    ]
    assert len(set(other)) == len(other)
