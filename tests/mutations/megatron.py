"""Mutations of `fiddlex.data.megatron` and `fiddlex.data.preparation`: files, packing, splits, blends, pieces."""

from tests.mutations.mutation import Mutation

FOLDER = "fiddlex/data/megatron"
WINDOWS = "tests/data/megatron/test_packing.py::test_windows_are_those_of_the_concatenation"
BLEND = "tests/data/megatron/test_blend.py"
SOURCE = "tests/data/megatron/test_source.py"
PREPARE = "tests/data/preparation/test_prepare.py"

MUTATIONS = (
    Mutation(
        "index-truncated-and-not-told",
        f"{FOLDER}/index_file.py",
        old="    if size != expected:",
        new="    if size > expected:",
        tests=("tests/data/megatron/test_index_file.py::test_truncated_at_any_byte",),
    ),
    Mutation(
        "sequences-of-the-index-not-checked",
        f"{FOLDER}/index_file.py",
        old="wrong = (chunk < 0) | (starts != pointers[first : first + _CHUNK])",
        new="wrong = chunk < 0",
        tests=(
            "tests/data/megatron/test_index_file.py::test_any_changed_byte_of_the_index_is_an_error_or_moves_a_boundary",
        ),
    ),
    Mutation(
        "int16-read-as-uint16",
        f"{FOLDER}/index_file.py",
        old='("u1", "i1", "i2", "i4", "i8", "f8", "f4", "u2")',
        new='("u1", "i1", "u2", "i4", "i8", "f8", "f4", "i2")',
        tests=("tests/data/megatron/test_index_file.py::test_each_dtype_holds_its_limits",),
    ),
    Mutation(
        "joined-datasets-with-documents-of-the-first",
        f"{FOLDER}/builder.py",
        old="(other.documents[1:] + len(self._lengths))",
        new="(other.documents[1:] + 0)",
        tests=("tests/data/megatron/test_index_file.py::test_struct_reads_what_the_builder_writes",),
    ),
    Mutation(
        "tokens-named-before-they-are-on-disk",
        f"{FOLDER}/builder.py",
        old="replacing(data_file, shared=True, synced=True)",
        new="replacing(data_file, shared=True)",
        tests=("tests/data/megatron/test_index_file.py::test_an_old_dataset_stays_until_the_new_one_is_complete",),
    ),
    Mutation(
        "windows-that-share-no-token",
        f"{FOLDER}/packing.py",
        old="start = number * self._seq_len",
        new="start = number * (self._seq_len + 1)",
        tests=(WINDOWS,),
    ),
    Mutation(
        "a-window-after-empty-documents-begins-in-the-first-of-them",
        f"{FOLDER}/packing.py",
        old='np.searchsorted(places, start, side="right")) - 1',
        new='np.searchsorted(places, start, side="left"))',
        tests=(WINDOWS,),
    ),
    Mutation(
        "documents-in-the-order-of-the-file",
        f"{FOLDER}/order.py",
        old="    np.random.RandomState(seed).shuffle(order)\n",
        new="",
        tests=(WINDOWS,),
    ),
    Mutation(
        "cached-order-of-another-seed",
        f"{FOLDER}/order.py",
        old='f"{_FORMAT} {data.digest} {first} {last} {seed}"',
        new='f"{_FORMAT} {data.digest} {first} {last}"',
        tests=("tests/data/megatron/test_packing.py::test_the_order_is_made_once_for_each_dataset_range_and_seed",),
    ),
    Mutation(
        "damaged-order-trusted",
        f"{FOLDER}/order.py",
        old="if not whole or _checksum(numbers) != numbers[-1]:",
        new="if not whole:",
        tests=("tests/data/megatron/test_packing.py::test_a_damaged_order_is_made_again",),
    ),
    Mutation(
        "splits-rounded-down",
        f"{FOLDER}/source.py",
        old="round(edge * float(count))",
        new="int(edge * float(count))",
        tests=("tests/data/megatron/test_packing.py::test_a_split_by_hand",),
    ),
    Mutation(
        "what-is-held-out-is-trained-on",
        f"{FOLDER}/source.py",
        old="return self._stream(*self.edges[:2])",
        new="return self._stream(self.edges[0], self.edges[2])",
        tests=(SOURCE,),
    ),
    Mutation(
        "packing-reaches-into-what-is-held-out",
        "fiddlex/data/dataset.py",
        old="document_order(part.data, 0, part.edges[1], seed=data.seed)",
        new="document_order(part.data, 0, part.edges[2], seed=data.seed)",
        tests=(SOURCE,),
    ),
    Mutation(
        "blend-repeats-its-first-period",
        f"{FOLDER}/blend.py",
        old="periods = max(k // self._period - 1, 0)",
        new="periods = k // self._period",
        tests=(BLEND,),
    ),
    Mutation(
        "blend-starts-each-period-with-the-first-examples",
        f"{FOLDER}/blend.py",
        old="int(self._nths[row]) + periods * self._per_period[source]",
        new="int(self._nths[row])",
        tests=(BLEND,),
    ),
    Mutation(
        "fingerprint-without-boundaries",
        f"{FOLDER}/source.py",
        old='f"{weight} {part.train.fingerprint()} {part.data.digest} {part.edges} {part.by_sequence}"',
        new='f"{weight} {part.train.fingerprint()}"',
        tests=(f"{SOURCE}::test_the_fingerprint_tells_of_tokens_boundaries_splits_and_weights",),
    ),
    Mutation(
        "ids-beyond-int32-wrap-into-the-vocabulary",
        "fiddlex/data/examples.py",
        old="np.where(ids == ids.astype(np.int32), ids, -1).astype(np.int32)",
        new="ids.astype(np.int32)",
        tests=("tests/data/megatron/test_packing.py::test_ids_that_no_vocabulary_has_stay_outside",),
    ),
    Mutation(
        "lines-at-the-edge-of-a-piece-lost",
        "fiddlex/data/preparation/inputs.py",
        old="stream.seek(position - 1)",
        new="stream.seek(position)",
        tests=("tests/data/preparation/test_inputs.py::test_lines_that_begin_where_a_piece_does",),
    ),
    Mutation(
        "parts-of-other-options-gone-on-with",
        "fiddlex/data/preparation/prepare.py",
        old="    if changed:",
        new="    if False:",
        tests=(f"{PREPARE}::test_a_corrected_command_begins_again_where_the_first_one_completed_nothing",),
    ),
    Mutation(
        "pieces-encoded-again-after-a-stop",
        "fiddlex/data/preparation/prepare.py",
        old="[number for number, count in enumerate(counts) if count is None]",
        new="list(range(len(counts)))",
        tests=(f"{PREPARE}::test_stopped_between_any_two_pieces_it_goes_on_with_the_same_bytes",),
    ),
)
