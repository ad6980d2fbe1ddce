"""Mutations of what a run does about its checkpoints' cost and about steps that go wrong."""

from tests.mutations.mutation import Mutation

INTERVAL = "tests/train/run/test_save_interval.py"
FAULTS = "tests/train/test_faults.py"

MUTATIONS = (
    Mutation(
        "saves-while-the-last-one-is-written",
        "fiddlex/train/run/save_interval.py",
        old="        if self._writes():\n            return None",
        new="        if False:\n            return None",
        tests=(f"{INTERVAL}::test_no_save_begins_before_the_last_is_safe",),
    ),
    Mutation(
        "slow-steps-beside-the-writer-not-counted",
        "fiddlex/train/run/save_interval.py",
        old="self._held_s + slower_s",
        new="self._held_s",
        tests=(f"{INTERVAL}::test_the_overhead_stays_within_its_bound",),
    ),
    Mutation(
        "youngs-interval-without-its-two",
        "fiddlex/train/run/save_interval.py",
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
)
