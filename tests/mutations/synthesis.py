"""Mutations of `fiddlex.synthesis`, which finds schedules, and of the orders and blocks that it builds on."""

from tests.mutations.mutation import Mutation

CANDIDATES = "tests/synthesis/test_candidates.py"
SEARCH = "tests/synthesis/test_search.py"
AUTO_PLANS = "tests/planner/test_auto_plans.py"

MUTATIONS = (
    Mutation(
        "partly-whole-backwards-tried-in-one-order",
        "fiddlex/synthesis/search.py",
        old='problem.clock == "lockstep" and schedule.has_whole:',
        new='problem.clock == "lockstep" and not schedule.split_backward:',
        tests=(
            "tests/synthesis/test_search.py::"
            "test_what_is_found_is_legal_within_the_caps_and_between_the_bound_and_every_name",
        ),
    ),
    Mutation(
        "ranks-that-forget-their-cap",
        "fiddlex/synthesis/greedy.py",
        old="return self._held[rank] + more <= cap and self._unsure[rank] + more + later <= cap",
        new="return self._unsure[rank] + more + later <= cap",
        tests=(f"{CANDIDATES}::test_what_ranks_with_rules_run_is_legal_and_within_the_caps",),
    ),
    Mutation(
        "a-beam-search-that-forgets-the-later-stages-of-a-rank",
        "fiddlex/synthesis/beam.py",
        old="unsure_after + self._later <= self._room[home]",
        new="unsure_after <= self._room[home]",
        tests=(f"{CANDIDATES}::test_times_of_beam_searches",),
    ),
    Mutation(
        "a-beam-search-whose-ranks-wait-as-they-like",
        "fiddlex/synthesis/beam.py",
        old="(f < before) & room & ~now.waits",
        new="(f < before) & room",
        tests=(f"{CANDIDATES}::test_times_of_beam_searches",),
    ),
    Mutation(
        "a-block-that-forgets-its-memory",
        "fiddlex/synthesis/blocks.py",
        old="row[begin + self.period] = row.get(begin + self.period, 0.0) - amount",
        new="pass",
        tests=(f"{CANDIDATES}::test_shortest_periods[3-2-1-10]",),
    ),
    Mutation(
        "a-bound-that-rounds-up",
        "fiddlex/synthesis/bounds.py",
        old="return math.floor(time / step * (1 + ROUNDING))",
        new="return math.ceil(time / step * (1 + ROUNDING)) + 1",
        tests=(f"{SEARCH}::test_no_schedule_beats_the_bound",),
    ),
    Mutation(
        "a-bound-that-counts-what-whole-backwards-do-not-leave",
        "fiddlex/synthesis/bounds.py",
        old="memory += [(i, self._until_left[stage], left), (w, 0, -left)]",
        new="memory += [(i, 0, left), (w, self._length[stage, Kind.W], -left)]",
        tests=(f"{SEARCH}::test_no_schedule_beats_the_bound",),
    ),
    Mutation(
        "a-bound-of-cores-that-never-help-each-other",
        "fiddlex/synthesis/bounds.py",
        old="least = min(costs.sharing[: problem.num_ranks])",
        new="least = 1.0",
        tests=(f"{SEARCH}::test_no_schedule_beats_the_bound",),
    ),
    Mutation(
        "a-bound-that-waits-for-the-w-of-other-ranks",
        "fiddlex/synthesis/bounds.py",
        old="for kind in (Kind.F, Kind.I) for stage in others",
        new="for kind in _KINDS for stage in others",
        tests=(f"{SEARCH}::test_no_order_at_all_beats_the_bound", f"{SEARCH}::test_bounds_that_are_reached"),
    ),
    Mutation(
        "answers-that-are-believed",
        "fiddlex/synthesis/cache.py",
        old=' or judged.time != answer["time"]',
        new="",
        tests=(f"{SEARCH}::test_the_same_question_has_the_same_answer_from_the_cache_and_without_it",),
    ),
    Mutation(
        "a-cap-that-never-falls",
        "fiddlex/planner/auto_schedule.py",
        old="cap = max(min(cap, slots / chunks) - spare / chunks, 1.0) if left > 1 else 1.0",
        new="pass",
        tests=("tests/planner/test_auto_schedule.py::test_the_cap_falls_until_the_memory_fits",),
    ),
    Mutation(
        "a-cap-that-falls-too-far",
        "fiddlex/planner/auto_schedule.py",
        old="of_slot = (needed.stash + needed.weight_stash) / slots",
        new="of_slot = needed.stash / slots",
        tests=("tests/planner/test_auto_schedule.py::test_the_cap_falls_little_further_than_it_must",),
    ),
    Mutation(
        "plans-for-less-memory-than-a-run-knows-of",
        "fiddlex/planner/auto_plans.py",
        old="of_run = dataclasses.replace(problem, memory_bytes=None)",
        new="of_run = problem",
        tests=(f"{AUTO_PLANS}::test_where_plans_may_take_less_than_the_chip_has_a_plan_has_still_what_a_run_finds",),
    ),
    Mutation(
        "a-strict-order-that-is-not-kept",
        "fiddlex/schedules/ticks.py",
        old="return not schedule.strict and schedule.has_whole",
        new="return schedule.has_whole",
        tests=(
            "tests/schedules/test_ticks.py::test_1f1b_in_strict_order_holds_what_the_papers_say_in_two_ticks_for_each_microbatch",
        ),
    ),
    Mutation(
        "ranks-that-wait-for-each-other-judged",
        "fiddlex/synthesis/problem.py",
        old="if fills_pairs(schedule) and",
        new="if False and",
        tests=("tests/synthesis/test_problem.py::test_an_order_in_which_ranks_wait_for_each_other_is_refused",),
    ),
    Mutation(
        "a-bound-on-the-coarse-grid-alone",
        "fiddlex/synthesis/bounds.py",
        old="ranks = [longest]",
        new="ranks = []",
        tests=(f"{SEARCH}::test_a_fine_grid_gives_a_larger_bound_than_a_coarse_one",),
    ),
)
