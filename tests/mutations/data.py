"""Mutations of `fiddlex.data`: order of examples, windows, masks, token files, tokenizers, scores."""

from tests.mutations.mutation import Mutation

LOADER, EXAMPLES = "fiddlex/data/loader.py", "fiddlex/data/examples.py"
EPOCHS = "tests/data/test_loader.py::test_epochs_and_seeds_differ"
ROWS = "tests/data/test_text_rows.py"
ONCE = "tests/data/test_loader.py::test_evaluation_scores_every_token_once"

MUTATIONS = (
    Mutation(
        "order-ignores-the-seed",
        LOADER,
        old=".seed(seed).shuffle()",
        new=".seed(0).shuffle()",
        tests=(EPOCHS,),
    ),
    Mutation(
        "order-alike-in-all-epochs",
        LOADER,
        old=".shuffle().repeat()",
        new=".shuffle().repeat(reseed_each_epoch=False)",
        tests=(EPOCHS,),
    ),
    Mutation(
        "examples-of-the-first-epoch-in-all",
        LOADER,
        old="epoch=nth // len(source)",
        new="epoch=0",
        tests=("tests/data/test_loader.py::test_each_epoch_is_a_permutation",),
    ),
    Mutation(
        "last-partial-batch-counts-an-example-again",
        LOADER,
        old="filler = {name: np.zeros_like(values) for name, values in like.items()}",
        new="filler = like",
        tests=(ONCE,),
    ),
    Mutation(
        "last-partial-batch-left-out",
        LOADER,
        old="num_batches = -(-len(source) // batch_size)",
        new="num_batches = len(source) // batch_size",
        tests=(ONCE,),
    ),
    Mutation(
        "padding-after-the-last-token-scored",
        EXAMPLES,
        old="(np.arange(1, seq_len + 1) < len(window))",
        new="(np.arange(1, seq_len + 1) <= len(window))",
        tests=("tests/data/test_examples.py::test_the_last_heldout_window",),
    ),
    Mutation(
        "token-scored-in-two-windows",
        EXAMPLES,
        old='example["weights"][: self._seq_len - self._stride] = 0',
        new='example["weights"][: self._seq_len - self._stride - 1] = 0',
        tests=("tests/data/test_examples.py::test_overlapping_windows",),
    ),
    Mutation(
        "more-tokens-masked-and-fewer-kept",
        "fiddlex/data/masking.py",
        old="_MASKED_SHARE, _RANDOM_SHARE = 0.8, 0.1",
        new="_MASKED_SHARE, _RANDOM_SHARE = 0.85, 0.1",
        tests=("tests/data/test_masking.py::test_shares_of_mask_random_and_kept",),
    ),
    Mutation(
        "masks-alike-in-all-epochs",
        "fiddlex/data/masking.py",
        old="counter=(0, 0, index, epoch)",
        new="counter=(0, 0, index, 0)",
        tests=("tests/data/test_masking.py::test_random_numbers_of_examples_are_apart",),
    ),
    Mutation(
        "packed-pieces-in-one-segment",
        "fiddlex/data/masked_examples.py",
        old="np.repeat(numbers + 1, lengths + _AROUND)",
        new="np.repeat(0 * numbers + 1, lengths + _AROUND)",
        tests=("tests/data/test_masked_examples.py::test_a_packed_example",),
    ),
    Mutation(
        "sentence-pairs-with-the-wrong-label",
        "fiddlex/data/sentence_pairs.py",
        old='"labels": np.array(is_right, np.int32)',
        new='"labels": np.array(not is_right, np.int32)',
        tests=("tests/data/test_sentence_pairs.py::test_pairs",),
    ),
    Mutation(
        "token-files-read-as-big-endian",
        "fiddlex/data/token_files.py",
        old='np.dtype(dtype).newbyteorder("<")',
        new='np.dtype(dtype).newbyteorder(">")',
        tests=("tests/data/test_token_files.py::test_files_are_little_endian",),
    ),
    Mutation(
        "token-files-read-as-uint16-whatever-the-config-says",
        "fiddlex/data/token_files.py",
        old="item = np.dtype(dtype)",
        new='item = np.dtype("uint16")',
        tests=("tests/data/test_token_files.py::test_round_trip",),
    ),
    Mutation(
        "documents-joined-without-a-separator",
        "fiddlex/data/corpus.py",
        old="if num_documents and separator is not None:",
        new="if False:",
        tests=("tests/data/test_corpus.py::test_documents_are_joined_by_the_separator",),
    ),
    Mutation(
        "files-change-sides-when-one-is-added",
        "fiddlex/data/corpus.py",
        old="chosen = hashes < fraction",
        new="chosen = hashes <= np.quantile(hashes, fraction)",
        tests=("tests/data/test_corpus.py::test_folder_loads_the_same_twice_and_keeps_files_on_their_side",),
    ),
    Mutation(
        "rows-of-all-files-named-alike",
        "fiddlex/data/text_rows.py",
        old='return (f"{self.name}:{row}" for row',
        new='return (f"{row}" for row',
        tests=(f"{ROWS}::test_records_are_documents_on_the_side_that_their_name_decides",),
    ),
    Mutation(
        "validation-trained-on",
        "fiddlex/data/text_rows.py",
        old='_SPLITS[found[1]] if found else "train"',
        new='"train"',
        tests=(f"{ROWS}::test_a_folder_of_records_has_splits",),
    ),
    Mutation(
        "first-tokens-of-a-temporary-file-lost",
        "fiddlex/data/token_buffer.py",
        old="        for piece in self._pieces:",
        new="        for piece in self._pieces[1:]:",
        tests=(f"{ROWS}::test_tokens_in_a_temporary_file_are_those_in_memory",),
    ),
    Mutation(
        "one-token-of-the-context-scored",
        "fiddlex/data/continuations.py",
        old="weights[len(ids) - 1 - self._num_scored[index] :",
        new="weights[len(ids) - 2 - self._num_scored[index] :",
        tests=("tests/data/test_continuations.py::test_the_ends_of_sequences_are_scored",),
    ),
    Mutation(
        "long-contexts-lose-their-end",
        "fiddlex/data/continuations.py",
        old="Ragged([ids[-seq_len - 1 :] for ids",
        new="Ragged([ids[: seq_len + 1] for ids",
        tests=("tests/data/test_continuations.py::test_the_ends_of_sequences_are_scored",),
    ),
    Mutation(
        "beginning-of-text-doubled",
        "fiddlex/data/harness_tokens.py",
        old="self._add_bos_token is not False and not begun",
        new="self._add_bos_token is not False",
        tests=("tests/data/test_harness_tokens.py::test_a_beginning_is_added_once",),
    ),
    Mutation(
        "samples-where-do-sample-is-false",
        "fiddlex/train/inference/generation_options.py",
        old='greedy = given.get("do_sample") is False',
        new="greedy = False",
        tests=("tests/train/inference/test_generation_options.py",),
    ),
    Mutation(
        "end-of-text-not-the-separator-where-there-is-sep",
        "fiddlex/data/tokenizers.py",
        old='SEPARATORS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "[SEP]")',
        new='SEPARATORS = ("[SEP]", "<|end_of_text|>", "</s>", "<|endoftext|>")',
        tests=("tests/data/test_tokenizers.py::test_json_end_of_text_comes_before_sep",),
    ),
    Mutation(
        "accuracy-per-byte-divided-by-tokens",
        "fiddlex/data/scores.py",
        old='("accuracy_per_byte", nats / num_bytes)',
        new='("accuracy_per_byte", nats / rows.num_tokens[: first[-1]])',
        tests=("tests/data/test_scores.py",),
    ),
)
