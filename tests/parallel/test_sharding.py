import hypothesis
import pytest
from hypothesis import strategies as st
from jax import P

from fiddlex.config import Config, MeshConfig
from fiddlex.models.registry import make_model
from fiddlex.parallel.sharding import compute_spec, mesh_axes_of, whole_rows_spec, zero_dimension, zero_spec
from fiddlex.train.step.state import make_layout


def test_table_maps_logical_axes() -> None:
    assert compute_spec(("layers", "hidden", None, "heads", None)) == P(("pipe",), None, None, ("tensor",), None)
    assert compute_spec(("vocab", "hidden")) == P(("pipe", "tensor"), None)
    with pytest.raises(KeyError):
        compute_spec(("hiden",))


@hypothesis.given(
    st.lists(st.integers(1, 12), min_size=1, max_size=4),
    st.sampled_from([1, 2, 3, 4, 8]),
    st.sampled_from([1, 2, 4]),
    st.booleans(),
)
def test_zero_spec_adds_data_once_where_it_divides(sizes: list[int], data: int, tensor: int, shard_first: bool) -> None:
    shape = [sizes[0] * tensor, *sizes[1:]]
    spec = P("tensor" if shard_first else None, *[None] * (len(shape) - 1))
    zero = zero_spec(spec, shape, MeshConfig(data=data, tensor=tensor))
    local = [size // tensor if shard_first and i == 0 else size for i, size in enumerate(shape)]
    chosen = zero_dimension(zero)
    if data == 1 or not any(size % data == 0 for size in local):
        assert zero == spec
    else:
        assert chosen is not None
        assert local[chosen] % data == 0
        assert local[chosen] == max(size for size in local if size % data == 0)
        assert mesh_axes_of(zero) == mesh_axes_of(spec) | {"data"}


def test_rows_are_made_whole_and_their_axes_go_where_they_divide() -> None:
    sizes = {"data": 2, "pipe": 4, "tensor": 3}
    spec = P(("pipe",), None, ("tensor",))
    assert whole_rows_spec(spec, (7, 8, 12), sizes) == P(None, ("pipe",), ("tensor",))
    assert whole_rows_spec(spec, (7, 2, 24), sizes) == P(None, None, ("tensor", "pipe"))
    assert whole_rows_spec(spec, (7, 2, 9), sizes) == P(None, None, ("tensor",))
    assert whole_rows_spec(P(("pipe", "data"), None), (7, 16), sizes) == P(None, ("pipe", "data"))
    assert whole_rows_spec(P(None, "data"), (7, 16), sizes) == P(None, "data")
    assert whole_rows_spec(P(), (7,), sizes) == P()


def test_zero_shards_every_matrix_of_a_real_model() -> None:
    config = Config(mesh=MeshConfig(data=4, tensor=2))
    layout = make_layout(make_model(config), config)
    for part in ("layers", "embedding"):
        for spec in _leaves(layout.master[part]):
            assert "data" in mesh_axes_of(spec)


def _leaves(tree: object) -> list[P]:
    return [tree] if isinstance(tree, P) else [leaf for child in tree.values() for leaf in _leaves(child)]  # type: ignore[attr-defined]
