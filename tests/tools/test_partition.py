"""The partitioner against brute force."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.errors import ConfigError
from fiddlex.tools.partition import Layer, Level, ReplicatedStage, pipedream

TIMES = st.integers(1, 20).map(float)
LAYERS = st.lists(
    st.builds(Layer, TIMES, st.integers(0, 30).map(float), st.integers(0, 30).map(float)), max_size=5, min_size=1
)


def cuts(number, parts):
    """All ways to cut a run of layers into consecutive parts."""
    for inner in itertools.combinations(range(1, number), parts - 1):
        yield list(itertools.pairwise((0, *inner, number)))


def compositions(total, parts):
    """All ways to write `total` as a sum of so many numbers of at least 1."""
    for inner in itertools.combinations(range(1, total), parts - 1):
        yield [b - a for a, b in itertools.pairwise((0, *inner, total))]


def slowest(layers, levels):
    """The best time over all pipelines on a level, each part of which is any pipeline on the levels below."""
    if not levels:
        return sum(layer.seconds for layer in layers)
    *inner, (size, bandwidth) = levels
    best = float("inf")
    for parts in range(1, min(len(layers), size) + 1):
        for cut, replicas in itertools.product(cuts(len(layers), parts), compositions(size, parts)):
            times = [2 * layers[end - 1].activation_bytes / bandwidth for _, end in cut[:-1]]
            for (start, end), number in zip(cut, replicas, strict=True):
                part = layers[start:end]
                shared = 2 * (number - 1) * sum(layer.weight_bytes for layer in part) / bandwidth
                times.append(max(slowest(part, inner), shared) / number)
            best = min(best, max(times))
    return best


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.lists(st.builds(Level, st.integers(1, 3), st.integers(1, 10).map(float)), min_size=1, max_size=2))
def test_pipedreams_partition_is_the_best_of_all(layers, levels):
    found = pipedream(layers, levels)
    assert found.seconds == pytest.approx(slowest(layers, levels))
    assert [layer for stage in found.stages for layer in range(stage.first, stage.last + 1)] == list(range(len(layers)))
    assert sum(stage.replicas for stage in found.stages) == levels[-1].size


@settings(max_examples=60, deadline=None)
@given(LAYERS, st.lists(st.builds(Level, st.integers(1, 3), st.integers(1, 10).map(float)), min_size=1, max_size=3))
def test_the_pipelines_within_groups_are_those_of_the_whole_time(layers, levels):
    """The stages within stages, put together by the paper's formulas, take no more than the partition says."""
    found = pipedream(layers, levels)
    assert nested(layers, levels, found.stages, 0, len(layers) - 1) == pytest.approx(found.seconds)
    devices = found.of_devices
    assert sum(stage.replicas for stage in devices) == math.prod(level.size for level in levels)
    assert [n for stage in devices for n in range(stage.first, stage.last + 1)] == list(range(len(layers)))


def nested(layers, levels, stages, first, last):
    """Seconds of a pipeline of layers `first` to `last` whose stages have pipelines within them."""
    if not levels:
        return sum(layer.seconds for layer in layers[first : last + 1])
    *inner, (size, bandwidth) = levels
    assert sum(stage.replicas for stage in stages) == size
    times = [2 * layers[stage.last].activation_bytes / bandwidth for stage in stages[:-1]]
    for stage in stages:
        own = layers[stage.first : stage.last + 1]
        shared = 2 * (stage.replicas - 1) * sum(layer.weight_bytes for layer in own) / bandwidth
        within = nested(layers, inner, stage.inner, stage.first, stage.last)
        times.append(max(within, shared) / stage.replicas)
    return max(times)


def published(layers, size, bandwidth):
    """The best time and stages by the formulas of msr-fiddle/pipedream's optimizer, on one level.

    It adds passes and exchange, counts 4(r - 1)/r bytes for each byte of weights, and ignores links between stages.
    """
    best = float("inf"), ()
    for parts in range(1, min(len(layers), size) + 1):
        for cut, replicas in itertools.product(cuts(len(layers), parts), compositions(size, parts)):
            times = []
            for (start, end), number in zip(cut, replicas, strict=True):
                passes = sum(layer.seconds for layer in layers[start:end])
                weights = sum(layer.weight_bytes for layer in layers[start:end])
                times.append((passes + 4 * (number - 1) / number * weights / bandwidth) / number)
            best = min(best, (max(times), tuple(replicas)))
    return best


@pytest.mark.parametrize(
    ("layers", "paper", "code"),
    [
        # One stage on both devices: the paper has max(8, 2 · 6)/2, the code (8 + 4/2 · 6)/2.
        ([Layer(8.0, 0.0, 6.0)], (6.0, (2,)), (10.0, (2,))),
        # Two layers: max(8, 2 · 3)/2, as two stages take. The code has (8 + 2 · 3)/2, and so prefers two stages.
        ([Layer(4.0, 0.0, 1.5)] * 2, (4.0, (2,)), (4.0, (1, 1))),
        ([Layer(4.0, 0.0, 1.5), Layer(3.0, 0.0, 1.5)], (3.5, (2,)), (4.0, (1, 1))),
        # A slow link between two stages counts in the paper alone.
        ([Layer(4.0, 9.0, 3.0), Layer(4.0, 0.0, 3.0)], (6.0, (2,)), (4.0, (1, 1))),
    ],
)
def test_the_paper_is_meant_where_the_published_code_departs(layers, paper, code):
    found = pipedream(layers, [Level(2, 1.0)])
    assert (found.seconds, tuple(stage.replicas for stage in found.stages)) == paper
    assert published(layers, 2, 1.0) == code


def test_a_light_stage_with_heavy_weights_is_not_replicated():
    """The shape of the paper's VGG-16: convolutions on all devices but one, the weights of the rest on that one."""
    layers = [Layer(10.0, 1.0, 0.1)] * 6 + [Layer(2.0, 1.0, 5000.0)] * 2
    assert pipedream(layers, [Level(16, 1e3)]).stages == (ReplicatedStage(0, 5, 15), ReplicatedStage(6, 7, 1))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pipedream([], [Level(1, 1.0)]), "0 layers and 1 levels: a partition needs at least one of each."),
        (lambda: pipedream([Layer(1, 1, 1)], [Level(0, 1.0)]), "levels [0]: each must have at least one group."),
        (
            lambda: pipedream([Layer(1, math.nan, 1)], [Level(1, 1.0)]),
            "layer 0 has Layer(seconds=1, activation_bytes=nan",
        ),
        (
            lambda: pipedream([Layer(1, 1, -1)], [Level(1, 1.0)]),
            "layer 0 has Layer(seconds=1, activation_bytes=1, weigh",
        ),
        (lambda: pipedream([Layer(1, 1, 1)], [Level(1, 0.0)]), "Level(size=1, bandwidth=0.0): a bandwidth must be"),
        (
            lambda: pipedream([Layer(1, 1, 1)] * 128, [Level(8, 1.0), Level(8192, 1.0)]),
            "128 layers on 8,192 devices or groups of them: PipeDream's partitioner would compare 1e+12 pipelines, and",
        ),
        (lambda: pipedream([Layer(1, 1, 1)] * 128, [Level(512, 1.0), Level(1, 1.0)]), "128 layers on 512 devices or"),
    ],
)
def test_what_cannot_be_cut_is_refused(call, message):
    with pytest.raises(ConfigError) as error:
        call()
    assert str(error.value).startswith(message)
