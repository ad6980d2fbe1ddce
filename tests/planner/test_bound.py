"""The time that the search prunes by is one that no layout beats; by a longer one it would pass over the best."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.config import Config, MeshConfig, ModelConfig
from fiddlex.hardware.topology import load_topology
from fiddlex.planner.bound import Cut, least_seconds
from fiddlex.planner.closed_forms import batch_seconds
from fiddlex.planner.layouts import OBJECTIVES, Layout, Problem
from fiddlex.planner.plans import score
from fiddlex.planner.search import _Space
from fiddlex.planner.times import MicrobatchTimes
from tests.schedules.strategies import IN_A_V

ROUNDING = 1 + 1e-9
NAMES = ("1f1b", "interleaved_1f1b", "breadth_first", "zb_h1", "zb_h2", "zb_v", "v_half", "v_min", "dual_pipe_v")
PIPELINES = [(name, "sync") for name in NAMES] + [("1f1b", "2bw")]


@st.composite
def pipelines(draw):
    """A layout of the space for some number of layers, that number, times of a microbatch, and whether it spills."""
    schedule, semantics = draw(st.sampled_from(PIPELINES))
    pipe = draw(st.integers(1 if (schedule, semantics) in (("1f1b", "sync"), ("breadth_first", "sync")) else 2, 5))
    chunks = {"interleaved_1f1b": draw(st.integers(2, 3)), "breadth_first": 3, **dict.fromkeys(IN_A_V, 2)}.get(
        schedule, 1
    )
    m = draw(st.integers(pipe if semantics == "2bw" else 1, 4 * pipe))
    if schedule == "interleaved_1f1b":
        m = -(-m // pipe) * pipe
    layers = draw(st.integers(pipe * chunks, 3 * pipe * chunks))
    quarters = st.integers(0, 12).map(lambda number: number / 4)  # of a second, so that sums are exact in any order
    forward, inputs, weights, embed, head, embed_backward = draw(st.tuples(*[quarters] * 6))
    copies = draw(st.tuples(*[quarters] * 3))
    hops = draw(st.one_of(st.just((0.0,) * pipe), st.tuples(*[quarters] * pipe)))
    return (
        Layout(MeshConfig(pipe=pipe), schedule, chunks, m, semantics, "none"),
        layers,
        MicrobatchTimes(forward, inputs, weights, 0.0, embed, head, embed_backward, 0.0, hops, *copies),
        draw(st.booleans()),
    )


@settings(max_examples=400)
@given(pipelines())
def test_no_pipeline_is_faster_than_its_bound(pipeline):
    layout, layers, times, spills = pipeline
    cut = Cut.of(layout.schedule, layout.mesh.pipe, layout.chunks, layers)
    streamed = cut.placement.rows_per_chunk * (layout.schedule == "breadth_first")
    shape = layout.shape._replace(spills=spills, streamed=streamed)
    simulated = batch_seconds(shape, times.costs(cut.placement))
    assert least_seconds(shape, cut)(times) <= simulated * ROUNDING


@pytest.mark.parametrize(
    ("topology", "objective"),
    [
        pytest.param(*pair, marks=[] if pair == ("a100_80", "time") else pytest.mark.long)
        for pair in itertools.product(("a100_80", "tpu_v5e"), OBJECTIVES)
    ],
)
def test_no_layout_scores_below_what_it_is_taken_in_the_order_of(topology, objective):
    model = ModelConfig("gpt", "", 6, 256, 4, vocab_size=512, seq_len=128, dtype="bfloat16")
    config = Config(model=model)
    config.data.global_batch_size = 12
    space = _Space(Problem(config, load_topology(topology), 8, objective=objective))
    for entry in space.entries():
        plan = space.plan(entry.layout, space.memory(entry.layout))
        assert entry.least <= tuple(each * ROUNDING for each in score(objective, plan)), entry.layout


@pytest.mark.parametrize(
    ("schedule", "chunks", "seconds"), [("1f1b", 1, 66.0), ("v_half", 2, 53.0), ("v_min", 2, 59.0)]
)
def test_the_bound_of_layers_that_are_alike_is_the_time_itself(schedule, chunks, seconds):
    """So that little is looked at: without hops the bound has nothing to spare."""
    layout = Layout(MeshConfig(pipe=4), schedule, chunks, 8, "sync", "none")
    times = MicrobatchTimes(1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, (0.0,) * 4)
    cut = Cut.of(schedule, 4, chunks, 8)
    assert least_seconds(layout.shape, cut)(times) == batch_seconds(layout.shape, times.costs(cut.placement)) == seconds
