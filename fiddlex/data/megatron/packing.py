"""Examples for next-token prediction, packed as Megatron's GPTDataset packs them.

Invariant: each token of the shuffled documents except the first is a target of exactly one example; the tokens at the
end that do not fill an example are left out. Nothing is stored for an example: its place follows from its number.
"""

import numpy as np

from fiddlex.data.examples import as_int32, check_seq_len
from fiddlex.data.megatron.index_file import IndexedTokens
from fiddlex.data.megatron.order import DocumentOrder
from fiddlex.data.staged_examples import StagedExamples


class PackedDocuments(StagedExamples):
    """Windows over documents that are shuffled, then concatenated.

    Window i reads seq_len + 1 tokens from token i·seq_len of the concatenation on, so neighbouring windows share one
    token. Nothing is put between documents; if their texts end with a separator, it is in the file (`--append_eod`).
    The documents keep their order in all epochs, and the loader shuffles the windows anew for each. (Megatron shuffles
    the documents of all epochs together, so its windows are these only in a run of one epoch.)
    """

    def __init__(self, data: IndexedTokens, documents: DocumentOrder, seq_len: int):
        check_seq_len(seq_len)
        self._data = data
        self._documents = documents
        self._seq_len = seq_len

    def __len__(self) -> int:
        return max(int(self._documents.places[-1]) - 1, 0) // self._seq_len

    def prepare(self, sample: np.ndarray, index: int, *, epoch: int) -> dict[str, np.ndarray]:
        """Window `index`, the same in every epoch; all weights are 1."""
        window = as_int32(sample)
        return {"tokens": window[:-1], "targets": window[1:], "weights": np.ones(self._seq_len, np.float32)}

    def read(self, number: int) -> np.ndarray:
        order, places = self._documents
        start = number * self._seq_len
        stop = start + self._seq_len + 1
        first = int(np.searchsorted(places, start, side="right")) - 1
        last = int(np.searchsorted(places, stop, side="left"))
        edges = np.clip(places[first : last + 1], start, stop)
        lengths = np.diff(edges)
        begins = self._data.starts(order[first:last]) + edges[:-1] - places[first:last]
        positions = np.arange(stop - start) + np.repeat(begins - np.cumsum(lengths) + lengths, lengths)
        return np.asarray(self._data.tokens[positions])
