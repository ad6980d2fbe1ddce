"""Mutations of what a run knows of its time: goodput, utilisation, slow processes."""

from tests.mutations.mutation import Mutation

GOODPUT = "tests/train/run/records/test_goodput.py"

MUTATIONS = (
    Mutation(
        "repeated-steps-count-as-goodput",
        "fiddlex/train/run/records/goodput.py",
        old="kept_step = min(kept_step, resumed_step)",
        new="kept_step = math.inf",
        tests=(f"{GOODPUT}::test_steps_that_are_taken_again_and_the_time_between_processes_are_lost",),
    ),
    Mutation(
        "only-the-last-restart-repeats-steps",
        "fiddlex/train/run/records/goodput.py",
        old="kept_step = min(kept_step, resumed_step)",
        new="kept_step = resumed_step",
        tests=(f"{GOODPUT}::test_steps_that_are_taken_again_and_the_time_between_processes_are_lost",),
    ),
    Mutation(
        "time-after-the-end-counts-as-a-restart",
        "fiddlex/train/run/records/goodput.py",
        old="if not before[-1].ended:",
        new="if True:",
        tests=(f"{GOODPUT}::test_time_after_the_end_does_not_count",),
    ),
    Mutation(
        "utilisation-of-one-device-by-all-devices-work",
        "fiddlex/costs/utilisation.py",
        old="model_flops(config) / config.mesh.num_devices",
        new="model_flops(config)",
        tests=("tests/costs/test_utilisation.py::test_a_step_of_known_length_on_a_known_chip",),
    ),
    Mutation(
        "slow-hosts-held-against-the-median-host",
        "fiddlex/train/run/records/slow_ranks.py",
        old='max(TOLERANCE * step_s, NOISE_S):\n            text = (\n                f"Rank {rank} is slow: in',
        new='max(TOLERANCE * usual_held_s, NOISE_S):\n            text = (\n                f"Rank {rank} is slow: in',
        tests=("tests/train/run/records/test_slow_ranks.py::test_a_figure_is_off_by_more_than_a_quarter",),
    ),
    Mutation(
        "figures-of-different-log-points-compared",
        "fiddlex/train/run/records/slow_ranks.py",
        old="rank: each[max(steps)] for",
        new="rank: each[max(each)] for",
        tests=(
            "tests/train/run/records/test_slow_ranks.py::test_a_rank_is_named_when_it_becomes_slow_and_not_while_it_stays_so",
        ),
    ),
)
