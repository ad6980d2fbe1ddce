import gc
import itertools
import threading
import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fiddlex.data import EvalBatches, HeldoutExamples, Loader, NextTokenExamples
from fiddlex.errors import DataError

SEQ_LEN = 2
PINNED_ORDER = [1, 2, 4, 5, 9, 7, 8, 6, 0, 3, 9, 6, 1, 8, 2, 0, 3, 5, 4, 7]  # of ten examples at seed 0

# grain takes milliseconds for an index of a handful of examples and microseconds for one of thousands, so tiny sources
# are pinned examples and the drawn ones are larger.
few_examples = settings(max_examples=15)


class EpochExamples:
    """Examples that hold their own index and epoch."""

    def __init__(self, num_examples: int):
        self._num_examples = num_examples

    def __len__(self) -> int:
        return self._num_examples

    def example(self, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        return {
            "tokens": np.array([index], np.int32),
            "targets": np.array([epoch], np.int32),
            "weights": np.ones(1, np.float32),
        }


def make_loader(num_examples: int, batch_size: int, *, seed: int = 0) -> Loader:
    return Loader(EpochExamples(num_examples), global_batch_size=batch_size, seed=seed, vocab_size=2**31)


def order(loader: Loader, num_steps: int) -> list[tuple[int, int]]:
    """(epoch, index) of each example of the first steps."""
    batches = [loader.batch(step) for step in range(num_steps)]
    return [pair for b in batches for pair in zip(b["targets"][:, 0].tolist(), b["tokens"][:, 0].tolist(), strict=True)]


def prefetch_threads() -> int:
    return sum(thread.name.startswith("grain") for thread in threading.enumerate())


def wait_for_threads_to_end() -> None:
    deadline = time.monotonic() + 10
    while prefetch_threads():
        assert time.monotonic() < deadline, "threads are still there"
        time.sleep(0.01)


def assert_equal_batches(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name])


@few_examples
@given(num_examples=st.integers(50, 300), batch_size=st.integers(1, 400), seed=st.integers(0, 2**40))
@example(num_examples=1, batch_size=1, seed=0)
@example(num_examples=3, batch_size=7, seed=0)
def test_each_epoch_is_a_permutation(num_examples, batch_size, seed):
    loader = make_loader(num_examples, batch_size, seed=seed)
    pairs = order(loader, -(-3 * num_examples // batch_size))
    for epoch in range(3):
        of_epoch = pairs[epoch * num_examples : (epoch + 1) * num_examples]
        assert sorted(of_epoch) == [(epoch, index) for index in range(num_examples)]


def test_epochs_and_seeds_differ():
    first, second = order(make_loader(100, 100), 2)[:100], order(make_loader(100, 100), 2)[100:]
    indices = [[index for _, index in pairs] for pairs in (first, second, order(make_loader(100, 100, seed=1), 1))]
    indices.append(list(range(100)))
    assert all(left != right for left, right in itertools.combinations(indices, 2))


def test_order_is_pinned():
    # A change here changes what every run trains on: checkpoints would resume into another order.
    assert [index for _, index in order(make_loader(10, 5), 4)] == PINNED_ORDER


@few_examples
@given(num_examples=st.integers(50, 500), batch_size=st.integers(1, 12), step=st.integers(0, 10**6))
@example(num_examples=2, batch_size=3, step=10**6)
def test_a_batch_depends_on_its_step_alone(num_examples, batch_size, step):
    used = make_loader(num_examples, batch_size)
    used.batch(step + 3)
    used.batch(0)
    assert_equal_batches(used.batch(step), make_loader(num_examples, batch_size).batch(step))


@few_examples
@given(start=st.integers(0, 30), num_steps=st.integers(0, 12), batch_size=st.integers(1, 20))
def test_iteration_equals_batches(start, num_steps, batch_size):
    loader = make_loader(130, batch_size)
    batches = list(loader.iterate(start, num_steps=num_steps))
    assert len(batches) == num_steps
    for step, batch in enumerate(batches, start):
        assert_equal_batches(batch, loader.batch(step))


@given(num_examples=st.integers(1, 40), batch_size=st.integers(1, 12), step=st.integers(0, 9), data=st.data())
def test_processes_make_the_rows_of_the_same_batches(num_examples, batch_size, step, data):
    rows = sorted(data.draw(st.sets(st.integers(0, batch_size - 1), min_size=1)))
    source, loader = EpochExamples(num_examples), make_loader(num_examples, batch_size)
    part = Loader(source, global_batch_size=batch_size, seed=0, vocab_size=2**31, rows=rows).batch(step)
    assert_equal_batches(part, {name: values[rows] for name, values in loader.batch(step).items()})
    whole, parts = (EvalBatches(source, batch_size=batch_size, vocab_size=2**31, rows=each) for each in (None, rows))
    assert len(whole) == len(parts)
    for one, other in zip(whole, parts, strict=True):
        assert_equal_batches(other, {name: values[rows] for name, values in one.items()})


def test_iteration_without_end():
    loader = make_loader(300, 2)
    batches = list(itertools.islice(loader.iterate(10**9), 20))
    for step, batch in enumerate(batches, 10**9):
        assert_equal_batches(batch, loader.batch(step))


@pytest.mark.parametrize("end", ["exhausted", "closed", "dropped"])
def test_threads_end(end):
    wait_for_threads_to_end()
    iterator = make_loader(300, 2).iterate(0, num_steps=20)
    next(iterator)
    assert prefetch_threads()
    if end == "exhausted":
        assert len(list(iterator)) == 19
    elif end == "closed":
        iterator.close()
    else:
        del iterator
        gc.collect()
    wait_for_threads_to_end()


def test_threads_end_at_an_error_that_is_kept():
    wait_for_threads_to_end()
    loader = Loader(EpochExamples(300), global_batch_size=2, seed=0, vocab_size=1)
    with pytest.raises(DataError) as info:
        list(loader.iterate(0))
    assert info.traceback  # its frames hold the iterator
    wait_for_threads_to_end()


def test_closing_drops_the_batches_that_wait():
    gate, fetched = threading.Event(), []
    ((_, first),) = order(make_loader(300, 1), 1)

    class Gated(EpochExamples):
        def example(self, index, *, epoch):
            fetched.append(index)
            assert index == first or gate.wait(10)
            return super().example(index, epoch=epoch)

    iterator = Loader(Gated(300), global_batch_size=1, seed=0, vocab_size=300).iterate(0)
    next(iterator)
    iterator.close()
    gate.set()
    wait_for_threads_to_end()
    assert len(fetched) <= 3  # the first batch, and those that the two threads were at


def test_batches_of_tokens():
    source = NextTokenExamples(np.arange(101, dtype=np.uint8), SEQ_LEN)
    batch = Loader(source, global_batch_size=50, seed=3, vocab_size=101).batch(0)
    assert {name: (values.shape, values.dtype.name) for name, values in batch.items()} == {
        "tokens": ((50, SEQ_LEN), "int32"),
        "targets": ((50, SEQ_LEN), "int32"),
        "weights": ((50, SEQ_LEN), "float32"),
    }
    assert sorted(batch["targets"].ravel()) == list(range(1, 101))


@pytest.mark.parametrize("value", [256, 2**31 + 7])
def test_tokens_outside_the_vocabulary(value):
    tokens = np.zeros(9, np.uint32)
    tokens[8] = value  # a target of the last example only
    loader = Loader(NextTokenExamples(tokens, 2), global_batch_size=4, seed=0, vocab_size=256)
    row = order(make_loader(4, 4), 1).index((0, 3))
    message = rf"step 0, row {row}: targets\[1\] is {value}, .*model\.vocab_size=256\. Set model\.vocab_size"
    with pytest.raises(DataError, match=message):
        loader.batch(0)
    with pytest.raises(DataError, match=message):
        list(loader.iterate(0, num_steps=1))


def test_what_cannot_be_loaded():
    with pytest.raises(DataError, match=r"no examples to load\. Use more data or a smaller model\.seq_len"):
        make_loader(0, 4)
    with pytest.raises(DataError, match=r"data\.seed=-1 must be at least 0"):
        make_loader(4, 4, seed=-1)
    with pytest.raises(IndexError, match="step -1 is negative"):
        make_loader(4, 4).batch(-1)


@given(length=st.integers(0, 80), seq_len=st.integers(1, 9), batch_size=st.integers(1, 9))
def test_evaluation_scores_every_token_once(length, seq_len, batch_size):
    source = HeldoutExamples(np.arange(length, dtype=np.uint8), seq_len)
    batches = EvalBatches(source, batch_size=batch_size, vocab_size=80)
    seen = list(batches)
    assert len(seen) == len(batches) == -(-len(source) // batch_size)
    assert all(values.shape == (batch_size, seq_len) for batch in seen for values in batch.values())
    assert [t for batch in seen for t in batch["targets"][batch["weights"] == 1].tolist()] == list(range(1, length))
    assert sum(batch["weights"].sum() for batch in seen) == max(length - 1, 0)


def test_evaluation_limit():
    source = HeldoutExamples(np.arange(100, dtype=np.uint8), 4)
    every = EvalBatches(source, batch_size=3, vocab_size=100)
    assert len(every) == 9
    some = EvalBatches(source, batch_size=3, vocab_size=100, limit=2)
    assert len(some) == len(list(some)) == 2
    assert_equal_batches(some[1], every[1])
    assert len(EvalBatches(source, batch_size=3, vocab_size=100, limit=50)) == 9
    with pytest.raises(IndexError, match="evaluation batch 2 of 2"):
        some[2]


def test_evaluation_outside_the_vocabulary():
    batches = EvalBatches(HeldoutExamples(np.arange(20), 4), batch_size=2, vocab_size=19)
    with pytest.raises(DataError, match=r"evaluation batch 2, row 0: tokens\[3\] is 19"):
        list(batches)
