"""An update from host memory, leaf by leaf and row by row, against the same update of all leaves on the devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import MeshConfig, OptimizerConfig
from fiddlex.config.sections import OPTIMIZERS
from fiddlex.parallel.host_memory import HOST, host_sharding, is_on_host, map_rows
from fiddlex.train.step.optimizer import clip_by_global_norm, make_optimizer
from fiddlex.train.step.update import Apply, at_once, by_leaf
from tests.train.step.test_optimizer import BLOCKS, NUM_STEPS, Tree, assert_close, make_tree

SKIPPED = 2  # the step whose update is not made


@pytest.fixture(params=[1, 3], ids=["three rows", "a row on each of three ranks"])
def mesh(request: pytest.FixtureRequest) -> Any:
    return make_mesh(MeshConfig(data=1, pipe=request.param, tensor=1))


def shardings(tree: Tree, mesh: Any) -> Any:
    """The matrices and tables on the host, stacked weights over pipe ranks."""

    def of(path: Any, x: Any) -> NamedSharding:
        spec = P("pipe") if path[0].key == "layers" else P()
        block = functools.reduce(lambda tree, key: tree[key.key], path, BLOCKS)
        return host_sharding(mesh, spec) if block.decay else NamedSharding(mesh, spec)

    return jax.tree.map_with_path(of, tree)


def trained(apply: Apply, weights: Tree, state: Any, grads: list[Tree]) -> tuple[Tree, Any, list[bool]]:
    """The weights and the state after all steps, and whether the weights were finite after each."""

    @jax.jit
    def step(weights: Tree, state: Any, grads: Tree, good: jax.Array) -> Any:
        norm = jnp.float32(2.0)
        clip = functools.partial(clip_by_global_norm, norm=norm, clip_norm=1.0)
        applied = apply(grads, state, weights, clip, good)
        return applied.weights, applied.optimizer, applied.finite

    finite = []
    for number, each in enumerate(grads):
        weights, state, is_finite = step(weights, state, each, jnp.bool(number != SKIPPED))
        finite.append(bool(is_finite))
    return weights, state, finite


# Of the default tier: Muon's matrices, factored moments, and all others' moments as AdamW's.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name not in ("adamw", "muon", "adafactor")))
        for name in OPTIMIZERS
    ],
)
def test_an_update_from_the_host_equals_one_on_the_devices(name: str, mesh: Any) -> None:
    config = OptimizerConfig(name, learning_rate=0.1, warmup_steps=2, weight_decay=0.1, epsilon=1e-6)
    rule = functools.partial(make_optimizer, config, num_steps=NUM_STEPS)
    weights, grads = make_tree(0), [make_tree(1 + number) for number in range(NUM_STEPS)]
    optimizer = rule(blocks=BLOCKS)
    state = optimizer.init(weights)
    expected, expected_state, _ = trained(at_once(optimizer), weights, state, grads)

    where = shardings(weights, mesh)

    def place(x: Any, sharding: Any, weight: Any) -> Any:
        return jax.device_put(x, sharding) if getattr(x, "shape", None) == weight.shape else x

    placed = jax.device_put(weights, where)
    placed_state = optax.tree.map_params(
        optimizer, place, state, where, weights, is_leaf=lambda x: isinstance(x, optax.MaskedNode)
    )
    actual, actual_state, finite = trained(by_leaf(rule, BLOCKS, mesh), placed, placed_state, grads)
    assert finite == [True] * NUM_STEPS
    tolerance = 1e-7 * 3.4445**5 if name == "muon" else 1e-6  # see test_optimizer
    assert_close(actual, expected, relative=tolerance)
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * np.abs(y).max()),
        actual_state,
        expected_state,
    )
    before, after = (
        list(map(is_on_host, jax.tree.leaves(each))) for each in ((placed, placed_state), (actual, actual_state))
    )
    assert before == after
    assert sum(after) > 4  # four matrices and tables, and what the optimizer stores for each of their elements


@pytest.mark.parametrize("path", [("layers", "up"), ("layers", "gain"), ("embedding", "tokens")])
def test_an_update_from_the_host_finds_a_weight_that_is_not_finite(path: tuple[str, str], mesh: Any) -> None:
    rule = functools.partial(make_optimizer, OptimizerConfig("sgd", momentum=0.0), num_steps=NUM_STEPS)
    weights, grads = make_tree(0), make_tree(1)
    part, name = path
    grads[part][name].reshape(-1)[-1] = np.inf
    weights = jax.device_put(weights, shardings(weights, mesh))
    *_, finite = trained(by_leaf(rule, BLOCKS, mesh), weights, rule(blocks=BLOCKS).init(weights), [grads])
    assert finite == [False]


@pytest.mark.parametrize("on_host", [False, True])
def test_rows_pass_in_order_and_stay_where_they_are(on_host: bool) -> None:
    mesh = make_mesh(MeshConfig(data=1, pipe=2, tensor=1))
    sharding = host_sharding(mesh, P("pipe")) if on_host else NamedSharding(mesh, P("pipe"))
    x = jax.device_put(np.arange(8, dtype=np.float32).reshape(8, 1), sharding)

    @jax.jit
    def run(x: jax.Array) -> Any:
        # The sum of all rows of a rank so far, of the first rank and of the second.
        return map_rows(
            lambda row, given, total: (total + row + given, total + row), x, x, jnp.zeros((2, 1)), mesh=mesh
        )

    sums, total = run(x)
    rows = np.arange(8).reshape(2, 4)
    np.testing.assert_array_equal(np.asarray(sums).reshape(2, 4), np.cumsum(rows, axis=1) + rows)
    np.testing.assert_array_equal(np.asarray(total)[:, 0], rows.sum(axis=1))
    assert sums.sharding.memory_kind == (HOST if on_host else "device")
