"""Mutations of readers of files that may be damaged, or come from somebody else."""

from tests.mutations.mutation import Mutation

CONVERSION = "tests/interop/test_conversion.py"
FOLDER_TOKENIZER = "tests/interop/test_folder_tokenizer.py"
HOSTILE = "tests/fuzz/test_hostile_files.py"
GOODPUT = "tests/train/run/records/test_goodput.py::test_a_line_that_no_run_writes_does_no_harm"
METRICS = "tests/train/run/records/test_metrics.py::test_a_line_that_no_run_writes_is_left_out"
COORDINATOR = "tests/fuzz/test_coordinator_messages.py::test_messages_of_a_process"

MUTATIONS = (
    Mutation(
        "names-that-lead-out-of-a-folder",
        "fiddlex/files/small_files.py",
        old="isinstance(name, str) and Path(name).name == name and name not in",
        new="isinstance(name, str) and name not in",
        tests=(f"{HOSTILE}::test_a_saved_dataset_names_files_of_its_folder",),
    ),
    Mutation(
        "a-run-writes-through-links",
        "fiddlex/train/run/workdir.py",
        old="if path.is_symlink():",
        new="if path.is_symlink() and not path.exists():",
        tests=(f"{HOSTILE}::test_a_workdir_has_no_file_that_leads_elsewhere",),
    ),
    Mutation(
        "a-run-waits-for-pipes",
        "fiddlex/train/run/workdir.py",
        old="if not path.is_file():",
        new="if not path.exists():",
        tests=(f"{HOSTILE}::test_a_pipe_in_a_workdir_is_not_waited_for",),
    ),
    Mutation(
        "pipes-read-as-files",
        "fiddlex/files/small_files.py",
        old="if not stat.S_ISREG(found.st_mode):",
        new="if stat.S_ISDIR(found.st_mode):",
        tests=(f"{HOSTILE}::test_a_pipe_in_a_workdir_is_not_waited_for",),
    ),
    Mutation(
        "files-that-links-lead-to-copied",
        "fiddlex/interop/folder_tokenizer.py",
        old="if not any(each in found.parents for each in own):",
        new="if False:",
        tests=(f"{HOSTILE}::test_files_that_are_copied_are_those_of_the_folder",),
    ),
    Mutation(
        "options-of-a-vocabulary-ignored",
        "fiddlex/interop/tokenizer_classes.py",
        old="return None, pre_tokenizers.ByteLevel(add_prefix_space=bool(space))",
        new="return None, pre_tokenizers.ByteLevel(add_prefix_space=False)",
        tests=(f"{FOLDER_TOKENIZER}::test_options_of_gpt2s_vocabulary",),
    ),
    Mutation(
        "other-ids-than-transformers-untold",
        "fiddlex/interop/tokenizer_classes.py",
        old="if kind is not None and not as_it_is and (own := pipeline(kind, said)):",
        new="if False and (own := pipeline(str(kind), said)):",
        tests=(f"{FOLDER_TOKENIZER}::test_other_ids_than_those_of_transformers_are_told",),
    ),
    Mutation(
        "class-that-fiddlex-does-not-know-untold",
        "fiddlex/interop/tokenizer_classes.py",
        old="elif kind is not None and not as_it_is and kind not in _PLAIN:",
        new="elif False:",
        tests=(f"{FOLDER_TOKENIZER}::test_other_ids_than_those_of_transformers_are_told",),
    ),
    Mutation(
        "descriptions-of-added-tokens-not-compared",
        "fiddlex/interop/tokenizer_classes.py",
        old="_matching(token) != _matching(added.get(name))",
        new="name not in added",
        tests=(f"{FOLDER_TOKENIZER}::test_other_ids_than_those_of_transformers_are_told",),
    ),
    Mutation(
        "descriptions-of-special-tokens-lost",
        "fiddlex/interop/tokenizer_classes.py",
        old="return [_token(token, special=True) for token in tokens if text_of(token)]",
        new="return [_token(text, special=True) for token in tokens if (text := text_of(token))]",
        tests=(f"{FOLDER_TOKENIZER}::test_a_special_token_takes_the_space_that_its_description_gives_it",),
    ),
    Mutation(
        "added-tokens-of-bert-ignored",
        "fiddlex/interop/folder_tokenizer.py",
        old="return with_tokens(tokenizers.Tokenizer.from_str(made.to_str()), folder)",
        new="return tokenizers.Tokenizer.from_str(made.to_str())",
        tests=(f"{FOLDER_TOKENIZER}::test_berts_vocabulary_has_the_tokens_that_other_files_name",),
    ),
    Mutation(
        "chat-templates-left-behind",
        "fiddlex/interop/folder_tokenizer.py",
        old="for name in (*TOKENIZER_FILES, *templates):",
        new="for name in TOKENIZER_FILES:",
        tests=(f"{CONVERSION}::test_the_tokenizer_moves_with_the_workdir_and_comes_back",),
    ),
    Mutation(
        "compressed-texts-of-any-size",
        "fiddlex/files/compressed.py",
        old="return max(MOST_TEXT, MOST_RATIO * os.path.getsize(file)) if is_compressed(file) else -1",
        new="return -1",
        tests=(f"{HOSTILE}::test_a_text_that_grows_beyond_measure_is_refused",),
    ),
    Mutation(
        "an-order-of-documents-that-there-are-not",
        "fiddlex/data/megatron/order.py",
        old="or not inside.all() or",
        new="or",
        tests=(f"{HOSTILE}::test_a_cached_order_has_documents_and_tokens_that_there_are",),
    ),
    Mutation(
        "cached-tokens-of-any-type",
        "fiddlex/data/token_cache.py",
        old="} if min(offset, length) >= 0 and dtype in DTYPES:",
        new="} if min(offset, length) >= 0:",
        tests=("tests/data/test_token_cache.py::test_a_description_that_fiddlex_does_not_write_is_not_believed",),
    ),
    Mutation(
        "goodput-of-endless-seconds",
        "fiddlex/train/run/records/goodput.py",
        old="not 0 <= value < _MOST_SECONDS",
        new="value < 0",
        tests=(GOODPUT,),
    ),
    Mutation(
        "records-of-half-a-step",
        "fiddlex/train/record.py",
        old="type(step) is not int or not 0 <= step < 2**63",
        new="step is None",
        tests=(METRICS,),
    ),
    Mutation(
        "evaluations-that-are-no-numbers",
        "fiddlex/train/record.py",
        old='if name.startswith("eval_") and type(value) not in (int, float):',
        new="if False:",
        tests=(METRICS,),
    ),
    Mutation(
        "a-watch-without-an-end",
        "fiddlex/cluster/coordinator.py",
        old="if not 0 < float(value) < _LONGEST_S:",
        new="if float(value) <= 0:",
        tests=(COORDINATOR,),
    ),
)
