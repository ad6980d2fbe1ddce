"""Mutations of what counts memory: of the devices, of the host, and of a machine that runs fake devices."""

from tests.mutations.mutation import Mutation

MEMORY = "fiddlex/costs/memory.py"
ARGUMENTS = "tests/costs/test_device_memory.py::test_arguments_of_the_step_are_counted_exactly"
ENOUGH = "fiddlex/planner/enough_memory.py"
TEST_ENOUGH = "tests/planner/test_enough_memory.py"

MUTATIONS = (
    # What a program needs beside what is free.
    Mutation(
        "fake-devices-counted-once",
        ENOUGH,
        old="{name: devices * size for",
        new="{name: size for",
        tests=(f"{TEST_ENOUGH}::test_a_process_needs_what_its_devices_need_and_a_copy_to_save",),
    ),
    Mutation(
        "swap-space-ignored",
        ENOUGH,
        old="(free.free + free.swap)",
        new="free.free",
        tests=(f"{TEST_ENOUGH}::test_a_need_is_compared_with_what_is_free",),
    ),
    Mutation(
        "processes-that-share-a-memory-counted-once",
        "fiddlex/train/run/faults/require_memory.py",
        old="sharing[key])",
        new="1)",
        tests=(
            "tests/train/run/faults/test_require_memory.py::"
            "test_processes_of_a_machine_share_its_memory_but_not_their_own_groups",
        ),
    ),
    Mutation(
        "page-cache-counted-as-used",
        "fiddlex/cluster/free_memory.py",
        old="limit - used + cache",
        new="limit - used",
        tests=("tests/cluster/test_free_memory.py::test_version_1_has_other_names",),
    ),
    Mutation(
        "nothing-saved-when-memory-runs-out",
        "fiddlex/train/run_steps.py",
        old="processes.num_processes() == 1 and self._trainer.holds_state:",
        new="False:",
        tests=(
            "tests/train/run/faults/test_require_memory.py::"
            "test_a_run_that_runs_out_of_memory_saves_what_is_there_and_tells[evaluate-2]",
        ),
    ),
    # The optimizer on the host.
    Mutation(
        "host-too-small-ignored",
        "fiddlex/planner/search.py",
        old=" or memory.of_host > problem.host_limit",
        new="",
        tests=("tests/planner/test_search_hosts.py::test_a_host_that_is_too_small_is_told",),
    ),
    Mutation(
        "weights-fetched-once",
        "fiddlex/planner/host_link.py",
        old="come = state * (2 + moments)",
        new="come = state * (1 + moments)",
        tests=("tests/planner/test_search_hosts.py::test_the_update_from_the_host_takes_what_its_link_takes",),
    ),
    Mutation(
        "gradients-on-the-host-fetched-once",
        "fiddlex/planner/host_link.py",
        old="streamed_rows * 2 * layer.gradients",
        new="streamed_rows * layer.gradients",
        tests=("tests/planner/test_cost_model.py::test_an_update_from_the_host_moves_its_state_and_what_is_streamed",),
    ),
    Mutation(
        "moments-stay-on-the-device",
        "fiddlex/costs/weight_memory.py",
        old="host=FLOAT32 * sum(each.whole for each in stored if each.offloaded)",
        new="host=FLOAT32 * sum(each.size for each in stored if each.offloaded)",
        tests=(
            "tests/costs/test_device_memory.py::test_arguments_of_the_step_are_counted_exactly[optimizer on the host]",
        ),
    ),
    # Memory.
    Mutation(
        "memory-without-gradients",
        MEMORY,
        old="self.weights + self.optimizer + self.versions + self.gradients + self.inputs",
        new="self.weights + self.optimizer + self.versions + self.inputs",
        tests=(
            "tests/costs/test_device_memory.py::"
            "test_gradients_and_their_reduction_are_most_of_a_wide_model_on_short_sequences",
        ),
    ),
    Mutation(
        "memory-with-one-stash-slot-too-few",
        MEMORY,
        old="stash=(slots.stash + IN_TRANSIT",
        new="stash=(slots.stash - 1 + IN_TRANSIT",
        tests=(f"{ARGUMENTS}[2bw]",),
    ),
    Mutation(
        "memory-of-the-weights-in-use-alone",
        MEMORY,
        old="versions=(sizes.versions - 1) * compute",
        new="versions=(sizes.versions - 2) * compute",
        tests=(f"{ARGUMENTS}[2bw]",),
    ),
    Mutation(
        "moments-whole-on-every-replica",
        "fiddlex/costs/weight_memory.py",
        old="shape[dimension] //= data",
        new="shape[dimension] //= 1",
        tests=(f"{ARGUMENTS}[adamw]",),
    ),
    Mutation(
        "copies-to-hosts-predicted-from-a-profile-without-them",
        "fiddlex/planner/profile.py",
        old="if told := [name for name, waits in on_host.items() if waits]:",
        new="if told := []:",
        tests=("tests/planner/test_profile.py::test_what_waits_on_hosts_is_refused_since_no_copy_was_measured",),
    ),
    Mutation(
        "the-width-that-libtpu-takes-with-any-number-of-replicas",
        "fiddlex/hardware/compilers.py",
        old="width = _STREAMED_WIDTH * replicas",
        new="width = 2 * _STREAMED_WIDTH",
        tests=(
            "tests/planner/test_search_hosts.py::"
            "test_plans_with_weights_on_hosts_have_several_replicas_only_where_the_compiler_takes_them",
        ),
    ),
)
