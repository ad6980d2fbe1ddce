"""Mutations of `fiddlex.interop` and of what reads a folder of transformers into a run."""

from tests.mutations.mutation import Mutation

PLACES = "tests/interop/test_conversion.py::test_every_element_goes_to_its_place"
FOLDERS = "tests/interop/test_bert_folders.py"
OPTIONS, BAD_TENSORS = "tests/interop/test_options.py", "tests/interop/test_bad_tensors.py"
ROPE_FORMS = f"{OPTIONS}::test_rotary_positions_are_those_that_transformers_takes"
FILES = "tests/interop/test_safetensors_files.py"

MUTATIONS = (
    Mutation(
        "tensor-of-a-folder-not-transposed",
        "fiddlex/interop/matching.py",
        old="own = (tensor.T if self.part.transposed else tensor).reshape(self.own_shape)",
        new="own = tensor.reshape(self.own_shape)",
        tests=(PLACES,),
    ),
    Mutation(
        "queries-of-a-folder-taken-for-keys",
        "fiddlex/interop/bert.py",
        old='enumerate(("query", "key", "value"))',
        new='enumerate(("key", "query", "value"))',
        tests=(f"{FOLDERS}::test_a_bert_computes_what_its_tensors_say[BertForMaskedLM]",),
    ),
    Mutation(
        "classes-of-pairs-in-the-order-of-transformers",
        "fiddlex/interop/bert.py",
        old="True, classes_reversed=True),",
        new="True),",
        tests=(f"{FOLDERS}::test_a_bert_computes_what_its_tensors_say[BertForPreTraining]",),
    ),
    Mutation(
        "copies-of-tensors-not-compared",
        "fiddlex/interop/matching.py",
        old="if not np.array_equal(tensors[copy], tensors[of])",
        new="if False",
        tests=(f"{FOLDERS}::test_older_forms_of_a_folder_are_read",),
    ),
    Mutation(
        "rope-theta-beside-rope-parameters-not-read",
        "fiddlex/interop/decoders.py",
        old='(rope if "rope_theta" in rope else options).number("rope_theta")',
        new='rope.number("rope_theta") if "rope_theta" in rope else 10000.0',
        tests=(ROPE_FORMS,),
    ),
    Mutation(
        "rope-parameters-before-rope-scaling",
        "fiddlex/interop/decoders.py",
        old="rope = older or newer",
        new="rope = newer or older",
        tests=(ROPE_FORMS,),
    ),
    Mutation(
        "original-length-inside-before-outside",
        "fiddlex/interop/decoders.py",
        old="holder = options if name in options else rope",
        new="holder = rope if name in rope else options",
        tests=(ROPE_FORMS,),
    ),
    Mutation(
        "missing-window-taken-for-none",
        "fiddlex/interop/decoders.py",
        old='    "max_position_embeddings": 4096 * 32,\n    "sliding_window": 4096,\n',
        new='    "max_position_embeddings": 4096 * 32,\n',
        tests=(f"{OPTIONS}::test_what_is_missing_has_the_default_of_its_class",),
    ),
    Mutation(
        "zero-taken-for-missing",
        "fiddlex/interop/options.py",
        old="if value is not None and not _is_size(value):",
        new="if value and not _is_size(value):",
        tests=(f"{OPTIONS}::test_only_null_is_missing",),
    ),
    Mutation(
        "model-type-not-compared",
        "fiddlex/interop/architectures.py",
        old="!= found.model_type:",
        new="is None:",
        tests=(f"{OPTIONS}::test_a_class_of_another_type_of_model_is_refused",),
    ),
    Mutation(
        "other-names-of-options-not-compared",
        "fiddlex/interop/architectures.py",
        old="if alias in json and values.setdefault(name, json[alias]) != json[alias]:",
        new="if alias in json and values.setdefault(name, json[alias]) is None:",
        tests=(f"{OPTIONS}::test_other_names_of_gpt2s_options_must_agree",),
    ),
    Mutation(
        "numbers-of-a-folder-not-checked",
        "fiddlex/interop/huggingface.py",
        old="if not np.isfinite(written).all():",
        new="if np.isnan(written).all():",
        tests=(f"{BAD_TENSORS}::test_weights_that_are_not_finite_are_refused",),
    ),
    Mutation(
        "tensors-of-whole-numbers-taken-for-weights",
        "fiddlex/interop/matching.py",
        old="if place.dtype not in WEIGHT_DTYPES",
        new="if False",
        tests=(f"{BAD_TENSORS}::test_tensors_of_whole_numbers_are_refused",),
    ),
    Mutation(
        "infinity-written-to-a-folder",
        "fiddlex/interop/huggingface.py",
        old="if not np.isfinite(tensor).all():",
        new="if np.isnan(tensor).any():",
        tests=(f"{BAD_TENSORS}::test_a_weight_that_a_dtype_does_not_hold_is_not_written",),
    ),
    Mutation(
        "classifier-of-a-folder-taken-for-another-task",
        "fiddlex/train/run/transfer/importing.py",
        old="    if not same_task(saved, config):\n        there",
        new="    if False:\n        there",
        tests=(f"{FOLDERS}::test_a_task_starts_from_a_folder_as_from_a_workdir[BertForPreTraining]",),
    ),
    Mutation(
        "tokens-of-a-folder-numbered-otherwise",
        "fiddlex/train/run/transfer/importing.py",
        old="if ids.get(name) != ours.get(name)",
        new="if (name in ids) != (name in ours)",
        tests=(f"{FOLDERS}::test_a_tokenizer_that_does_not_fit_is_told",),
    ),
    Mutation(
        "sequences-of-a-workdir-beyond-the-window",
        "fiddlex/train/run/workdir.py",
        old="        check_window(workdir / ORIGINAL, config)\n",
        new="        pass\n",
        tests=("tests/interop/test_conversion.py::test_a_sequence_is_not_longer_than_the_sliding_window",),
    ),
    Mutation(
        "an-index-read-beside-a-single-file",
        "fiddlex/interop/safetensors_files.py",
        old="if single.exists() and names != [SINGLE]:",
        new="if False:",
        tests=(f"{FILES}::test_of_two_saves_in_a_folder_neither_is_taken_for_the_other",),
    ),
    Mutation(
        "dropout-of-attention-alone-left-out",
        "fiddlex/interop/decoders.py",
        old='if options.number("attention_dropout"):',
        new='if options.number("attention_dropout") < 0:',
        tests=(f"{OPTIONS}::test_an_option_that_is_not_computed_is_refused",),
    ),
    Mutation(
        "windows-of-the-last-layers-not-seen",
        "fiddlex/interop/decoders.py",
        old="or first >= num_layers",
        new="or first >= 0",
        tests=(f"{OPTIONS}::test_an_option_that_is_not_computed_is_refused",),
    ),
    Mutation(
        "tokens-of-one-id-taken",
        "fiddlex/interop/folder_tokenizer.py",
        old="if not ids or max(ids.values()) > 1 or written != vocabulary:",
        new="if not ids:",
        tests=("tests/interop/test_folder_tokenizer.py::test_gpt2s_vocabulary_becomes_a_tokenizer",),
    ),
)
