import hypothesis
import pytest
from hypothesis import strategies as st

from fiddlex.errors import ConfigError
from fiddlex.schedules.placement import PADDING, LayerPlacement, place_layers


@st.composite
def placements(draw: st.DrawFn) -> LayerPlacement:
    num_ranks = draw(st.integers(1, 5))
    more = draw(st.lists(st.integers(0, num_ranks - 1), max_size=8))
    ranks = draw(st.permutations([*range(num_ranks), *more]))
    sizes = draw(st.lists(st.integers(1, 4), min_size=len(ranks), max_size=len(ranks)))
    return LayerPlacement(tuple(ranks), tuple(sizes))


@hypothesis.given(placements())
def test_each_layer_has_a_row_on_the_rank_of_its_stage(placement: LayerPlacement) -> None:
    rows_per_rank = placement.num_chunks * placement.rows_per_chunk
    assert len(placement.layers) == placement.num_ranks * rows_per_rank
    assert sorted(layer for layer in placement.layers if layer != PADDING) == list(range(placement.num_layers))
    assert [placement.layers[row] for row in placement.rows] == list(range(placement.num_layers))
    layer = 0
    for stage, (rank, size) in enumerate(zip(placement.stage_ranks, placement.layers_per_stage, strict=True)):
        chunk = placement.chunks[rank].index(stage)
        assert placement.first_layers()[rank][chunk] == layer
        assert placement.chunk_sizes()[rank][chunk] == size
        first = rank * rows_per_rank + chunk * placement.rows_per_chunk
        assert placement.layers[first : first + size] == tuple(range(layer, layer + size))
        layer += size


@hypothesis.given(st.integers(1, 8), st.integers(1, 40))
def test_even_stages_differ_by_one_layer_at_most(num_stages: int, num_layers: int) -> None:
    hypothesis.assume(num_layers >= num_stages)
    sizes = place_layers(range(num_stages), num_layers).layers_per_stage
    assert sum(sizes) == num_layers
    assert sorted(sizes, reverse=True) == list(sizes)
    assert sizes[0] - sizes[-1] <= 1


def test_stages_as_asked() -> None:
    assert place_layers((0, 1, 1, 0), 6, " 1,2, 2,1").layers == (0, PADDING, 5, PADDING, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("", r"num_layers=6 is less than the 7 stages"),
        ("1,1,1,1,1,1,1", r"has 7 stages and 7 layers; the schedule has 7 stages, and model\.num_layers=6"),
        ("3,3", r"has 2 stages and 6 layers; the schedule has 7 stages, "),
        ("1,0,1,1,1,1,1", r"numbers of at least 1"),
        ("1;2", r"numbers of at least 1, one for each stage, as in 3,2,3"),
        ("1," + "9" * 5000, r"numbers of at least 1"),
        ("1,²,3", r"numbers of at least 1"),
        (",", r"numbers of at least 1"),
    ],
)
def test_stages_that_do_not_fit(layers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        place_layers(range(7), 6, layers)
