"""Cuts of layers into stages against brute force in the lockstep clock."""

import itertools
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fiddlex.config import Config, DataConfig, MeshConfig, ModelConfig, PipelineConfig
from fiddlex.config.overrides import replaced
from fiddlex.planner.balance import ALIKE, MOST_TRIED, balance
from fiddlex.planner.times import MicrobatchTimes
from fiddlex.schedules.generators import GENERATORS, make_schedule
from fiddlex.schedules.lowering import lower
from fiddlex.schedules.placement import LayerPlacement
from fiddlex.schedules.resolve import resolve
from fiddlex.schedules.schedule import Schedule
from fiddlex.schedules.text import to_csv
from fiddlex.simulate.lockstep import lockstep
from fiddlex.tools.partition import Layer, Level, pipedream
from tests.schedules.strategies import sizes, user_schedules

ROUNDING = 1e-9
TIMES = st.integers(0, 20).map(lambda tenths: tenths / 10)
EQUAL = MicrobatchTimes(
    1.0, 1.0, 1.0, exchange=0.0, embed=0.1, head=0.4, embed_backward=0.1, edge_exchange=0.0, hops=(0.1,) * 16
)
COSTS = st.builds(
    lambda passes, edges, hops: EQUAL._replace(
        **dict(zip(("forward", "backward_input", "backward_weight"), passes, strict=True)),
        **dict(zip(("embed", "head", "embed_backward"), edges, strict=True)),
        hops=tuple(hops),
    ),
    st.tuples(TIMES.filter(bool), TIMES, TIMES),
    st.tuples(TIMES, TIMES, TIMES),
    st.lists(TIMES, min_size=4, max_size=4),
)
FULL = EQUAL._replace(backward_input=2.0)  # the input-gradient pass runs the forward pass again


def make_config(pipe: int, num_layers: int, **pipeline: object) -> Config:
    fields = PipelineConfig(**pipeline)  # type: ignore[arg-type]
    return Config(
        model=ModelConfig(num_layers=num_layers),
        mesh=MeshConfig(pipe=pipe),
        pipeline=fields,
        data=DataConfig(global_batch_size=fields.num_microbatches),
    ).validate()


def cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """All ways to cut layers into stages of at least one."""
    ends = itertools.combinations(range(1, num_layers), num_stages - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *inner, num_layers))) for inner in ends]


def check_fastest(config: Config, times: MicrobatchTimes) -> None:
    """No cut is faster, and none as fast has a smaller largest stage; the even cut comes first where it is as fast."""
    found, lowered = balance(config, times), resolve(config).lowered
    stage_ranks = lowered.schedule.placement
    seconds = {
        cut: lockstep(lowered, times.costs(LayerPlacement(stage_ranks, cut))).makespan
        for cut in cuts(config.model.num_layers, len(stage_ranks))
    }
    assert found.num_tried == len(seconds)
    assert found.seconds == pytest.approx(seconds[found.cut], rel=ROUNDING)
    assert found.even_seconds == pytest.approx(seconds[found.even_cut], rel=ROUNDING)
    as_fast = min(seconds.values()) * (1 + ALIKE)
    surely, maybe = ([cut for cut in seconds if seconds[cut] <= as_fast * (1 + sign * ROUNDING)] for sign in (-1, 1))
    assert found.cut in maybe
    assert min(map(max, maybe)) <= max(found.cut) <= min(map(max, surely))
    if found.even_cut in surely:
        assert found.cut == found.even_cut


@given(st.data(), st.sampled_from(sorted(GENERATORS)), COSTS)
def test_no_cut_is_faster_in_a_named_schedule(data: st.DataObject, name: str, times: MicrobatchTimes) -> None:
    size = data.draw(sizes(name, max_pipe=4, max_microbatches=9).filter(lambda s: s["pipe"] * s["chunks"] <= 8))
    pipe, chunks, m = size["pipe"], size["chunks"], size["num_microbatches"]
    layers = data.draw(st.integers(pipe * chunks, 9))
    config = make_config(pipe, layers, schedule=name, num_chunks=chunks, num_microbatches=m)
    check_fastest(config, times)


@given(schedule=user_schedules(), order=st.sampled_from(["strict", "ahead"]), more=st.integers(0, 4), times=COSTS)
def test_no_cut_is_faster_in_a_table_of_ones_own(
    tmp_path_factory: pytest.TempPathFactory, schedule: Schedule, order: str, more: int, times: MicrobatchTimes
) -> None:
    path = tmp_path_factory.mktemp("table") / "table.csv"
    path.write_text(to_csv(schedule))
    layers = max(schedule.num_stages, min(schedule.num_stages + more, 9))
    pipeline = {"schedule": f"file:{path}", "num_chunks": schedule.num_chunks, "order": order}
    config = make_config(schedule.num_ranks, layers, num_microbatches=schedule.num_microbatches, **pipeline)
    check_fastest(config, times)


@pytest.mark.parametrize(
    ("schedule", "chunks", "layers", "times", "cut"),
    [
        ("1f1b", 1, 6, EQUAL, "2,2,1,1"),  # all ranks wait for the largest stage in all ticks, whichever it is
        ("interleaved_1f1b", 2, 12, EQUAL, "2,2,2,2,1,1,1,1"),
        ("zb_h1", 1, 6, EQUAL, "1,1,2,2"),
        ("zb_h1", 1, 7, EQUAL, "1,2,2,2"),
        ("zb_h1", 1, 6, FULL, "2,1,1,2"),  # see the next test
        ("zb_v", 2, 12, EQUAL, "1,1,2,1,2,1,2,2"),
    ],
)
def test_cuts_of_four_ranks(schedule: str, chunks: int, layers: int, times: MicrobatchTimes, cut: str) -> None:
    config = make_config(4, layers, schedule=schedule, num_chunks=chunks, num_microbatches=16)
    found = balance(config, times)
    assert ",".join(map(str, found.cut)) == cut
    assert (found.seconds < 0.99 * found.even_seconds) == (found.cut != found.even_cut)


def test_zb_h1_runs_actions_of_one_kind_on_the_first_and_the_last_of_four_ranks_in_most_ticks() -> None:
    """For each other rank, the ticks in which it and rank 0 both run an action, and those in which of the same kind."""
    lowered = lower(make_schedule("zb_h1", pipe=4, num_microbatches=16))
    kinds = [
        {tick: action.kind for action, tick in zip(row, ticks, strict=True)}
        for row, ticks in zip(lowered.schedule.actions, lowered.ticks, strict=True)
    ]
    shared = [kinds[0].keys() & other.keys() for other in kinds[1:]]
    same = [
        sum(kinds[0][tick] is other[tick] for tick in ticks) for other, ticks in zip(kinds[1:], shared, strict=True)
    ]
    assert [len(ticks) for ticks in shared] == [47, 46, 45]
    assert (same[2], same[2] > max(same[:2])) == (39, True)


@pytest.mark.parametrize(("pipe", "layers"), [*itertools.product((2, 3, 4), (5, 7, 8))])
def test_the_slowest_stage_under_1f1b_is_as_fast_as_pipedreams(pipe: int, layers: int) -> None:
    """With weights that cost too much to replicate, PipeDream's partition has as many stages as ranks."""
    alone = pipedream([Layer(EQUAL.layer, 0.0, 1e9)] * layers, [Level(pipe, 1.0)])
    found = balance(make_config(pipe, layers, num_microbatches=2 * pipe), EQUAL)
    assert max(found.cut) * EQUAL.layer == pytest.approx(alone.seconds)


def test_ranks_with_different_numbers_of_stages(tmp_path: pathlib.Path) -> None:
    """The even cut gives rank 0 seven layers of ten; its stages 0 and 2 never share a tick, and stage 1 may."""
    rows = ["0F0,0F1,2F0,0F2,2B0,2F1,0B0,2B1,2F2,0B1,2B2,0B2", "1F0,1F1,1B0,1F2,1B1,1B2"]
    (tmp_path / "table.csv").write_text("\n".join(rows))
    config = make_config(
        2, 10, schedule=f"file:{tmp_path / 'table.csv'}", num_chunks=2, num_microbatches=3, order="ahead"
    )
    found = balance(config, EQUAL)
    check_fastest(config, EQUAL)
    assert found.even_cut == (4, 3, 3)
    assert found.cut == (2, 4, 4)
    assert found.seconds < found.even_seconds


@pytest.mark.parametrize("schedule", ["zb_h1", "zb_h2", "zb_v"])
@pytest.mark.parametrize("layers", [9, 12, 15, 19])
def test_a_search_that_does_not_try_all_finds_the_fastest_of_nearly_even_cuts(schedule: str, layers: int) -> None:
    chunks = 2 if schedule == "zb_v" else 1
    config = make_config(8 // chunks, layers, schedule=schedule, num_chunks=chunks, num_microbatches=16)
    found = balance(config, FULL, most_tried=300)
    lowered = resolve(config).lowered

    def seconds(cut: tuple[int, ...]) -> float:
        return lockstep(lowered, FULL.costs(LayerPlacement(lowered.schedule.placement, cut))).makespan

    least, larger = divmod(layers, 8)
    places = itertools.combinations(range(8), larger)
    fastest = min(seconds(tuple(least + (stage in place) for stage in range(8))) for place in places)
    assert found.num_tried <= 300
    assert found.seconds <= fastest * (1 + ALIKE)


def test_more_tries_are_never_worse() -> None:
    config = make_config(8, 30, schedule="zb_h1", num_microbatches=16)
    found = [balance(config, FULL, most_tried=number) for number in (1, 2, 10, 100, MOST_TRIED)]
    assert [each.num_tried for each in found] == [1, 2, 10, 100, MOST_TRIED]
    assert found[0].cut == found[0].even_cut
    assert all(later.seconds <= earlier.seconds for earlier, later in itertools.pairwise(found))
    assert found[-1].seconds < 0.99 * found[0].seconds


def test_weights_that_come_from_the_host_rule_out_larger_stages() -> None:
    """Hops that take longer than layers are worth a larger stage, but its rows would come from the host."""
    config = make_config(2, 8, schedule="breadth_first", num_chunks=3, num_microbatches=2)
    times = EQUAL._replace(hops=(4.0, 4.0), load=0.5, store=0.5)
    assert balance(config, times).cut == (1, 1, 1, 1, 1, 3)
    streamed = replaced(config, {"pipeline.weights_memory": "host", "optimizer.offload": True}).validate()

    def seconds(cut: tuple[int, ...]) -> float:
        cut_config = replaced(streamed, {"pipeline.layers_per_stage": ",".join(map(str, cut))})
        pipeline = resolve(cut_config)
        return lockstep(pipeline.lowered, times.costs(pipeline.placement), pipeline.stream).makespan

    found = balance(streamed, times)
    assert found.seconds == pytest.approx(seconds(found.cut), rel=ROUNDING)
    assert found.seconds == pytest.approx(min(seconds(cut) for cut in cuts(8, 6) if max(cut) == 2), rel=ROUNDING)
