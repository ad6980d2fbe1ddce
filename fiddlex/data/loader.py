"""Batches of examples: shuffled ones for training, all in order for evaluation.

Invariant: a training batch is a function of the seed and the step. Example k of a run, k = step·global_batch_size +
row, is example k mod n of epoch k div n; each epoch is a permutation of all n examples, which `grain` computes index by
index. So the step alone suffices to resume a run, each example occurs once per epoch, and a batch can span two epochs.
In a blend, k alone decides which source gives example k; each source has its own epochs, and its own k in these rules.
"""

import sys
from collections.abc import Callable, Generator, Sequence
from fractions import Fraction

import numpy as np

from fiddlex.data.blended_examples import BlendedExamples
from fiddlex.data.examples import ExampleSource
from fiddlex.errors import DataError

Batch = dict[str, np.ndarray]

SAMPLES = "samples"  # the field of a batch that says which examples it has
_PREFETCHED_BATCHES = 4  # prepared ahead at least; at least twice as many as there are threads


class Loader:
    """Training batches in an order fixed by `seed`, which is at least 0.

    Args:
      global_batch_size: examples per step; may exceed the number of examples.
      vocab_size: every token and target must be below it.
      rows: the rows of each batch to make, in ascending order; None: all. A process of several makes those that its
        devices hold.
      num_threads: threads that prepare batches ahead. Two keep up with a step of a few milliseconds.
      numbered: whether batches have the field `SAMPLES`, int64[rows, 3]: the number of the source, of the example in
        it, and of its epoch.

    Raises:
      DataError: when there are no examples or the seed is negative.
    """

    def __init__(
        self,
        source: ExampleSource | BlendedExamples,
        *,
        global_batch_size: int,
        seed: int,
        vocab_size: int,
        rows: Sequence[int] | None = None,
        num_threads: int = 2,
        numbered: bool = False,
    ):
        blended = source if isinstance(source, BlendedExamples) else BlendedExamples([source], [Fraction(1)])
        if not all(map(len, blended.sources)):
            raise DataError("There are no examples to load. Use more data or a smaller model.seq_len.")
        if seed < 0:
            raise DataError(f"data.seed={seed} must be at least 0.")
        self._sources, self._blend = blended.sources, blended.blend
        self._global_batch_size = global_batch_size
        self._rows = range(global_batch_size) if rows is None else rows
        self._vocab_size = vocab_size
        self._num_threads, self._numbered = num_threads, numbered
        import grain  # takes a second, which processes that only prepare data need not spend

        # `repeat` gives each epoch a new seed, and no array of the data's size is stored. Computing an index takes
        # microseconds, but milliseconds when there are only a few examples.
        self._orders = [grain.MapDataset.range(len(each)).seed(seed).shuffle().repeat() for each in self._sources]
        # At the first access grain sets up its statistics, which two threads must not share.
        _ = [order[0] for order in self._orders]

    def batch(self, step: int) -> Batch:
        """The batch of `step`, counted from 0: the fields of its examples, stacked (`tokens` int32[rows, seq_len], …).

        Raises:
          DataError: when a token lies outside the vocabulary.
        """
        if step < 0:
            raise IndexError(f"step {step} is negative")
        first = step * self._global_batch_size
        batch = _stack([self._example(first + row) for row in self._rows])
        _check_vocab(batch, self._vocab_size, where=f"step {step}", rows=self._rows)
        return batch

    def iterate(
        self, start_step: int, *, num_steps: int | None = None, left_out: Sequence[int] = ()
    ) -> Generator[Batch, None, None]:
        """`batch(start_step)`, `batch(start_step + 1)`, …, prepared ahead by background threads.

        The threads end when the iteration ends, or when the iterator is closed or dropped. With `num_steps` None it
        does not end by itself. `left_out` has the numbers of the batches to leave out, in ascending order; those after
        them move up (`batch_number`).
        """

        def batch(step: int) -> Batch:
            return self.batch(batch_number(step, left_out))

        return prefetched(batch, start_step, num_steps=num_steps, num_threads=self._num_threads)

    def _example(self, k: int) -> Batch:
        number, nth = self._blend.place(k)
        source = self._sources[number]
        index, epoch = int(self._orders[number][nth]), nth // len(source)
        example = source.example(index, epoch=epoch)
        return example | {SAMPLES: np.array([number, index, epoch])} if self._numbered else example


def prefetched(
    batch: Callable[[int], Batch], start_step: int, *, num_steps: int | None, num_threads: int
) -> Generator[Batch, None, None]:
    """`batch(start_step)`, `batch(start_step + 1)`, …, prepared ahead by background threads, see `Loader.iterate`."""
    import grain

    stop = sys.maxsize if num_steps is None else start_step + num_steps
    steps = grain.MapDataset.source(_Steps(batch, stop))[start_step:]
    buffer_size = max(_PREFETCHED_BATCHES, 2 * num_threads)
    iterator = iter(steps.to_iter_dataset(grain.ReadOptions(num_threads, buffer_size)))
    try:
        yield from iterator
    finally:
        iterator.close()


def batch_number(step: int, left_out: Sequence[int]) -> int:
    """The batch of a step, both counted from 0, in a run that leaves out the batches `left_out`, in ascending order."""
    number = step
    for each in left_out:
        number += each <= number
    return number


class EvalBatches(Sequence[Batch]):
    """All examples in order, in batches of one shape; the last batch is padded with rows of zeros, weights included.

    The examples are those of epoch 0. A batch is made when it is accessed; an access raises DataError at a token
    outside the vocabulary. `limit` is the most batches, 0: all; `rows` is as in `Loader`.
    """

    def __init__(
        self,
        source: ExampleSource,
        *,
        batch_size: int,
        vocab_size: int,
        limit: int = 0,
        rows: Sequence[int] | None = None,
    ):
        self._source = source
        self._batch_size = batch_size
        self._vocab_size = vocab_size
        self._rows = range(batch_size) if rows is None else rows
        num_batches = -(-len(source) // batch_size)
        self._num_batches = min(num_batches, limit) if limit else num_batches

    def __len__(self) -> int:
        return self._num_batches

    def __getitem__(self, index: int) -> Batch:  # type: ignore[override]  # no slices
        if not 0 <= index < len(self):
            raise IndexError(f"evaluation batch {index} of {len(self)}")
        numbers = [index * self._batch_size + row for row in self._rows]
        examples = [self._source.example(number, epoch=0) for number in numbers if number < len(self._source)]
        like = examples[0] if examples else self._source.example(0, epoch=0)
        filler = {name: np.zeros_like(values) for name, values in like.items()}
        batch = _stack(examples + [filler] * (len(numbers) - len(examples)))
        _check_vocab(batch, self._vocab_size, where=f"evaluation batch {index}", rows=self._rows)
        return batch


class _Steps:
    """Batches as a random-access source for grain."""

    def __init__(self, batch: Callable[[int], Batch], stop: int):
        self._batch = batch
        self._stop = stop

    def __len__(self) -> int:
        return self._stop

    def __getitem__(self, step: int) -> Batch:
        return self._batch(int(step))


def _stack(examples: Sequence[Batch]) -> Batch:
    return {name: np.stack([example[name] for example in examples]) for name in examples[0]}


def _check_vocab(batch: Batch, vocab_size: int, *, where: str, rows: Sequence[int]) -> None:
    """Raises DataError when `tokens` or `targets` exceed the vocabulary; an embedding would clamp them silently."""
    for name in ("tokens", "targets"):
        if name not in batch:
            continue
        # Ids of a uint32 file that int32 cannot hold regain their large values when read as unsigned.
        ids = batch[name].view(np.uint32)
        if ids.max() >= vocab_size:
            row, *place = (int(i) for i in np.unravel_index(np.argmax(ids >= vocab_size), ids.shape))
            raise DataError(
                f"{where}, row {rows[row]}: {name}{place} is {ids[row, *place]}, outside the vocabulary of "
                f"model.vocab_size={vocab_size}. Set model.vocab_size, or data.token_dtype if the file's dtype is "
                "another."
            )
