"""Mutations of what a run does about its checkpoints' cost and about steps that go wrong."""

from tests.mutations.mutation import Mutation

INTERVAL = "tests/train/run/checkpoints/test_save_interval.py"
FAULTS = "tests/train/test_faults.py"
WRITER = "tests/train/run/checkpoints/test_writer.py"

MUTATIONS = (
    Mutation(
        "saves-while-the-last-one-is-written",
        "fiddlex/train/run/checkpoints/save_interval.py",
        old="        if self._writes():\n            return None",
        new="        if False:\n            return None",
        tests=(f"{INTERVAL}::test_no_save_begins_before_the_last_is_safe",),
    ),
    Mutation(
        "slow-steps-beside-the-writer-not-counted",
        "fiddlex/train/run/checkpoints/save_interval.py",
        old="self._held_s + slower_s",
        new="self._held_s",
        tests=(f"{INTERVAL}::test_the_overhead_stays_within_its_bound",),
    ),
    Mutation(
        "youngs-interval-without-its-two",
        "fiddlex/train/run/checkpoints/save_interval.py",
        old="math.sqrt(2 * cost_s",
        new="math.sqrt(cost_s",
        tests=(f"{INTERVAL}::test_no_other_interval_loses_less_time_with_failures",),
    ),
    Mutation(
        "a-spike-changes-the-weights",
        "fiddlex/train/step/train_step.py",
        old="            good &= ~spike\n",
        new="",
        tests=(f"{FAULTS}::test_a_run_with_a_bad_batch_equals_one_without_it",),
    ),
    Mutation(
        "a-spike-counts-as-usual",
        "fiddlex/train/step/spikes.py",
        old="jnp.where(good, b, a), usual, new)",
        new="b, usual, new)",
        tests=("tests/train/step/test_spikes.py::test_only_good_steps_change_what_is_usual",),
    ),
    Mutation(
        "batches-after-one-left-out-do-not-move-up",
        "fiddlex/data/loader.py",
        old="        number += each <= number\n",
        new="        number += each == number\n",
        tests=(f"{FAULTS}::test_a_run_with_a_bad_batch_equals_one_without_it",),
    ),
    Mutation(
        "a-run-with-too-many-faults-ends-without-saving",
        "fiddlex/train/run_steps.py",
        old="            self.save()  # reads",
        new="            pass  # reads",
        tests=(f"{FAULTS}::test_faults_are_bounded_in_number_and_no_good_step_is_lost",),
    ),
    Mutation(
        "a-run-that-a-spike-ends-does-not-save",
        "fiddlex/train/run_steps.py",
        old="if self._bad_steps.note_spike(error, dispatched.step):",
        new="if False:",
        tests=(f"{FAULTS}::test_a_spike_that_ends_the_run_loses_no_good_step",),
    ),
    Mutation(
        "a-resumed-run-does-not-count-its-faults",
        "fiddlex/train/loop.py",
        old="bad_steps.check()  # an earlier",
        new="pass  # an earlier",
        tests=(f"{FAULTS}::test_faults_are_bounded_in_number_and_no_good_step_is_lost",),
    ),
    Mutation(
        "skipped-steps-without-a-record",
        "fiddlex/train/run_steps.py",
        old="is_last or skipped or is_due(",
        new="is_last or is_due(",
        tests=(f"{FAULTS}::test_a_run_with_a_bad_batch_equals_one_without_it",),
    ),
    Mutation(
        "weights-to-blame-are-saved",
        "fiddlex/train/run_steps.py",
        old='if record and record.get("skipped") == "nonfinite":',
        new="if False:",
        tests=(f"{FAULTS}::test_weights_that_make_every_step_bad_are_not_saved",),
    ),
    Mutation(
        "a-rollback-sets-all-best-weights-aside",
        "fiddlex/train/run/best.py",
        old='self.evaluation["step"] > resumed_step',
        new="resumed_step",
        tests=(f"{FAULTS}::test_a_rollback_keeps_the_best_weights_or_makes_them_again",),
    ),
    Mutation(
        "a-rollback-keeps-best-weights-of-later-steps",
        "fiddlex/train/run/best.py",
        old='self.evaluation["step"] > resumed_step',
        new="False",
        tests=(f"{FAULTS}::test_a_rollback_keeps_the_best_weights_or_makes_them_again",),
    ),
    Mutation(
        "checkpoints-that-may-be-to-blame-stay",
        "fiddlex/train/bad_steps.py",
        old="for step in steps if step >= blamed]",
        new="for step in steps if step > blamed + 1]",
        tests=(f"{FAULTS}::test_a_rollback_keeps_the_best_weights_or_makes_them_again",),
    ),
    Mutation(
        "a-rollback-keeps-the-optimizer-of-the-bad-step",
        "fiddlex/train/trainer.py",
        old="        self._state = None  # whose memory the restored one takes\n",
        new="",
        tests=(f"{FAULTS}::test_a_rollback_to_weights_alone_starts_the_optimizer_afresh",),
    ),
    Mutation(
        "a-failed-save-counts-as-written",
        "fiddlex/train/run/checkpoints/writer.py",
        old="return self._pending or self._error is not None",
        new="return self._pending",
        tests=(f"{WRITER}::test_a_save_that_fails_in_the_background_is_tried_once_more",),
    ),
    Mutation(
        "the-second-try-of-a-save-is-not-waited-for",
        "fiddlex/train/run_steps.py",
        old="            if is_last_try:\n                self._checkpoints.wait()\n",
        new="",
        tests=(f"{WRITER}::test_a_save_that_fails_in_the_background_is_tried_once_more",),
    ),
    Mutation(
        "the-snapshot-is-the-state-itself",
        "fiddlex/train/run/checkpoints/writer.py",
        old="snapshot = copied(state._replace(switch=()))._replace(switch=state.switch)",
        new="snapshot = state",
        tests=(f"{WRITER}::test_the_training_goes_on_before_anything_is_written",),
    ),
)
