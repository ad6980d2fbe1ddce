"""Compares fiddlex's reader, writer, packing and blends with those of Megatron-LM (megatron-core).

    pip install megatron-core torch
    python third_party/megatron/compare_readers.py

It checks, on random documents,
- files: Megatron's builder writes each dtype, with empty sequences and documents of several sequences, and fiddlex
  reads the same; fiddlex writes, and Megatron reads the same;
- splits: the edges of Megatron's splits and fiddlex's;
- samples: those of GPTDataset for one epoch, in the order before it shuffles them, are the windows of fiddlex, and
  GPTDataset shuffles them to a permutation;
- blends: the indices of Megatron's helper and fiddlex's. Megatron computes in float64 how far a source lags, so that
  rounding decides between sources that lag equally: the indices are the same where nothing is rounded (weights that are
  multiples of 1/2^n), and elsewhere each index is of a source that lags most to within 1e-6 of an example.

It prints how many cases of each it compared, and fails at the first difference.
"""

import itertools
import pathlib
import tempfile
import types
import warnings
from fractions import Fraction

warnings.filterwarnings("ignore")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from megatron.core.datasets import helpers  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder  # noqa: E402
from megatron.core.datasets.blended_megatron_dataset_config import (  # noqa: E402
    convert_split_vector_to_split_matrix,
    parse_and_normalize_split,
)
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig  # noqa: E402
from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder  # noqa: E402

from fiddlex.config.values.source import parse_split  # noqa: E402
from fiddlex.data.megatron.blend import Blend  # noqa: E402
from fiddlex.data.megatron.builder import indexed_builder  # noqa: E402
from fiddlex.data.megatron.index_file import open_indexed  # noqa: E402
from fiddlex.data.megatron.order import document_order  # noqa: E402
from fiddlex.data.megatron.packing import PackedDocuments  # noqa: E402
from fiddlex.data.megatron.source import split_edges  # noqa: E402

DTYPES = ("uint8", "int8", "int16", "int32", "int64", "uint16")
SPLITS = ("969,30,1", "99,1", "1", "1,1,1", "0.9,0.05,0.05", "98,2,0")
BLENDS = (
    (["0.5", "0.25", "0.25"], True),
    (["0.875", "0.125"], True),
    (["5", "3"], True),
    (["1", "1", "1", "1"], True),
    (["0.7", "0.3"], False),
    (["0.6", "0.3", "0.1"], False),
    (["1", "2", "3", "4", "5", "6", "7"], False),
    (["0.123", "0.877"], False),
)
INDICES = 100_000  # of each blend


def compare_files(folder: pathlib.Path, rng: np.random.Generator) -> str:
    """Datasets of every dtype, in both directions."""
    sequences = 0
    for dtype in DTYPES:
        high = min(np.iinfo(dtype).max, 50_000)
        lengths = [rng.integers(0, 40, rng.integers(0, 4)) for _ in range(50)]
        documents = [[rng.integers(0, high, size) for size in sizes] for sizes in lengths]
        theirs = folder / f"theirs-{dtype}"
        builder = IndexedDatasetBuilder(f"{theirs}.bin", dtype=getattr(np, dtype))
        for document in documents:
            for sequence in document:
                builder.add_item(torch.from_numpy(sequence))
            builder.end_document()
        builder.finalize(f"{theirs}.idx")
        read = open_indexed(theirs)
        flat = [sequence for document in documents for sequence in document]
        starts = read.starts(slice(None))
        assert read.tokens.dtype == dtype
        assert len(read.lengths) == len(flat)
        for sequence, start, length in zip(flat, starts, read.lengths, strict=True):
            np.testing.assert_array_equal(read.tokens[start : start + length], sequence)
        np.testing.assert_array_equal(read.documents, np.cumsum([0, *map(len, documents)]))

        ours = folder / f"ours-{dtype}"
        with indexed_builder(ours, dtype=np.dtype(dtype)) as writer:
            for sequence in flat:
                writer.add(sequence)
        dataset = IndexedDataset(str(ours))
        assert dataset.index.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(dataset.document_indices, np.arange(len(flat) + 1))
        for number, sequence in enumerate(flat):
            np.testing.assert_array_equal(dataset[number], sequence)
        assert (folder / f"theirs-{dtype}.bin").read_bytes() == (folder / f"ours-{dtype}.bin").read_bytes()
        sequences += len(flat)
    return f"files: {len(DTYPES)} dtypes, {sequences:,} sequences, in both directions"


def compare_splits() -> str:
    """The edges of splits of 1 to 2,000 documents."""
    for text in SPLITS:
        for count in range(1, 2001):
            matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(text))
            theirs = [
                (round(part[0] * float(count)), round(part[1] * float(count))) if part else (0, 0) for part in matrix
            ]
            edges = split_edges(parse_split("data.split", text), count)
            ours = list(itertools.pairwise(edges))
            for (a, b), (c, d) in zip(theirs, ours, strict=True):
                assert (a, b) == (c, d) or (a >= b and c >= d), (text, count, theirs, ours)
    return f"splits: {len(SPLITS)} of 2,000 sizes each"


def compare_samples(folder: pathlib.Path, rng: np.random.Generator) -> str:
    """One epoch of GPTDataset, on the train and the valid part of a split, for several lengths and seeds."""
    cases = samples = 0
    tokenizer = types.SimpleNamespace(eod=1, pad=-1, vocab_size=60_000, unique_identifiers={"class": "none"})
    for case in range(12):
        prefix = folder / f"samples-{case}"
        with indexed_builder(prefix, dtype=np.dtype("uint16")) as writer:
            for length in rng.integers(0 if case % 2 else 1, 120, 400):
                writer.add(rng.integers(0, 60_000, length))
        seq_len, seed = int(rng.integers(2, 70)), int(rng.integers(0, 2**31))
        config = GPTDatasetConfig(
            random_seed=seed,
            sequence_length=seq_len,
            blend=([str(prefix)], None),
            split="969,30,1",
            path_to_cache=str(folder / f"cache-{case}"),
            tokenizer=tokenizer,
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            mid_level_dataset_surplus=0.005,
        )
        built = BlendedMegatronDatasetBuilder(GPTDataset, [None, None, None], lambda: True, config).build()
        opened = open_indexed(prefix)
        edges = split_edges(parse_split("data.split", "969,30,1"), len(opened.lengths))
        for theirs, first, last in zip(built[:2], edges[:2], edges[1:3], strict=True):
            ours = PackedDocuments(opened, document_order(opened, first, last, seed=seed), seq_len)
            assert len(ours) == len(theirs)
            shuffle = theirs.shuffle_index
            assert sorted(shuffle.tolist()) == list(range(len(ours)))
            for place, index in enumerate(shuffle.tolist()):
                item, window = theirs[place], ours.read(index)
                np.testing.assert_array_equal(item["tokens"].numpy(), window[:-1])
                np.testing.assert_array_equal(item["labels"].numpy(), window[1:])
            cases += 1
            samples += len(ours)
    return f"samples: {samples:,} of {cases} epochs"


def compare_blends() -> str:
    """The order of examples in blends."""
    same = []
    for texts, exact in BLENDS:
        weights = np.array([float(text) for text in texts])
        weights /= weights.sum()
        theirs, counts = np.zeros(INDICES, np.int16), np.zeros(INDICES, np.int64)
        helpers.build_blending_indices(theirs, counts, weights, len(weights), INDICES, False)
        blend = Blend([Fraction(text) for text in texts])
        ours = np.array([blend.place(k) for k in range(INDICES)])
        if exact:
            np.testing.assert_array_equal(ours, np.stack([theirs, counts], axis=1))
        given = np.zeros((2, len(weights)), np.int64)
        for k in range(INDICES):
            lags = weights * max(k, 1) - given
            assert lags[0, ours[k, 0]] >= lags[0].max() - 1e-6, (texts, k)
            assert lags[1, theirs[k]] >= lags[1].max() - 1e-6, (texts, k)
            given[0, ours[k, 0]] += 1
            given[1, theirs[k]] += 1
            assert np.abs(given[0] - given[1]).max() <= 1, (texts, k)
        same.append(f"{':'.join(texts)} {np.mean(ours[:, 0] == theirs):.1%}")
    return f"blends: {INDICES:,} examples of each; the same source at {', '.join(same)}; counts never differ by over 1"


def main() -> None:
    """Prints a line for each comparison."""
    rng = np.random.default_rng(0)
    with tempfile.TemporaryDirectory() as parent:
        folder = pathlib.Path(parent)
        print(compare_files(folder, rng))
        print(compare_splits())
        print(compare_samples(folder, rng))
        print(compare_blends())


if __name__ == "__main__":
    main()
