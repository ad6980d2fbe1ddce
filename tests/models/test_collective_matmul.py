"""Products in rings and in blocks against products of the whole sequence, computed by numpy in float64."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig
from fiddlex.hardware import pieces
from fiddlex.models.blocks import Blocks
from fiddlex.models.collective_matmul import Gathered, Scattered
from fiddlex.models.exchange import Exchange
from fiddlex.models.products import given, products
from fiddlex.models.rings import Rings

B, H, N, D = 2, 8, 4, 6  # examples, hidden size, heads, head size
Arrays = list[np.ndarray]


def both(exchange: Exchange) -> Callable[..., tuple[jax.Array, ...]]:
    """A column-parallel and a row-parallel product after it; the second reads one of the first's two outputs."""

    def both_products(x: jax.Array, qk: jax.Array, up: jax.Array, out: jax.Array) -> tuple[jax.Array, ...]:
        qk_BS2ND, up_BSF = products(given(x), (qk, up), Gathered(exchange))
        return *products(given(qk_BS2ND[:, :, 1]), (out,), Scattered(exchange)), up_BSF

    return both_products


def test_caches_keep_the_two_rules_apart() -> None:
    assert len({Gathered(Blocks()), Scattered(Blocks()), Gathered(Blocks())}) == 2


def expected(x: np.ndarray, weights: Arrays, gradients: Arrays) -> Arrays:
    """What `both` gives, and the gradients of its arguments from those of its values."""
    qk, up, out = weights
    dy, dup = gradients
    queries = np.einsum("bsh,hnd->bsnd", x, qk[:, 1])
    dqueries = np.einsum("bsh,ndh->bsnd", dy, out)
    dx = np.einsum("bsnd,hnd->bsh", dqueries, qk[:, 1]) + np.einsum("bsf,hf->bsh", dup, up)
    dqk = np.zeros_like(qk)
    dqk[:, 1] = np.einsum("bsh,bsnd->hnd", x, dqueries)
    y = np.einsum("bsnd,ndh->bsh", queries, out)
    return [y, x @ up, dx, dqk, np.einsum("bsh,bsf->hf", x, dup), np.einsum("bsnd,bsh->ndh", queries, dy)]


@pytest.mark.parametrize(
    ("tensor", "part", "least_rows", "exchange"),
    [
        pytest.param(4, 6, 1, Rings(permutes=False), id="both ways"),
        pytest.param(4, 6, 1, Rings(permutes=True), id="both ways, permutes"),
        pytest.param(4, 3, 1, Rings(permutes=False), id="parts of odd length"),
        pytest.param(4, 6, B * 3 + 1, Rings(permutes=True), id="one way"),
        pytest.param(2, 4, 1, Rings(permutes=False), id="two ranks"),
        pytest.param(2, 3, 1, Rings(permutes=True), id="two ranks, parts of odd length"),
        pytest.param(4, 6, 1, Blocks(), id="six blocks"),
        pytest.param(2, 9, 2 * B * 2, Blocks(), id="three blocks"),
        pytest.param(4, 7, 4 * B * 2, Blocks(), id="one block"),
    ],
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-6)])
def test_products_in_pieces_are_those_of_the_whole_sequence(
    tensor: int,
    part: int,
    least_rows: int,
    exchange: Exchange,
    dtype: jnp.dtype,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "LEAST_ROWS", least_rows)
    random = np.random.default_rng(tensor * part)
    shapes = [
        (B, tensor * part, H),
        (H, 2, N, D),
        (H, 4 * N),
        (N, D, H),
        (B, tensor * part, H),
        (B, tensor * part, 4 * N),
    ]
    x, qk, up, out, dy, dup = (np.asarray(random.normal(size=shape), dtype) for shape in shapes)
    specs = (P(None, "tensor"), P(None, None, "tensor"), P(None, "tensor"), P("tensor"))
    results = (P(None, "tensor"), P(None, None, "tensor"))

    def passes(x: jax.Array, qk: jax.Array, up: jax.Array, out: jax.Array, g: tuple[jax.Array, ...]) -> tuple:
        values, backward = jax.vjp(both(exchange), x, qk, up, out)
        return (*values, *backward(g))

    mapped = jax.shard_map(
        passes, mesh=make_mesh(MeshConfig(tensor=tensor)), in_specs=(*specs, results), out_specs=(*results, *specs)
    )
    found = jax.jit(mapped)(x, qk, up, out, (dy, dup))
    wanted = expected(x.astype(float), [w.astype(float) for w in (qk, up, out)], [dy.astype(float), dup.astype(float)])
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(np.asarray(one, float), other, atol=tolerance * np.abs(other).max(), rtol=0)
