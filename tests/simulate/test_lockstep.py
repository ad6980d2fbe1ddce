import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config.sections import ORDERS
from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.text import from_csv
from fiddlex.simulate.clock import Costs
from fiddlex.simulate.lockstep import lockstep
from tests.schedules.strategies import generated_schedules, user_schedules
from tests.simulate.strategies import sharing, stage_costs

UNIT = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0)
UNEQUAL = Costs(forward=1.0, backward_input=1.5, backward_weight=0.75)
COSTS = pytest.mark.parametrize("costs", [UNIT, UNEQUAL], ids=["unit", "unequal"])
PIPES = pytest.mark.parametrize("pipe", range(2, 17))


def run(name, pipe, num_microbatches, costs, chunks=1):
    return lockstep(lower(GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)), costs)


@COSTS
@PIPES
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_gpipe_and_1f1b_cost_what_they_do_free_running(name, pipe, costs):
    whole = costs.forward + costs.backward_input + costs.backward_weight
    for m in {1, pipe - 1, pipe + 3, 128 if pipe in (2, 16) else 31}:
        timeline = run(name, pipe, m, costs)
        assert timeline.makespan == (m + pipe - 1) * whole
        assert timeline.bubble == (pipe - 1) * whole
        assert timeline.bubble_fraction == (pipe - 1) / m


@PIPES
@pytest.mark.parametrize("chunks", range(1, 5))
def test_interleaved_1f1b_has_1_over_v_of_the_bubble(pipe, chunks):
    # One chunk takes 1/v of the time of the whole rank, in which the formula is written.
    costs = Costs(*(time / chunks for time in (1.0, 1.5, 0.75)))
    for m in {pipe, 2 * pipe, 128 // pipe * pipe if pipe in (2, 5, 16) else 3 * pipe}:
        timeline = run("interleaved_1f1b", pipe, m, costs, chunks)
        assert timeline.bubble == pytest.approx((pipe - 1) * 3.25 / chunks)
        assert timeline.bubble_fraction == pytest.approx((pipe - 1) / (chunks * m))


@pytest.mark.parametrize(
    ("inputs", "weights", "ahead", "strict", "split"),
    [(1.0, 1.0, 57, 72, 51), (2.0, 1.0, 76, 106, 97), (2.0, 0.5, 66.5, 89, 96.5)],
)
def test_orders_of_1f1b_against_zb_h1(inputs, weights, ahead, strict, split):
    """The table of docs/pipeline.md."""
    ways = ("1f1b", "ahead", ahead, 7), ("1f1b", "strict", strict, 4), ("zb_h1", "auto", split, 4)
    for name, order, seconds, held in ways:
        lowered = lower(make_schedule(name, pipe=4, num_microbatches=16, order=order))
        timeline = lockstep(lowered, Costs(1.0, inputs, weights))
        assert (timeline.makespan, max(timeline.peak_inflight)) == (seconds, held)


@PIPES
def test_1f1b_in_strict_order_takes_as_much_longer_as_b_is_longer_than_f_in_all_but_one_tick(pipe):
    for m, backward in ((1, 2.0), (pipe, 2.5), (3 * pipe, 3.0)):
        schedule = make_schedule("1f1b", pipe=pipe, num_microbatches=m, order="strict")
        timeline = lockstep(lower(schedule), Costs(1.0, backward - 1.0, 1.0))
        assert timeline.makespan == pipe + (2 * m + pipe - 2) * backward
        assert timeline.makespan == (m + pipe - 1) * (1 + backward) + (m - 1) * (backward - 1)
        assert timeline.peak_inflight == tuple(min(pipe - rank, m) for rank in range(pipe))


@pytest.mark.parametrize("name", GENERATORS)
def test_no_other_order_of_the_ticks_is_faster_than_that_of_the_name(name):
    for pipe, inputs, weights in itertools.product((2, 3, 4, 8), (0.75, 1.0, 2.0), (0.5, 1.0)):
        for m in {2, pipe, min(5 * pipe, 16)}:
            if name == "interleaved_1f1b" and m % pipe:
                continue
            orders = [lower(make_schedule(name, pipe=pipe, num_microbatches=m, order=order)) for order in ORDERS]
            own, *others = (lockstep(lowered, Costs(1.0, inputs, weights)).makespan for lowered in orders)
            assert own <= min(others) * (1 + 1e-12)


def test_dual_pipe_v_is_faster_in_its_own_order_and_holds_as_much():
    for order, units in (("auto", 54), ("strict", 54), ("ahead", 68)):
        lowered = lower(make_schedule("dual_pipe_v", pipe=4, num_microbatches=8, order=order))
        assert (lockstep(lowered, UNIT).makespan, lowered.stash_slots) == (units, 9)


@PIPES
@pytest.mark.parametrize(("name", "chunks"), [("zb_h1", 1), ("zb_h2", 1), ("zb_v", 2), ("v_half", 2), ("v_min", 2)])
def test_with_one_action_a_tick_no_rank_waits_within_a_tick(name, chunks, pipe):
    lowered = lower(GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=2 * pipe))
    assert not lowered.scores_between
    assert lockstep(lowered, UNIT).makespan == lowered.num_ticks


def test_the_bubble_is_what_the_makespan_has_beyond_the_work_whenever_ranks_begin_and_end():
    schedule = from_csv("0F0,0B0\n1F0,1B0\n", "t")
    timeline = lockstep(lower(schedule), Costs((1.0, 4.0), 1.0, 1.0))
    assert (timeline.makespan, timeline.ideal, timeline.bubble) == (9.0, 6.0, 3.0)
    shifted = from_csv("0F0,1F0,1B0,0B0\n2F0,2B0\n", "t")
    timeline = lockstep(lower(shifted), Costs((1.0, 1.0, 9.0), 1.0, 1.0))
    assert (timeline.makespan, timeline.ideal, timeline.bubble) == (17.0, 11.0, 6.0)
    late = run("zb_v", 4, 8, UNIT, chunks=2)
    assert late.bubble == late.makespan - 6 * 8 > max(row[-1].end - row[0].start for row in late.events) - 6 * 8


@PIPES
def test_a_hop_of_1f1b_is_hidden_wherever_there_is_a_slot_beside_it(pipe):
    """In p−1 ticks there are only forwards, so activations travel beside nothing; in p−1 gradients do."""
    for m in (1, pipe, 3 * pipe):
        for hop in (0.25, 1.0):
            timeline = run("1f1b", pipe, m, Costs(1.0, 1.0, 1.0, hop))
            assert timeline.makespan == (m + pipe - 1) * 3 + 2 * (pipe - 1) * hop


@PIPES
def test_peaks_of_1f1b_are_those_of_a_round_trip(pipe):
    peaks = run("1f1b", pipe, 4 * pipe, UNIT).peak_inflight
    assert peaks == tuple(2 * (pipe - 1 - rank) + 1 for rank in range(pipe))


def test_times_by_hand():
    schedule = from_csv("0F0,0F1,0I0,0B1,0W0\n1F0,1B0,1F1,1B1\n", "t")
    timeline = lockstep(lower(schedule), Costs((2.0, 1.0), 3.0, 1.0, hop=(0.5, 2.5)))
    assert timeline.tick_starts == (0.0, 2.5, 8.5, 14.0)
    assert [(str(action), start, end) for action, start, end in timeline.events[0]] == [
        ("0F0", 0.0, 2.0),  # then the hop of 0.5 beside nothing
        ("0F1", 2.5, 4.5),
        ("0I0", 11.0, 14.0),  # its gradient set out with the tick and took 2.5, longer than 1F1
        ("0B1", 16.5, 20.5),
        ("0W0", 20.5, 21.5),
    ]
    assert [(str(action), start, end) for action, start, end in timeline.events[1]] == [
        ("1F0", 2.5, 3.5),
        ("1B0", 4.5, 8.5),  # scoring waited for 0F1
        ("1F1", 8.5, 9.5),
        ("1B1", 9.5, 13.5),
    ]
    assert timeline.makespan == 21.5


def test_a_tick_by_hand_that_is_as_long_as_its_slowest_rank():
    schedule = from_csv("0F0,0F1,0I0,0B1,0W0\n1F0,1B0,1F1,1B1\n", "t")
    timeline = lockstep(lower(schedule), Costs((2.0, 1.0), 3.0, 1.0, hop=(0.5, 0.0)))
    assert timeline.tick_starts == (0.0, 2.5, 8.5, 13.5)


ANY_SCHEDULE = st.one_of(user_schedules(), generated_schedules())


@given(ANY_SCHEDULE, st.booleans(), st.data())
def test_every_start_follows_from_the_rules_of_a_tick(schedule, spills, data):
    """Each start is worked out anew from the other times of its tick."""
    costs, lowered = data.draw(stage_costs(schedule.num_stages)), lower(schedule, spills=spills)
    copy = costs.spill if lowered.host_stash_slots else 0
    costs = dataclasses.replace(costs, sharing=data.draw(sharing(schedule.num_ranks)))
    alone = costs.durations(schedule.num_stages)
    timeline, hops = lockstep(lowered, costs), costs.per_stage(schedule.num_stages)["hop"]
    placement, last = schedule.placement, schedule.num_stages - 1
    tick_of = {
        action: tick
        for row, ticks in zip(schedule.actions, lowered.ticks, strict=True)
        for action, tick in zip(row, ticks, strict=True)
    }
    ends, shared = [*timeline.tick_starts[1:], timeline.makespan], 0.0
    for tick, (start, end) in enumerate(zip(timeline.tick_starts, ends, strict=True)):
        ran, before = (
            {event.action: event for row in timeline.events for event in row if tick_of[event.action] == wanted}
            for wanted in (tick, tick - 1)
        )
        forward_end, backward_end, reached = {}, {}, []
        stages = [(action.kind, action.stage) for action in ran]
        entering = costs.embed if (Kind.F, 0) in stages else 0
        scoring = costs.head if (Kind.F, last) in stages else 0
        coming_back = costs.embed_backward if {(Kind.B, 0), (Kind.I, 0)}.intersection(stages) else 0
        shared += entering + scoring + coming_back
        for rank in range(schedule.num_ranks):
            forward_end[rank] = max(
                (e.end for a, e in ran.items() if on(a, rank, placement, "F")), default=start + entering
            )
            forward_end[rank] = max(forward_end[rank], start + copy)
            reached.append(forward_end[rank] + copy)
        for action, event in ran.items():
            if action.kind is Kind.F:
                assert event.start == start + entering
                if action.stage < last and placement[action.stage + 1] != placement[action.stage]:
                    reached.append(max(event.end, start + copy) + hops[action.stage])
        scored = lowered.scores_between and (Kind.F, last) in stages
        for rank in range(schedule.num_ranks):
            gate = max(forward_end.values()) + scoring if scored else forward_end[rank]
            for sender in before:
                if sender.kind in (Kind.B, Kind.I) and sender.stage and placement[sender.stage - 1] == rank:
                    gate = max(gate, start + (hops[sender.stage] if placement[sender.stage] != rank else 0))
            backward_end[rank] = gate
            for action, event in ran.items():
                if on(action, rank, placement, "BI"):
                    assert event.start == gate
                    backward_end[rank] = event.end
        for action, event in ran.items():
            if action.kind is Kind.W:
                assert event.start == backward_end[placement[action.stage]]
        reached += [*backward_end.values(), *(event.end for event in ran.values())]
        assert end == max(reached) + coming_back + (0 if scored else scoring) + costs.tick
        for action, event in ran.items():
            together = [a for a in ran if not lowered.scores_between or SLOT[a.kind] == SLOT[action.kind]]
            lengths = [alone[a.kind][a.stage] for a in together]
            expected = alone[action.kind][action.stage]
            if costs.sharing:
                expected = finish_beside(lengths, expected, costs.sharing)
            assert event.end - event.start == expected
    assert timeline.shared == shared


SLOT = {Kind.F: 0, Kind.B: 1, Kind.I: 1, Kind.W: 2}


def finish_beside(lengths, own, factors):
    """When a job of length `own` is done among jobs that begin together, stepped through in quarters of work."""
    time, done = 0.0, 0.0
    while done < own:
        time += 0.25 * factors[sum(length > done for length in lengths) - 1]
        done += 0.25
    return time


def test_ranks_that_share_cores_by_hand():
    schedule = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n", "t")
    alone = lockstep(lower(schedule), Costs((2.0, 3.0), 1.0, 1.0))
    beside = lockstep(lower(schedule), Costs((2.0, 3.0), 1.0, 1.0, tick=0.5, sharing=(1.0, 2.0)))
    assert alone.tick_starts == (0.0, 2.0, 7.0, 12.0)
    # Tick 1: both forwards until the shorter one of 2 is done after 4, then 1 of the longer; the B of rank 1 alone.
    assert beside.tick_starts == (0.0, 2.5, 10.0, 17.5)


def on(action, rank, placement, kinds):
    return placement[action.stage] == rank and action.kind in kinds


@given(ANY_SCHEDULE, st.data())
def test_a_timeline_has_every_action_once_in_order_of_time(schedule, data):
    timeline = lockstep(lower(schedule), data.draw(stage_costs(schedule.num_stages)))
    for row, actions in zip(timeline.events, schedule.actions, strict=True):
        assert sorted(event.action for event in row) == sorted(actions)
        assert all(before.end <= after.start for before, after in itertools.pairwise(row))


@given(ANY_SCHEDULE, st.data())
def test_memory_is_what_the_executors_stashes_hold(schedule, data):
    lowered = lower(schedule)
    timeline = lockstep(lowered, data.draw(stage_costs(schedule.num_stages)))
    ranks = range(schedule.num_ranks)
    for slots, peaks, amounts in (
        (lowered.stash_slots, timeline.peak_inflight, (1, 0)),
        (lowered.weight_stash_slots, timeline.peak_weight_stash, (0, 1)),
    ):
        curves = [timeline.memory(rank, activation=amounts[0], weight_gradient=amounts[1]) for rank in ranks]
        most = [max((held for _, held in curve), default=0) for curve in curves]
        assert max(most) == slots
        assert peaks == tuple(most[rank] / len(schedule.stages_of(rank)) for rank in ranks)


def test_costs_that_do_not_fit_are_refused():
    with pytest.raises(ScheduleError, match="sharing has 1 factors for 2 ranks"):
        run("1f1b", 2, 2, Costs(sharing=(1.0,)))
    with pytest.raises(ScheduleError, match="must be above 0"):
        run("1f1b", 2, 2, Costs(sharing=(1.0, 0.0)))
    with pytest.raises(ScheduleError, match="forward has 3 times for 2 stages"):
        run("1f1b", 2, 2, Costs(forward=(1.0, 2.0, 3.0)))
