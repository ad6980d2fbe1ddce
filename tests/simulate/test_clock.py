import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.errors import ScheduleError
from fiddlex.schedules.generators import GENERATORS
from fiddlex.schedules.schedule import Kind
from fiddlex.schedules.text import from_csv
from fiddlex.simulate.clock import Costs, free_running
from fiddlex.simulate.timeline import Event
from tests.schedules.strategies import generated_schedules, runnable, user_schedules
from tests.simulate.strategies import stage_costs

UNIT = Costs(forward=1.0, backward_input=1.0, backward_weight=1.0)
UNEQUAL = Costs(forward=1.0, backward_input=1.5, backward_weight=0.7)
LONG_FORWARD = Costs(forward=2.0, backward_input=0.75, backward_weight=0.5)
COSTS = pytest.mark.parametrize("costs", [UNIT, UNEQUAL, LONG_FORWARD], ids=["unit", "unequal", "long forward"])
PIPES = pytest.mark.parametrize("pipe", range(2, 17))


def run(name, pipe, num_microbatches, costs, chunks=1):
    schedule = GENERATORS[name](pipe=pipe, chunks=chunks, num_microbatches=num_microbatches)
    return free_running(schedule, costs)


def whole(costs):
    return costs.forward + costs.backward_input + costs.backward_weight


@COSTS
@PIPES
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_of_gpipe_and_1f1b(name, pipe, costs):
    for m in {1, pipe - 1, pipe + 3, 128 if pipe in (2, 16) else 31}:
        timeline = run(name, pipe, m, costs)
        assert timeline.bubble == pytest.approx((pipe - 1) * whole(costs))
        assert timeline.bubble_fraction == pytest.approx((pipe - 1) / m)
        assert timeline.makespan == pytest.approx((m + pipe - 1) * whole(costs))


@PIPES
@pytest.mark.parametrize("chunks", range(1, 5))
def test_bubble_of_interleaved_1f1b(pipe, chunks):
    # One chunk takes 1/v of the time of the whole rank, in which the formulas are written.
    costs = Costs(*(time / chunks for time in (1.0, 1.5, 0.7)))
    for m in {pipe, 2 * pipe, 128 // pipe * pipe if pipe in (2, 5, 16) else 3 * pipe}:
        timeline = run("interleaved_1f1b", pipe, m, costs, chunks)
        assert timeline.bubble == pytest.approx((pipe - 1) * 3.2 / chunks)
        assert timeline.bubble_fraction == pytest.approx((pipe - 1) / (chunks * m))


@PIPES
@pytest.mark.parametrize("chunks", range(1, 5))
def test_bubble_of_breadth_first(pipe, chunks):
    """With fewer microbatches than ranks, a rank waits for its first microbatch before each chunk but the first."""
    costs = Costs(*(time / chunks for time in (1.0, 1.5, 0.7)))
    for m in {1, pipe - 1, pipe, 3 * pipe, 33}:
        missing = (chunks - 1) * max(pipe - m, 0)
        bubble = run("breadth_first", pipe, m, costs, chunks).bubble
        assert bubble == pytest.approx((pipe - 1 + missing) * 3.2 / chunks)


@COSTS
@PIPES
def test_bubble_of_zb_h1_and_zb_h2(pipe, costs):
    """(p−1)(F+I−W) and (p−1)(F+I−2W) as published, where a W, which fills the gap of a missing F, is no longer than it.

    Each microbatch but the first fills W of the bubble of a single one, up to p microbatches or 2p−1.
    """
    assert costs.backward_weight <= min(costs.forward, costs.backward_input)
    alone = (pipe - 1) * (costs.forward + costs.backward_input)
    for m in {*range(1, 2 * pipe), 128 if pipe in (2, 16) else 33}:
        for name, enough in (("zb_h1", pipe), ("zb_h2", 2 * pipe - 1)):
            filled = (min(m, enough) - 1) * costs.backward_weight
            assert run(name, pipe, m, costs).bubble == pytest.approx(alone - filled)


@PIPES
def test_zb_h2_has_no_bubble_where_the_formula_is_negative(pipe):
    assert run("zb_h2", pipe, 2 * pipe, Costs(2.0, 1.0, 1.75)).bubble == 0


@PIPES
def test_zb_v_has_no_bubble_at_unit_costs(pipe):
    for m in {2 * pipe - 1, 2 * pipe, 128 if pipe in (2, 16) else 33}:
        timeline = run("zb_v", pipe, m, UNIT, chunks=2)
        assert timeline.bubble == 0
        assert timeline.makespan == 6 * m + pipe - 1  # the last rank starts and ends as much later


@PIPES
def test_bubble_and_memory_of_v_half_and_v_min_at_unit_costs(pipe):
    """About a half and two thirds of the bubble of 1F1B, which is 6(p−1), with a half and a third of its memory."""
    half, third = (pipe + 2) // 2, (pipe + 4) // 3
    for m in {half + 1, pipe + 1, 2 * pipe, 128 if pipe in (2, 16) else 33}:
        timeline = run("v_half", pipe, m, UNIT, chunks=2)
        bubble = 3 * pipe - (4 if pipe % 2 else 7)
        assert timeline.makespan - 6 * m == max(bubble, 1)  # with p = 2, the last rank starts and ends a unit later
        assert timeline.bubble == max(bubble, 0)
        assert max(timeline.peak_inflight) == half
    for m in {third + 1, pipe + 1, 2 * pipe, 128 if pipe in (2, 16) else 33}:
        timeline = run("v_min", pipe, m, UNIT, chunks=2)
        bubble = 4 * pipe - (7, 5, 9)[pipe % 3]
        assert timeline.makespan - 6 * m == max(bubble, 1)
        assert timeline.bubble == max(bubble, 0)
        assert max(timeline.peak_inflight) == third


@pytest.mark.parametrize(
    ("name", "pipe", "m", "unit", "unequal"),
    [
        ("v_half", 2, 8, 49, 83),
        ("v_half", 4, 8, 53, 95),
        ("v_half", 4, 32, 197, 335),
        ("v_half", 5, 8, 59, 107),
        ("v_half", 6, 12, 83, 149),
        ("v_half", 8, 8, 65, 127),
        ("v_half", 8, 16, 113, 203),
        ("v_half", 9, 18, 131, 235),
        ("v_min", 3, 2, 19, 37),
        ("v_min", 3, 8, 53, 105),
        ("v_min", 5, 10, 75, 149),
        ("v_min", 6, 6, 53, 105),
        ("v_min", 6, 12, 89, 177),
        ("v_min", 7, 14, 107, 213),
        ("v_min", 9, 32, 221, 441),
    ],
)
def test_v_half_and_v_min_are_no_slower_than_the_tables_of_their_authors(name, pipe, m, unit, unequal):
    """Times of the tables that the authors' generator (`zbv_greedy`) makes, with F, I, W of 1, 1, 1 and of 2, 2, 1."""
    assert run(name, pipe, m, UNIT, chunks=2).makespan <= unit
    assert run(name, pipe, m, Costs(2.0, 2.0, 1.0), chunks=2).makespan <= unequal


@PIPES
@pytest.mark.parametrize("costs", [UNIT, UNEQUAL], ids=["unit", "unequal"])
def test_bubble_of_zb_v(pipe, costs):
    """(p−1)(2I−2W) from 2p−1 microbatches on, for W ≤ F ≤ I: two stages' I each way, and two W beside each."""
    forward, inputs, weights = costs.forward, costs.backward_input, costs.backward_weight
    assert weights <= forward <= inputs
    for m in {*range(1, 2 * pipe + 2), 33}:
        filled = 2 * forward * (min(m, pipe) - 1) + 2 * weights * min(max(m - pipe, 0), pipe - 1)
        expected = 2 * (pipe - 1) * (forward + inputs) - filled
        assert run("zb_v", pipe, m, costs, chunks=2).bubble == pytest.approx(expected)


@PIPES
@pytest.mark.parametrize(
    "times", [(1.0, 1.0, 1.0), (1.0, 1.0, 0.25), (2.0, 1.5, 0.75), (1.75, 1.0, 1.0)], ids=lambda times: str(times)
)
def test_bubble_of_dual_pipe_v(pipe, times):
    """(p−1)(F+I−W) from 2p−1 microbatches on, for W ≤ I ≤ F ≤ I+W."""
    forward, inputs, weights = times
    assert weights <= inputs <= forward <= inputs + weights
    for m in {*range(1, 2 * pipe + 2), 128 if pipe in (2, 16) else 33}:
        filled = (forward + inputs) * (min(m, pipe) - 1) + 2 * weights * min(max(m - pipe, 0), pipe - 1)
        expected = (pipe - 1) * (2 * forward + 2 * inputs + weights) - filled
        timeline = run("dual_pipe_v", pipe, m, Costs(*times), chunks=2)
        assert timeline.bubble == pytest.approx(expected)
        if m >= 2 * pipe - 1:
            assert timeline.bubble == pytest.approx((pipe - 1) * (forward + inputs - weights))


@PIPES
@pytest.mark.parametrize(("stage", "weights"), [(1.0, 1.0), (1.0, 0.5), (2.0, 1.75)])
def test_bubble_of_dual_pipe_v_is_the_published_one_if_a_pair_is_one_action(pipe, stage, weights):
    """DeepSeek's (p−1)(F&B + B − 3W), with p for half of DualPipe's ranks, F = I, and F&B as long as both."""
    whole = stage + weights
    times = {"F": stage, "I": stage, "W": weights, "B": whole, "FB": stage + whole}
    for m in (2 * pipe, 3 * pipe + 1):
        spans, work = run_in_pairs(GENERATORS["dual_pipe_v"](pipe=pipe, num_microbatches=m), times)
        assert max(spans) - max(work) == pytest.approx((pipe - 1) * (times["FB"] + whole - 3 * weights))


def run_in_pairs(schedule, times):
    """How long each rank takes and works, free-running, if a forward and the B after it start and end together.

    The first pair of the last rank stays apart, as in DualPipe.
    """
    queues = []
    for rank, row in enumerate(schedule.actions):
        queue, rest = [], list(row)
        apart = rank == schedule.num_ranks - 1
        while rest:
            pair = "".join(action.kind for action in rest[:2]) == "FB"
            queue.append([rest.pop(0) for _ in range(1 + (pair and not apart))])
            apart = apart and not pair
        queues.append(queue)
    ends, free, starts, work = {}, [0.0] * len(queues), {}, [0.0] * len(queues)
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue:
                needs = {need for action in queue[0] for need in action.needs(schedule.num_stages)}
                needs -= {action.product for action in queue[0]}
                if not needs <= ends.keys():
                    break
                actions = queue.pop(0)
                start = max([free[rank], *(ends[need] for need in needs)])
                starts.setdefault(rank, start)
                lasts = times["".join(action.kind for action in actions)]
                free[rank], work[rank] = start + lasts, work[rank] + lasts
                ends |= dict.fromkeys((action.product for action in actions), free[rank])
    return [free[rank] - starts[rank] for rank in starts], work


@PIPES
def test_peaks_are_those_of_the_papers_table(pipe):
    m = 4 * pipe
    assert run("gpipe", pipe, m, UNIT).peak_inflight == (m,) * pipe
    assert run("1f1b", pipe, m, UNIT).peak_inflight == tuple(pipe - rank for rank in range(pipe))
    assert run("zb_h1", pipe, m, UNIT).peak_inflight == (pipe,) * pipe
    assert run("zb_h2", pipe, m, UNIT).peak_inflight == (2 * pipe - 1,) * pipe
    assert run("zb_v", pipe, m, UNIT, chunks=2).peak_inflight == (pipe,) * pipe
    assert run("dual_pipe_v", pipe, m, UNIT, chunks=2).peak_inflight == (pipe + 0.5,) * pipe  # p + 1 with 2p stages
    for chunks in range(1, 5):
        peaks = run("interleaved_1f1b", pipe, m, UNIT, chunks).peak_inflight
        assert peaks[0] == pytest.approx(pipe * (1 + (pipe - 1) / (pipe * chunks)))
        assert max(peaks) == peaks[0]


# What rank r of p holds at most, in microbatches, given all m of which there are fewer than it could hold.
PEAKS = {
    "gpipe": (1, lambda r, p, m: m),
    "breadth_first": (3, lambda r, p, m: m),
    "1f1b": (1, lambda r, p, m: min(m, p - r)),
    "zb_h1": (1, lambda r, p, m: min(m, p)),
    "zb_h2": (1, lambda r, p, m: min(m, 2 * p - 1)),
    "zb_v": (2, lambda r, p, m: min(m, p, (m + r + 1) / 2)),
    "dual_pipe_v": (2, lambda r, p, m: min(m, p + 0.5, (m + r + 1) / 2)),
}


@pytest.mark.parametrize("name", PEAKS)
def test_peaks_never_fall_with_microbatches_nor_pass_the_limit(name):
    chunks, most = PEAKS[name]
    for pipe in range(1, 9):
        for m in range(1, 4 * pipe):
            expected = [most(rank, pipe, m) for rank in range(pipe)]
            assert run(name, pipe, m, UNIT, chunks).peak_inflight == pytest.approx(expected)


def test_v_half_and_v_min_hold_a_half_and_a_third_on_the_rank_with_most():
    for pipe in range(1, 13):
        for m in range(1, 3 * pipe):
            assert max(run("v_half", pipe, m, UNIT, 2).peak_inflight) == min(m, (pipe + 2) // 2)
            assert max(run("v_min", pipe, m, UNIT, 2).peak_inflight) == min(m, (pipe + 4) // 3)


def test_times_and_memory_of_a_small_schedule_by_hand():
    schedule = from_csv("0F0,0F1,0I0,0W0,0B1\n1F0,1B0,1F1,1B1\n", "t")
    timeline = free_running(schedule, Costs(forward=2.0, backward_input=3.0, backward_weight=1.0, hop=0.5))
    assert [(str(action), start, end) for action, start, end in timeline.events[0]] == [
        ("0F0", 0.0, 2.0),
        ("0F1", 2.0, 4.0),
        ("0I0", 9.0, 12.0),
        ("0W0", 12.0, 13.0),
        ("0B1", 15.0, 19.0),
    ]
    assert [(str(action), start, end) for action, start, end in timeline.events[1]] == [
        ("1F0", 2.5, 4.5),
        ("1B0", 4.5, 8.5),
        ("1F1", 8.5, 10.5),
        ("1B1", 10.5, 14.5),
    ]
    assert timeline.makespan == 19.0
    assert timeline.work == (12.0, 12.0)
    assert timeline.ideal == 12.0
    assert timeline.bubble == 7.0
    assert timeline.bubble_fraction == pytest.approx(7 / 12)
    assert timeline.memory(0) == [(0.0, 1), (2.0, 2), (13.0, 1), (19.0, 0)]
    assert timeline.memory(1) == [(2.5, 1), (8.5, 0), (8.5, 1), (14.5, 0)]
    assert timeline.peak_inflight == (2.0, 1.0)
    assert timeline.memory(0, activation=0, weight_gradient=1) == [(9.0, 1), (13.0, 0)]
    assert timeline.memory(0, activation=(100, 7), weight_gradient=30) == [
        (0.0, 100),
        (2.0, 200),
        (9.0, 230),
        (13.0, 100),
        (19.0, 0),
    ]
    assert timeline.memory(1, activation=0, weight_gradient=1) == []
    assert timeline.peak_weight_stash == (1.0, 0.0)


def test_ideal_is_the_work_of_the_busiest_rank_when_stages_differ():
    schedule = GENERATORS["1f1b"](pipe=2, chunks=1, num_microbatches=3)
    timeline = free_running(schedule, Costs((1.0, 4.0), (1.0, 2.0), 0.0))
    assert timeline.work == (6.0, 18.0)
    assert timeline.makespan == 20.0  # 0F0, then rank 1 without a pause, then 0B2
    assert timeline.bubble == 2.0


def test_a_hop_is_paid_between_ranks_only_and_by_the_stage_that_sends():
    schedule = from_csv("0F0,1F0,1B0,0B0\n2F0,2B0\n", "t")
    timeline = free_running(schedule, Costs(1.0, 1.0, 0.0, hop=(7.0, 0.25, 0.5)))
    assert [event.start for event in timeline.events[0]] == [0.0, 1.0, 4.75, 5.75]
    assert [event.start for event in timeline.events[1]] == [2.25, 3.25]


def test_the_first_stage_embeds_and_the_last_one_scores():
    schedule = from_csv("0F0,0I0,0W0\n1F0,1B0\n", "t")
    timeline = free_running(schedule, Costs(1.0, 1.0, 1.0, embed=0.25, head=0.5, embed_backward=0.125))
    assert [(event.start, event.end) for event in timeline.events[0]] == [(0.0, 1.25), (4.75, 5.875), (5.875, 6.875)]
    assert [(event.start, event.end) for event in timeline.events[1]] == [(1.25, 2.75), (2.75, 4.75)]


def test_peaks_count_a_chunk_as_its_share_of_the_rank():
    timeline = free_running(from_csv("0F0,2F0,2B0,0B0,\n1F0,1B0\n", "t"), UNIT)
    assert timeline.memory(0) == [(0.0, 1), (2.0, 2), (5.0, 1), (9.0, 0)]
    assert timeline.peak_inflight == (1.0, 1.0)


@given(st.one_of(user_schedules(), generated_schedules()), st.data())
def test_every_action_starts_at_the_first_moment_it_can(schedule, data):
    """Checked moment by moment, with no order worked out ahead: an action runs if and only if all it needs is there."""
    costs = data.draw(stage_costs(schedule.num_stages))
    timeline = free_running(schedule, costs)
    assert [tuple(event.action for event in row) for row in timeline.events] == list(schedule.actions)
    times = costs.per_stage(schedule.num_stages)
    lasts = {Kind.F: times["forward"], Kind.I: times["backward_input"], Kind.W: times["backward_weight"]}
    for row in timeline.events:
        for (stage, kind, _), start, end in row:
            duration = lasts[Kind.I][stage] + lasts[Kind.W][stage] if kind is Kind.B else lasts[kind][stage]
            if kind is Kind.F:
                duration += costs.embed * (stage == 0) + costs.head * (stage == schedule.num_stages - 1)
            elif kind is not Kind.W:
                duration += costs.embed_backward * (stage == 0)
            assert end == start + duration
        assert all(after.start >= before.end for before, after in itertools.pairwise(row))
    events = [event for row in timeline.events for event in row]
    for rank, row in enumerate(timeline.events):
        previous_end = 0.0
        for event in row:
            arrived = {
                other.action: other.end
                + (times["hop"][other.action.stage] if schedule.placement[other.action.stage] != rank else 0.0)
                for other in events
            }
            at_start = {action for action, time in arrived.items() if time <= event.start}
            assert runnable(event.action, at_start, schedule.num_stages)
            if event.start > previous_end:
                before = {action for action, time in arrived.items() if time < event.start}
                assert not runnable(event.action, before, schedule.num_stages)
            previous_end = event.end


@given(st.one_of(user_schedules(), generated_schedules()))
def test_memory_rises_from_nothing_and_falls_back(schedule):
    timeline = free_running(schedule, UNIT)
    for rank in range(schedule.num_ranks):
        curve = timeline.memory(rank)
        times, held = zip(*curve, strict=True)
        assert list(times) == sorted(times)
        assert held[-1] == 0
        assert min(held) == 0
        for event in timeline.events[rank]:
            middle = (event.start + event.end) / 2
            inside = sum(
                started.action.kind is Kind.F and started.start <= middle < released(timeline.events[rank], started).end
                for started in timeline.events[rank]
            )
            assert [count for time, count in curve if time <= middle][-1] == inside


def released(row: tuple[Event, ...], forward: Event) -> Event:
    """The event that ends the need for the activation of `forward`."""
    stage, _, k = forward.action
    return next(e for e in row if e.action in ((stage, Kind.B, k), (stage, Kind.W, k)))


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("", Costs()),
        ("forward=2", Costs(forward=2.0)),
        ("forward=2:3", Costs(forward=(2.0, 3.0))),
        ("hop=0.1, forward=1:1:2.5", Costs(forward=(1.0, 1.0, 2.5), hop=0.1)),
        ("forward=1,backward_input=2,backward_weight=3,hop=1e-3,", Costs(1.0, 2.0, 3.0, 1e-3)),
    ],
)
def test_costs_are_read_from_text(text, costs):
    assert Costs.parse(text) == costs
    assert Costs.parse(str(costs)) == costs


def test_costs_print_all_times():
    text = "forward=1:1:2.5,backward_input=1,backward_weight=1,hop=0.1,embed=0,head=0,embed_backward=0"
    assert str(Costs(forward=(1.0, 1.0, 2.5), hop=0.1)) == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("forwards=1", "costs: there is no 'forwards'. Did you mean 'forward'?"),
        (
            "1,2,3",
            "costs: there is no '1'. "
            "Known: forward, backward_input, backward_weight, hop, embed, head, embed_backward, tick, load, store, "
            "spill, sharing.",
        ),
        ("forward:1", "costs: there is no 'forward:1'. Did you mean 'forward'?"),
        ("hop=1,hop=2", "costs: hop is given twice."),
        ("hop=1;2", "costs: 'hop=1;2' gives no time."),
        ("hop", "costs: 'hop' gives no time."),
    ],
)
def test_costs_that_cannot_be_read_are_refused_with_the_form(text, message):
    with pytest.raises(ScheduleError) as error:
        Costs.parse(text)
    assert str(error.value) == f"{message} Write forward=1,hop=0.1, or forward=1:1:2 with a time for each stage."


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (Costs(forward=(1.0, 2.0, 3.0)), "costs: forward has 3 times for 2 stages: give one for each stage"),
        (Costs(head=(1.0, 2.0)), "costs: head has 2 times: it belongs to no stage, give a single one."),
        (Costs(embed=float("inf")), "costs: embed=inf must be at least 0"),
        (Costs(hop=-0.5), "costs: hop=-0.5 must be at least 0 and at most 1e+100."),
        (Costs(backward_weight=(1.0, float("nan"))), "costs: backward_weight=(1.0, nan) must be at least 0"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs, message):
    with pytest.raises(ScheduleError) as error:
        run("1f1b", 2, 2, costs)
    assert str(error.value).startswith(message)


def test_a_schedule_that_stalls_is_refused_with_the_grid():
    with pytest.raises(ScheduleError, match="deadlock"):
        free_running(from_csv("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1", "stalled"), UNIT)


@pytest.mark.long
def test_a_large_schedule_is_simulated_exactly():
    timeline = run("interleaved_1f1b", 64, 512, UNIT, chunks=4)
    assert timeline.bubble_fraction == 63 / (4 * 512)
