"""Mutations of what keeps samples, shares batches, logs what is trained on, and finds what bounds a run."""

from tests.mutations.mutation import Mutation

CACHE, DISK, SHARED = "fiddlex/data/sample_cache.py", "fiddlex/data/disk_cache.py", "fiddlex/data/shared_batches.py"
LOG, STALLS, CACHING = "fiddlex/data/sample_log.py", "fiddlex/tools/stalls.py", "fiddlex/data/caching.py"
OF_CACHE, OF_SHARED = "tests/data/test_sample_cache.py", "tests/data/test_shared_batches.py"
ONCE = f"{OF_SHARED}::test_each_batch_is_prepared_once_and_removed_when_all_have_it"
FLIPPED = f"{OF_CACHE}::test_a_flipped_bit_is_never_a_wrong_sample"
MODEL = "tests/tools/test_stalls.py::test_predictions_of_the_model"

MUTATIONS = (
    Mutation(
        "a-full-cache-forgets-what-it-has",
        CACHE,
        old="            if key not in self._samples and self._num_bytes + size <= self._limit_bytes:\n",
        new="            if self._num_bytes + size > self._limit_bytes:\n"
        "                self._samples.clear()\n"
        "                self._num_bytes = 0\n"
        "            if key not in self._samples:\n",
        tests=(f"{OF_CACHE}::test_hits_of_an_epoch_are_the_samples_held[memory-20]",),
    ),
    Mutation(
        "sources-of-a-blend-mixed-up-in-the-cache",
        CACHE,
        old="key = self._first_key | number",
        new="key = number",
        tests=(f"{OF_CACHE}::test_sources_of_a_blend_share_a_cache_and_keep_apart",),
    ),
    Mutation(
        "damaged-tokens-taken-from-the-disk",
        DISK,
        old=" or zlib.crc32(tokens) != checksum:",
        new=":",
        tests=(f"{FLIPPED}[33]",),
    ),
    Mutation(
        "damaged-headers-believed",
        DISK,
        old="_CHECKSUM.unpack(header[_FIELDS.size :])[0] != self._checksum(fields)",
        new="False",
        tests=(FLIPPED,),
    ),
    Mutation(
        "samples-appended-after-what-a-killed-process-left",
        DISK,
        old="            os.ftruncate(self._file, self._end)\n        written",
        new="            self._end = os.fstat(self._file).st_size\n        written",
        tests=(f"{OF_CACHE}::test_a_cut_file_is_continued",),
    ),
    Mutation(
        "samples-of-another-length-of-sequences",
        CACHING,
        old="[config.model.task, config.model.seq_len, config.model.vocab_size]",
        new="[config.model.task]",
        tests=(f"{OF_CACHE}::test_the_name_of_samples_has_what_they_follow_from",),
    ),
    Mutation(
        "batches-of-other-rows-shared",
        CACHING,
        old=", rows=list(rows), left_out",
        new=", left_out",
        tests=(f"{OF_SHARED}::test_the_name_of_batches_has_what_they_follow_from",),
    ),
    Mutation(
        "every-run-prepares-every-batch",
        SHARED,
        old="return any(_keeps(first, step) for name",
        new="return False and any(_keeps(first, step) for name",
        tests=(ONCE,),
    ),
    Mutation(
        "batches-never-removed",
        SHARED,
        old="return first <= step < first + KEPT",
        new="return True",
        tests=(ONCE,),
    ),
    Mutation(
        "batch-of-the-next-step-taken",
        SHARED,
        old='return self._folder / f"{step}.npz"',
        new='return self._folder / f"{step // 2}.npz"',
        tests=(f"{OF_SHARED}::test_threads_of_runs_in_step_prepare_each_batch_once",),
    ),
    Mutation(
        "dead-runs-count-as-alive",
        SHARED,
        old="                    os.unlink(members / name)\n",
        new="                    yield name, 0\n",
        tests=(f"{OF_SHARED}::test_other_batches_do_not_meet_and_what_dead_runs_left_is_removed",),
    ),
    Mutation(
        "log-has-samples-of-another-row",
        LOG,
        old="values[row] for name, values in fields.items()",
        new="values[0] for name, values in fields.items()",
        tests=("tests/train/test_samples_once.py",),
    ),
    Mutation(
        "log-counts-from-the-batch",
        "fiddlex/train/step/feed.py",
        old="enumerate(batches, start_step + 1)",
        new="enumerate(batches, start_step)",
        tests=("tests/train/test_samples_once.py",),
    ),
    Mutation(
        "disagreement-in-the-log-ignored",
        LOG,
        old="elif not rolled_back and rows.setdefault(row, sample) != sample:",
        new="elif not rolled_back and rows.setdefault(row, sample) is None:",
        tests=("tests/train/test_samples_once.py::test_disagreement_in_a_log_is_an_error",),
    ),
    Mutation(
        "b-from-elsewhere-ends-with-its-window",
        "fiddlex/data/sentence_pairs.py",
        old="if end > len(sample):",
        new="if False:",
        tests=("tests/data/test_sentence_pairs.py",),
    ),
    Mutation(
        "threads-fetch-faster-than-the-channel",
        STALLS,
        old="max(together_s, self.fetch_limit_s * missing, self.prepare_limit_s)",
        new="max(together_s, self.prepare_limit_s)",
        tests=(MODEL,),
    ),
    Mutation(
        "a-cache-advised-to-runs-without-a-second-epoch",
        STALLS,
        old="if self.times.fetch_one_thread_s and self.epochs > 1:",
        new="if self.times.fetch_one_thread_s:",
        tests=("tests/tools/test_stalls.py::test_a_cache_is_advised_to_runs_of_more_than_an_epoch",),
    ),
    Mutation(
        "prediction-not-scaled-to-what-was-measured",
        STALLS,
        old="return scale * self._modelled_s(",
        new="return self._modelled_s(",
        tests=(MODEL,),
    ),
)
