"""Puts batches on the devices, sharded over `data`; each process prepares only the rows that its own devices hold."""

import contextlib
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.config import Config
from fiddlex.data import Batch, EvalBatches, ExampleSource, Loader
from fiddlex.data.caching import batches_digest, shared_folder
from fiddlex.data.dataset import Dataset
from fiddlex.data.loader import batch_number
from fiddlex.data.sample_log import SampleLog
from fiddlex.errors import DataError
from fiddlex.models.task_sizes import example_fields
from fiddlex.parallel.sharding import BATCH

if TYPE_CHECKING:
    from fiddlex.data.shared_batches import SharedBatches

DeviceBatch = dict[str, jax.Array]


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a batch (`example_fields`)."""
    size, specs = config.data.global_batch_size, batch_specs(config)
    return {
        name: jax.ShapeDtypeStruct((size, *shape), dtype, sharding=NamedSharding(mesh, specs[name]))
        for name, (shape, dtype) in example_fields(config).items()
    }


def batch_specs(config: Config) -> dict[str, P]:
    """The sharding of each field of a batch."""
    return dict.fromkeys(example_fields(config), BATCH)


class Feed:
    """The training and evaluation batches of a dataset, on a mesh; `workdir` gets the log of samples (None: no log)."""

    def __init__(self, dataset: Dataset, config: Config, mesh: Mesh, *, workdir: Path | None = None):
        self._left_out: tuple[int, ...] = ()
        self._dataset, self._config = dataset, config
        self._log_dir = workdir if config.data.log_samples else None
        self._log: SampleLog | None = None
        self._sharding = NamedSharding(mesh, BATCH)
        self._rows = _local_rows(self._sharding, config.data.global_batch_size)
        self._loader = Loader(
            dataset.train,
            global_batch_size=config.data.global_batch_size,
            seed=config.data.seed,
            vocab_size=config.model.vocab_size,
            rows=self._rows,
            num_threads=config.data.num_threads,
            numbered=self._log_dir is not None,
        )

    def train(self, start_step: int) -> Iterator[DeviceBatch]:
        """Yields training batches without end, starting with that of the step after `start_step`.

        Raises DataError when a batch has a token outside the vocabulary, or the log of samples cannot be written.
        """
        if self._log_dir and self._log is None:  # once, since all processes must; one may begin to iterate again
            self._log = SampleLog(self._log_dir, rank=jax.process_index(), start_step=start_step, rows=self._rows)
        with contextlib.closing(self._iterate(start_step)) as batches:
            for step, batch in enumerate(batches, start_step + 1):
                yield self._placed(self._log.write(step, batch) if self._log else batch)

    def leave_out(self, batches: Sequence[int]) -> None:
        """Leaves out the training batches of these numbers, in ascending order; the batches after them move up.

        The batches that `train` yields from the next call on are those of a new attempt, also in the log of samples.
        """
        self._left_out, self._log = tuple(batches), None

    def _iterate(self, start_step: int) -> Generator[Batch, None, None]:
        if self._config.data.share:
            shared = _shared(self._loader, self._dataset, self._config, self._rows, left_out=self._left_out)
            return shared.iterate(start_step)
        return self._loader.iterate(start_step, left_out=self._left_out)

    def require_heldout(self) -> ExampleSource:
        """The held-out examples; raises DataError when no data is held out."""
        if self._dataset.heldout is None:
            raise DataError(
                f"Nothing is held out of {self._dataset.source} to evaluate on: set data.eval_source, or "
                "data.eval_fraction above 0 (of megatron:PREFIX the second share of data.split), or train.eval_every=0."
            )
        return self._dataset.heldout

    def heldout(self) -> Iterator[tuple[DeviceBatch, int]]:
        """The held-out batches in order, or the first `data.eval_batches` of them.

        With each comes the number of its examples without filler. Raises DataError when no data is held out, or when a
        batch has a token outside the vocabulary.
        """
        return self._on_devices(self._heldout_batches(self._rows), len(self.require_heldout()))

    def examples(self, source: ExampleSource) -> Iterator[tuple[DeviceBatch, int]]:
        """All examples of `source` in order, in batches like those of `heldout`."""
        data, vocab_size = self._config.data, self._config.model.vocab_size
        batches = EvalBatches(source, batch_size=data.global_batch_size, vocab_size=vocab_size, rows=self._rows)
        return self._on_devices(batches, len(source))

    def _on_devices(self, batches: Sequence[Batch], number: int) -> Iterator[tuple[DeviceBatch, int]]:
        size = self._config.data.global_batch_size
        for i in range(len(batches)):
            yield self._placed(batches[i]), min(size, number - i * size)

    def _placed(self, batch: Batch) -> DeviceBatch:
        """A batch of this process's rows on the devices, as part of the global batch."""
        if self._sharding.is_fully_addressable:
            return jax.device_put(batch, self._sharding)
        size = self._config.data.global_batch_size

        def on_devices(values: np.ndarray) -> jax.Array:
            def of_device(index: tuple[slice, ...] | None) -> np.ndarray:
                assert index is not None
                first, last = np.searchsorted(self._rows, index[0].indices(size)[:2])
                return values[first:last]

            return jax.make_array_from_callback((size, *values.shape[1:]), self._sharding, of_device)

        return {name: on_devices(values) for name, values in batch.items()}

    def host_heldout(self) -> Sequence[Batch]:
        """The batches of `heldout` on the host, with all rows; each is made when it is accessed."""
        return self._heldout_batches(None)

    def _heldout_batches(self, rows: Sequence[int] | None) -> Sequence[Batch]:
        data = self._config.data
        return EvalBatches(
            self.require_heldout(),
            batch_size=data.global_batch_size,
            vocab_size=self._config.model.vocab_size,
            limit=data.eval_batches,
            rows=rows,
        )


def _shared(
    loader: Loader, dataset: Dataset, config: Config, rows: Sequence[int], *, left_out: Sequence[int]
) -> "SharedBatches":
    """The batches of the loader, prepared once for all runs that meet in `data.share` and leave out the same."""
    from fiddlex.data.shared_batches import SharedBatches  # takes a module that only Unix has

    return SharedBatches(
        shared_folder(config),
        batches_digest(config, dataset.fingerprint, rows=rows, left_out=left_out),
        make=lambda step: loader.batch(batch_number(step, left_out)),
        num_rows=len(rows),
        num_threads=config.data.num_threads,
        counts=dataset.counts,
    )


def _local_rows(sharding: NamedSharding, size: int) -> list[int]:
    """The rows of a batch of `size` that the devices of this process hold, in ascending order."""
    indices = sharding.addressable_devices_indices_map((size,)).values()
    slices = {index[0].indices(size)[:2] for index in indices if index is not None}
    return sorted(row for first, last in slices for row in range(first, last))
