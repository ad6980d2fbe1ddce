"""Piper's partitioner against brute force."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fiddlex.errors import ConfigError, DeviceError
from fiddlex.tools.unequal_stages import choices as choices_module
from fiddlex.tools.unequal_stages.chain import Chain, Choice, Part, ShardedLayer, StageProblem
from fiddlex.tools.unequal_stages.choices import EMPTY, Frontiers, extended
from fiddlex.tools.unequal_stages.piper import Piper
from tests.tools.test_partition import cuts

SECONDS, BYTES = st.integers(1, 12).map(float), st.integers(0, 12).map(float)
CHOICES = st.lists(st.builds(Choice, SECONDS, BYTES), min_size=1, max_size=2).map(tuple)
LAYER = st.builds(ShardedLayer, CHOICES, BYTES, BYTES, BYTES, BYTES)


@st.composite
def problems(draw):
    count, sizes = draw(st.integers(1, 4)), draw(st.sampled_from([(1,), (1, 2), (2, 3)]))
    layers = st.lists(LAYER, min_size=count, max_size=count).map(tuple)
    chains = {size: Chain(draw(layers), draw(BYTES)) for size in sizes}
    memory, bandwidth = draw(st.integers(5, 150).map(float)), draw(st.integers(1, 5).map(float))
    return StageProblem(
        chains, draw(st.integers(max(sizes), 6)), memory, bandwidth, draw(st.sampled_from([1, 2, 4, 6]))
    )


def stage_times(problem, part, in_flight):
    """Seconds of a stage for each choice of its layers that is within the memory, by the paper's formulas."""
    chain, d, batch = problem.chains[part.tensor], part.replicas, problem.num_microbatches
    own = chain.layers[part.first : part.last + 1]
    sent = chain.layers[part.first - 1].output_bytes if part.first else 0
    sent += chain.layers[part.last].output_bytes if part.last + 1 < len(chain.layers) else 0
    for picked in itertools.product(*(layer.choices for layer in own)):
        memory = chain.working_bytes + sum(layer.kept_bytes + layer.divided_bytes / d for layer in own)
        if memory + in_flight * sum(choice.stash_bytes for choice in picked) <= problem.memory_bytes:
            summed = 4 * (d - 1) * sum(layer.weight_bytes for layer in own) / (d * batch * problem.bandwidth)
            passes = sum(choice.seconds for choice in picked) / d
            yield passes + 2 * sent / (d * problem.bandwidth) + summed


def pipelines(problem, *, equal=False):
    """Seconds and devices of all pipelines within the memory."""
    d_t = [
        (d, t)
        for d in range(1, problem.num_devices + 1)
        for t in problem.chains
        if d * t <= problem.num_devices and problem.num_microbatches % d == 0
    ]
    for count in range(1, problem.num_layers + 1):
        for cut, sizes in itertools.product(cuts(problem.num_layers, count), itertools.product(d_t, repeat=count)):
            replicas, devices = sum(d for d, _ in sizes), sum(d * t for d, t in sizes)
            if devices > problem.num_devices or replicas > problem.num_microbatches or (equal and len(set(sizes)) > 1):
                continue
            slowest = 0.0
            for place, ((start, end), (d, t)) in enumerate(zip(cut, sizes, strict=True)):
                in_flight = math.ceil(sum(d for d, _ in sizes[place:]) / d)
                slowest = max(
                    slowest, min(stage_times(problem, Part(start, end - 1, d, t), in_flight), default=math.inf)
                )
            yield slowest, devices


def a_chain(*layers):
    """Layers with these seconds, output bytes and weight bytes."""
    made = (ShardedLayer((Choice(seconds, 0.0, ""),), *sizes, 0.0, 0.0) for seconds, *sizes in layers)
    return Chain(tuple(made), 0.0)


# Two replicas of two devices take as long as one of three.
TIE = StageProblem(
    {
        2: a_chain((7.0, 6.0, 6.0), (6.0, 5.0, 12.0), (6.0, 0.0, 2.0)),
        3: a_chain((3.0, 0.0, 0.0), (12.0, 0.0, 0.0), (1.0, 0.0, 0.0)),
    },
    num_devices=4,
    memory_bytes=5.0,
    bandwidth=3.0,
    num_microbatches=2,
)


@settings(deadline=None)
@example(TIE, True)
@given(problems(), st.booleans())
def test_no_pipeline_within_the_memory_is_faster(problem, equal):
    best = min((each for each in pipelines(problem, equal=equal) if each[0] < math.inf), default=None)
    piper = Piper(problem)
    if best is None and equal:
        assert piper.fastest_equal() is None
    elif best is None:
        with pytest.raises(DeviceError, match="the smallest need is"):
            piper.fastest()
    else:
        found = piper.fastest_equal() if equal else piper.fastest()
        assert found.seconds == pytest.approx(best[0])
        fewest = min(devices for seconds, devices in pipelines(problem, equal=equal) if seconds <= best[0] * (1 + 1e-8))
        assert found.num_devices == fewest
        assert found.memory_bytes <= problem.memory_bytes * (1 + 1e-12)
        assert [n for stage in found.stages for n in range(stage.first, stage.last + 1)] == list(
            range(problem.num_layers)
        )
        for stage, rest in zip(found.stages, range(len(found.stages)), strict=True):
            assert stage.in_flight == math.ceil(sum(each.replicas for each in found.stages[rest:]) / stage.replicas)
        if not equal:
            assert piper.fastest(below=found.seconds) is None


@settings(deadline=None)
@given(problems())
def test_the_least_memory_is_what_a_pipeline_needs(problem):
    """With 0.2% less there is none; with that much there is one."""

    def with_memory(memory):
        return Piper(
            StageProblem(problem.chains, problem.num_devices, memory, problem.bandwidth, problem.num_microbatches)
        )

    least = Piper(problem).least_memory()
    if least > 0:
        assert with_memory(least).fastest()
    if least > 1:  # bytes are rounded up
        with pytest.raises(DeviceError):
            with_memory(least * 0.998 - 1 + 1e-9).fastest()


@settings(deadline=None)
@given(st.lists(LAYER, min_size=1, max_size=6), st.integers(0, 60))
def test_the_choices_of_a_stage_are_the_fastest_within_the_bytes(layers, room):
    sums = [
        (sum(choice.seconds for choice in picked), sum(choice.stash_bytes for choice in picked))
        for picked in itertools.product(*(layer.choices for layer in layers))
    ]
    within = [seconds for seconds, stash in sums if stash <= room]
    found = Frontiers(layers).fastest(0, len(layers) - 1, in_flight=1, room=room)
    assert all(choice in layer.choices for choice, layer in zip(found, layers, strict=True))
    if within:
        assert sum(choice.stash_bytes for choice in found) <= room
        assert sum(choice.seconds for choice in found) == min(within)
    else:
        assert sum(choice.stash_bytes for choice in found) == min(stash for _, stash in sums)


def test_a_frontier_that_is_too_long_keeps_its_ends_and_sums_that_exist(monkeypatch):
    monkeypatch.setattr(choices_module, "POINTS", 8)
    frontier = whole = EMPTY
    for number in range(8):
        layer = Choice(1.0, 2.0**number), Choice(1.0 + 2.0**-number, 0.0)
        frontier = extended(frontier, layer)
        monkeypatch.setattr(choices_module, "POINTS", 10**6)
        whole = extended(whole, layer)
        monkeypatch.setattr(choices_module, "POINTS", 8)
    assert len(whole.seconds) > 8 >= len(frontier.seconds) > 3
    assert set(zip(frontier.seconds, frontier.stash, strict=True)) <= set(zip(whole.seconds, whole.stash, strict=True))
    assert frontier.stash[-1] == whole.stash[-1] == 0


LAYERS = (ShardedLayer((Choice(1.0, 10.0, "none"), Choice(1.5, 1.0, "full")), 0.0, 0.0, 5.0),) * 4


def alone(memory, *, devices=2, batch=8, layers=LAYERS):
    return Piper(StageProblem({1: Chain(layers)}, devices, memory, 1.0, batch))


def test_a_stage_keeps_a_microbatch_for_every_later_stage_and_recomputes_for_it():
    """Two stages of two layers: 10 + 2 · 20 bytes on the first, 10 + 20 on the second. On 40 one layer recomputes."""
    roomy, tight = (alone(memory).pipeline_of([Part(0, 1, 1, 1), Part(2, 3, 1, 1)]) for memory in (50.0, 40.0))
    assert [(stage.in_flight, stage.memory_bytes) for stage in roomy.stages] == [(2, 50.0), (1, 30.0)]
    assert [[each.recompute for each in stage.choices].count("full") for stage in tight.stages] == [1, 0]
    assert tight.seconds == 2.5


def test_the_cap_on_memory_counts_what_is_in_flight():
    """Two stages of two layers need 10 + 2 · 20 bytes on the first; of one and three 5 + 2 · 10, and 15 + 30."""
    layers = tuple(layer._replace(choices=layer.choices[:1]) for layer in LAYERS)
    assert [alone(memory, layers=layers).fastest().seconds for memory in (50.0, 49.0, 45.0)] == [2.0, 3.0, 3.0]


def test_the_sum_of_gradients_is_spread_over_the_microbatches():
    heavy = tuple(layer._replace(weight_bytes=8.0) for layer in LAYERS)
    whole = {
        batch: alone(1000.0, batch=batch, layers=heavy).pipeline_of([Part(0, 3, 2, 1)]).seconds for batch in (2, 4)
    }
    assert whole == {2: 4 / 2 + 4 / 2 * 32 / 2, 4: 4 / 2 + 4 / 2 * 32 / 4}


def test_devices_are_left_unused_where_none_helps():
    found = alone(1000.0, devices=50, batch=1).fastest()
    assert (found.num_devices, found.seconds) == (1, 4.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chains": {1: Chain(())}}, "numbers of layers by tensor size are {1: 0}"),
        ({"chains": {1: Chain(LAYERS), 2: Chain(LAYERS[:3])}}, "numbers of layers by tensor size are {1: 4, 2: 3}"),
        ({"chains": {4: Chain(LAYERS)}}, "2 devices for tensor sizes 4"),
        ({"num_microbatches": 0}, "0 microbatches in a batch"),
        ({"bandwidth": 0.0}, "bandwidth 0.0 bytes/s, memory 9.0 bytes: both must"),
        ({"memory_bytes": math.nan}, "bandwidth 1.0 bytes/s, memory nan bytes: both must"),
        ({"chains": {1: Chain(LAYERS, -1.0)}}, "working_bytes at tensor size 1: -1.0 must be at least 0 and finite"),
        ({"chains": {1: Chain((LAYERS[0]._replace(choices=()),))}}, "layer 0 at tensor size 1 has no choice"),
        ({"chains": {1: Chain((LAYERS[0]._replace(weight_bytes=math.inf),))}}, "layer 0 at tensor size 1: 0.0, inf"),
        (
            {"chains": {1: Chain((LAYERS[0]._replace(choices=(Choice(math.nan, 0.0, "full"),)),))}},
            "layer 0 at tensor size 1 with recompute=full: nan, 0.0",
        ),
    ],
)
def test_what_is_no_problem_is_refused(changes, message):
    fields = {
        "chains": {1: Chain(LAYERS)},
        "num_devices": 2,
        "memory_bytes": 9.0,
        "bandwidth": 1.0,
        "num_microbatches": 4,
    }
    with pytest.raises(ConfigError) as error:
        Piper(StageProblem(**(fields | changes)))
    assert str(error.value).startswith(message)


def test_what_a_cap_would_have_to_be_is_told():
    """On two devices the least is a stage of one layer and one of three: 5 + 2 · 1 and 15 + 3 bytes, or two of two."""
    with pytest.raises(DeviceError) as error:
        alone(11.0).fastest()
    assert str(error.value).startswith("No pipeline of stages on 2 devices fits")
