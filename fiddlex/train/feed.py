"""Batches on the devices: what the loader prepares on the host, sharded over `data`."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from fiddlex.config import Config
from fiddlex.data import Corpus, HeldoutExamples, Loader, NextTokenExamples, eval_batches
from fiddlex.errors import DataError
from fiddlex.parallel.sharding import BATCH

DeviceBatch = dict[str, jax.Array]


def abstract_batch(config: Config, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtypes and shardings of a batch: int32 `tokens` and `targets`, float32 `weights`."""
    shape, sharding = (config.data.global_batch_size, config.model.seq_len), NamedSharding(mesh, BATCH)
    dtypes: dict[str, Any] = {"tokens": np.int32, "targets": np.int32, "weights": np.float32}
    return {name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding) for name, dtype in dtypes.items()}


class Feed:
    """Training and evaluation batches of a corpus, on a mesh."""

    def __init__(self, corpus: Corpus, config: Config, mesh: Mesh):
        self._corpus, self._config = corpus, config
        self._sharding = NamedSharding(mesh, BATCH)
        self._loader = Loader(
            NextTokenExamples(corpus.train.tokens, config.model.seq_len),
            global_batch_size=config.data.global_batch_size,
            seed=config.data.seed,
            vocab_size=config.model.vocab_size,
        )

    def train(self, start_step: int) -> Iterator[DeviceBatch]:
        """The training batches from batch number `start_step` (from 0) on, without end.

        Raises:
          DataError: at a token outside the vocabulary.
        """
        for batch in self._loader.iterate(start_step):
            yield jax.device_put(batch, self._sharding)

    def require_heldout(self) -> None:
        """Raises DataError when nothing is held out."""
        if len(self._corpus.heldout) < 2:
            raise DataError(
                f"Nothing is held out of {self._corpus.source} to evaluate on: set data.eval_source, or "
                "data.eval_fraction above 0, or train.eval_every=0."
            )

    def heldout(self) -> Iterator[DeviceBatch]:
        """The held-out batches in order, every held-out token once, or `data.eval_batches` of them.

        Raises:
          DataError: when nothing is held out, or at a token outside the vocabulary.
        """
        self.require_heldout()
        config, stream = self._config, self._corpus.heldout
        batches = eval_batches(
            HeldoutExamples(stream.tokens, config.model.seq_len),
            batch_size=config.data.global_batch_size,
            vocab_size=config.model.vocab_size,
            limit=config.data.eval_batches,
        )
        for i in range(len(batches)):
            yield jax.device_put(batches[i], self._sharding)
