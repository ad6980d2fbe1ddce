"""Mutations of checkpoints: what is verified when they are read, and what is told of them."""

from tests.mutations.mutation import Mutation

CHECKPOINT = "tests/train/run/checkpoints/test_checkpoint.py"
INTEGRITY = "tests/train/run/checkpoints/test_integrity.py"
DIFFERING = "tests/train/run/checkpoints/test_differences.py"
CHECKPOINTS = "fiddlex/train/run/checkpoints/checkpoint.py"
DIGESTS, DIFFERENCES = "fiddlex/train/run/checkpoints/file_digests.py", "fiddlex/train/run/checkpoints/differences.py"

KEPT = "fiddlex/train/run/kept_schedule.py"
TEST_KEPT = "tests/train/run/test_kept_schedule.py"

MUTATIONS = (
    Mutation(
        "function-that-a-workdir-names-is-run",
        KEPT,
        old="if source_of(pipeline.schedule).is_own:",
        new="if source_of(pipeline.schedule).kind is Kind.TABLE:",
        tests=(f"{TEST_KEPT}::test_no_function_that_a_workdir_names_is_run",),
    ),
    Mutation(
        "table-of-a-registered-name-loses-its-order",
        KEPT,
        old='"strict" if _saved(workdir).order == "strict" else "ahead"',
        new='"ahead"',
        tests=(f"{TEST_KEPT}::test_a_registered_name_may_be_missing_in_another_process",),
    ),
    Mutation(
        "earlier-table-of-a-function-is-lost",
        KEPT,
        old="write_whole(copy, earlier)",
        new="write_whole(copy, table)",
        tests=(f"{TEST_KEPT}::test_another_table_of_the_same_function_is_told",),
    ),
    Mutation(
        "checksums-not-compared",
        CHECKPOINTS,
        old='if value != meta["checksums"][name]:',
        new="if False:",
        tests=(CHECKPOINT,),
    ),
    Mutation(
        "damaged-description-of-a-checkpoint-accepted",
        "fiddlex/train/run/checkpoints/meta.py",
        old='meta.pop("checksum", None) != text_checksum(meta)',
        new='meta.pop("checksum", None) is None',
        tests=(CHECKPOINT,),
    ),
    Mutation(
        "checksum-blind-to-places",
        "fiddlex/train/run/checkpoints/checksums.py",
        old="jnp.sum(_words(x) * (place | 1), dtype=jnp.uint32)",
        new="jnp.sum(_words(x), dtype=jnp.uint32)",
        tests=("tests/train/test_resume.py::test_checksums_tell_arrays_apart_that_hold_the_same_numbers",),
    ),
    Mutation(
        "denormal-numbers-outside-of-the-checksum",
        "fiddlex/train/run/checkpoints/checksums.py",
        old="return jnp.where(words << 1 == 0, jnp.uint32(0), words)",
        new="return jnp.where(x == 0, jnp.uint32(0), words)",
        tests=("tests/train/run/checkpoints/test_checksums.py::test_a_flipped_bit_changes_the_checksum",),
    ),
    Mutation(
        "files-of-a-checkpoint-not-verified-on-restore",
        CHECKPOINTS,
        old="if reason := self._damaged_files(step, abstract):",
        new='if reason := "":',
        tests=(f"{INTEGRITY}::test_a_fault_in_any_file_is_found_and_the_older_checkpoint_is_used[flips]",),
    ),
    Mutation(
        "digests-of-files-not-compared",
        DIGESTS,
        old="if _digest(path / name) != recorded[name]:",
        new="if not _digest(path / name):",
        tests=(f"{INTEGRITY}::test_a_fault_in_any_file_is_found_and_the_older_checkpoint_is_used[flips]",),
    ),
    Mutation(
        "damaged-list-of-digests-accepted",
        DIGESTS,
        old='if first != f"# {hashlib.sha256(text).hexdigest()}  the lines below".encode():',
        new='if not first.startswith(b"#"):',
        tests=(f"{INTEGRITY}::test_a_fault_in_any_file_is_found_and_the_older_checkpoint_is_used[cuts]",),
    ),
    Mutation(
        "links-in-a-checkpoint-followed",
        DIGESTS,
        old="if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):",
        new="if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)):",
        tests=(f"{INTEGRITY}::test_a_link_or_a_pipe_in_a_checkpoint_is_damage",),
    ),
    Mutation(
        "what-a-checkpoint-says-of-itself-read-through-links",
        "fiddlex/train/run/checkpoints/meta.py",
        old="for name, reason in foreign_files(path).items():",
        new="for name, reason in {}.items():",
        tests=(f"{INTEGRITY}::test_a_link_or_a_pipe_in_a_checkpoint_is_damage",),
    ),
    Mutation(
        "a-file-in-no-process-share",
        DIGESTS,
        old="for name in wanted[index::number]:",
        new="for name in wanted[index + 1 :: number]:",
        tests=(f"{INTEGRITY}::test_each_file_is_in_one_process_share",),
    ),
    Mutation(
        "digests-of-other-processes-lost",
        DIGESTS,
        old='known |= {name.replace(_UNFINISHED, ""): digest',
        new="known |= {name: digest",
        tests=(f"{INTEGRITY}::test_the_first_process_does_not_read_again_what_another_has_recorded",),
    ),
    Mutation(
        "verify-reads-arrays-and-compares-nothing",
        "fiddlex/train/run/checkpoints/checksums.py",
        old='"" if found == saved else',
        new='"" if found == found else',
        tests=(f"{INTEGRITY}::test_an_array_that_is_not_what_was_saved_is_named",),
    ),
    Mutation(
        "arrays-of-any-shape-read",
        "fiddlex/train/run/checkpoints/stored_arrays.py",
        old="if array.shape != shape:",
        new="if False:",
        tests=(f"{INTEGRITY}::test_an_array_that_is_not_what_was_saved_is_named",),
    ),
    Mutation(
        "layers-compared-row-by-row",
        DIFFERENCES,
        old="b[rows[1][layer]]",
        new="b[rows[0][layer]]",
        tests=(f"{DIFFERING}::test_rows_are_compared_layer_by_layer",),
    ),
    Mutation(
        "numbers-compared-in-place-of-bits",
        DIFFERENCES,
        old="return np.not_equal(x.view(bits), y.view(bits))",
        new="return np.not_equal(x, y)",
        tests=(f"{DIFFERING}::test_the_largest_differences_and_their_number_are_told",),
    ),
    Mutation(
        "last-block-alone-compared",
        DIFFERENCES,
        old="num_different=found.num_different + count,",
        new="num_different=count,",
        tests=(f"{DIFFERING}::test_blocks_of_a_large_array_are_taken_together",),
    ),
    Mutation(
        "rows-not-moved-to-another-layout",
        "fiddlex/train/run/checkpoints/relayout.py",
        old="0 if layer == PADDING else sources[layer] for layer in layers",
        new="0 if layer == PADDING else layer for layer in layers",
        tests=(CHECKPOINT,),
    ),
    Mutation(
        "part-of-a-file-kept-after-an-error",
        "fiddlex/files/whole_files.py",
        old="            part.unlink()\n        raise",
        new="            pass\n        raise",
        tests=("tests/files/test_whole_files.py::test_an_error_leaves_the_old_content_and_nothing_else",),
    ),
    Mutation(
        "file-replaced-before-its-content-is-on-disk",
        "fiddlex/files/whole_files.py",
        old="            if synced:",
        new="            if not synced:",
        tests=("tests/files/test_whole_files.py::test_an_error_leaves_the_old_content_and_nothing_else",),
    ),
    Mutation(
        "folder-named-before-its-files-are-on-disk",
        "fiddlex/files/whole_files.py",
        old="        if file.is_file():\n            with",
        new="        if False:\n            with",
        tests=("tests/train/run/transfer/test_new_folder.py::test_it_appears_once_its_files_are_on_disk",),
    ),
    Mutation(
        "unfinished-checkpoints-stay-for-ever",
        "fiddlex/train/run/checkpoints/writer.py",
        old="                self._remove_unfinished()",
        new="                pass",
        tests=(f"{CHECKPOINT}::test_what_a_killed_process_left_is_removed_before_the_first_save",),
    ),
    Mutation(
        "checkpoints-of-a-former-keep-every-deleted",
        "fiddlex/train/run/workdir.py",
        old="    check_keeps(saved.train, config.train, checkpoints)\n",
        new="",
        tests=(
            "tests/train/run/checkpoints/test_kept_steps.py::test_a_run_does_not_start_that_would_delete_what_it_has_kept",
        ),
    ),
    Mutation(
        "loss-scale-lost-where-rows-move",
        CHECKPOINTS,
        old="            state = state._replace(**move_rows(",
        new="            state = SavedState(state.step, **move_rows(",
        tests=(f"{CHECKPOINT}::test_each_layer_has_its_weights_in_whatever_row",),
    ),
    Mutation(
        "next-save-not-counted-among-the-newest",
        "fiddlex/train/run/checkpoints/kept_steps.py",
        old="[*steps, steps[-1] + 1]",
        new="steps",
        tests=("tests/train/run/checkpoints/test_kept_steps.py::test_the_next_save_is_one_of_the_newest",),
    ),
    Mutation(
        "usual-loss-not-compared",
        "fiddlex/train/run/checkpoints/differences.py",
        old=' "usual",',
        new="",
        tests=("tests/train/run/checkpoints/test_differences.py::test_the_usual_loss_is_compared",),
    ),
)
