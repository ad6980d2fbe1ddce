"""Traces that tensor ranks share: values and gradients are those of one device, and little is exchanged."""

import functools
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from fiddlex.config import ModelConfig
from fiddlex.flax.alone import Trace, alone
from fiddlex.flax.operations import SUM, Cut, Place
from fiddlex.flax.partition import choose, of_gradient, plan
from tests.flax import modules

Tree = Any
RANKS = 4
X = (2, 8, 16)


def mlp(w: Tree, x: jax.Array) -> jax.Array:
    return nnx.gelu(x @ w["up"] + w["bias"], approximate=False) @ w["down"]


def gated(w: Tree, x: jax.Array) -> jax.Array:
    """A fused projection, split along the dimension that ranks share: they gather it unless it is cut in two pieces."""
    gate, value = jnp.split(x @ w["up"], 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ w["down"]


def attention(w: Tree, x: jax.Array) -> jax.Array:
    """One projection, of which slices are queries, keys and values."""
    y = x @ w["qkv"] + w["bias"]
    q, k, v = (y[..., 32 * i : 32 * (i + 1)].reshape(2, 8, 8, 4) for i in range(3))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 8, 32) @ w["out"]


def reordered(w: Tree, x: jax.Array) -> jax.Array:
    """The same, with a dimension for queries, keys and values."""
    q, k, v = jnp.moveaxis((x @ w["qkv"] + w["bias"]).reshape(2, 8, 3, 8, 4), 2, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(2, 8, 32) @ w["out"]


def heads(w: Tree, x: jax.Array) -> jax.Array:
    """Attention with fewer heads of keys than of queries, and a mask."""
    q, k, v = ((x @ w[name]).reshape(2, 8, -1, 4) for name in ("q", "k", "v"))
    k, v = (jnp.repeat(each, q.shape[2] // k.shape[2], axis=2) for each in (k, v))
    scores = jnp.einsum("bqnd,bknd->bnqk", q, k) + jnp.where(jnp.tri(8), 0.0, -1e9)
    y = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), v)
    return y.reshape(2, 8, -1) @ w["out"]


def scanned(w: Tree, x: jax.Array) -> jax.Array:
    """A recurrence whose state starts from zeros, in parts of its features."""

    def step(state: tuple[jax.Array, jax.Array], y: jax.Array) -> Any:
        state = 0.5 * state[0] + y, state[1] + jnp.sum(y, axis=-1)
        return state, state[0] * state[1][:, None]

    y = jnp.swapaxes(x @ w["up"], 0, 1)
    _, y = jax.lax.scan(step, (jnp.zeros(y.shape[1:]), jnp.zeros(y.shape[1])), y)
    return jnp.swapaxes(y, 0, 1) @ w["down"]


def reshaped(w: Tree, x: jax.Array) -> jax.Array:
    """Pieces, reversals, sums, padding and comparisons of parts, also along what is cut."""
    y = jnp.pad(x @ w["up"], ((0, 0), (1, 0), (0, 0)))[:, :-1]
    y = jnp.concatenate([y[:, ::-1], jnp.cumsum(y, axis=1)], axis=1)[:, 4:12]
    y = jnp.pad(y[..., 1:], ((0, 0), (0, 0), (0, 1))) + jnp.cumsum(y[..., ::-1], axis=-1) / 8
    y = jnp.where(y > jnp.max(y, axis=(0, 1), keepdims=True) / 2, y, y.mean(-1, keepdims=True))
    y = y - jax.lax.stop_gradient(jnp.sort(y, axis=1)) + jnp.argmax(y, axis=-1, keepdims=True)
    return jax.lax.dynamic_slice_in_dim(jnp.tile(y, (1, 2, 1)), jnp.int32(3), 8, 1) @ w["down"]


def counted(w: Tree, x: jax.Array) -> jax.Array:
    """Sums of integers, which are terms too, in other shapes and orders."""
    y = x @ w["up"]
    some = jnp.sum((y > 0).astype(jnp.int32), axis=-1)
    total = jnp.sum(some, axis=0)[None, :, None] + some[..., None] + some.T.reshape(2, 8)[..., None]
    barred, rest = lax.optimization_barrier((y, jnp.sum(y, axis=-1, keepdims=True)))
    return (barred * total / (1 + some[..., None]) + rest * jnp.where(some > 3, 1.0, 0.5)[..., None]) @ w["down"]


def branching(w: Tree, x: jax.Array) -> jax.Array:
    """Inner functions whose operands the ranks gather first."""
    y = x @ w["up"]
    y = jax.lax.cond(jnp.sum(y) > 0, jnp.sin, jnp.cos, y)
    y = (
        jax.lax.fori_loop(0, 2, lambda _, y: jnp.tanh(y), y)
        if w["up"].dtype == jnp.int32
        else jax.checkpoint(jnp.tanh)(y)
    )
    return y @ w["down"]


def in_chunks(w: Tree, x: jax.Array) -> jax.Array:
    """A recurrence from zeros whose steps are computed again in the backward pass, four at a time."""

    def step(state: jax.Array, y: jax.Array) -> Any:
        state = jnp.tanh(0.9 * state + y)
        return state, state

    y = jnp.swapaxes(x @ w["up"], 0, 1)
    chunk = jax.checkpoint(lambda state, ys: lax.scan(step, state, ys))
    _, ys = lax.scan(chunk, jnp.zeros(y.shape[1:]), y.reshape(2, 4, *y.shape[1:]))
    return jnp.swapaxes(ys.reshape(y.shape), 0, 1) @ w["down"]


@jax.checkpoint
def reporting(w: Tree, x: jax.Array) -> jax.Array:
    """Operations that make nothing: a report, and in the backward pass the branches that save nothing."""
    y = x @ w["up"]
    jax.debug.callback(lambda mean: None, y.mean())
    return lax.cond(jnp.abs(y).mean() > 0.1, lambda y: y / 2, lambda y: y, y) @ w["down"]


def solved(w: Tree, x: jax.Array) -> jax.Array:
    """A linear system, which a loop solves."""
    a = 2 * jnp.eye(8) + 0.1 * jnp.tri(8) @ jnp.tri(8).T
    y, _ = jax.scipy.sparse.linalg.cg(lambda y: jnp.einsum("st,btf->bsf", a, y), x @ w["up"])
    return y @ w["down"]


def smoothed(w: Tree, x: jax.Array) -> jax.Array:
    """A fused projection, smoothed along the positions before it is split; such scans make arrays without elements."""
    y = lax.cummax(x @ w["up"], axis=1)
    _, y = lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (jnp.full_like(y, 0.9), y), axis=1)
    gate, value = jnp.split(y, 2, axis=-1)
    return (jax.nn.silu(gate) * value) @ w["down"]


def looked_up(w: Tree, x: jax.Array) -> jax.Array:
    """Rows of a table by numbers, also beyond it, and by a product, and the softmax of the scores of all rows."""
    ids = jnp.abs(10 * x[..., 0]).astype(jnp.int32) % 32
    y = (
        x
        + jnp.take(w["table"], ids, axis=0)
        + jax.nn.one_hot(31 - ids, 32) @ w["table"]
        + w["table"].astype(x.dtype)[ids]
        + w["table"][ids + 4]
        + w["table"].at[ids + 16].get(mode="clip")
        + w["table"].at[ids + 8].get(mode="fill", fill_value=0.5)
        + jnp.nan_to_num(jnp.take(w["table"], ids + 12, axis=0), nan=0.25)
    )
    return y * jax.nn.softmax(y @ w["table"].T + w["bias"])[..., :16]


def joined(w: Tree, x: jax.Array) -> jax.Array:
    """Terms that are added to whole arrays, in both orders, before anything needs the sums."""
    y = x - x @ w["up"] @ w["down"]
    return jnp.sin(x) * (2.0 + (y - x @ w["up"] @ w["down"])).astype(jnp.float32)


CASES = {
    "no weights": (lambda w, x: x + jnp.cumsum(jnp.sin(x), axis=1) / 8, {}, {}),
    "table": (looked_up, {"table": (32, 16), "bias": (32,)}, {"table": Cut(0), "bias": Cut(0)}),
    "joined": (joined, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "megatron": (
        mlp,
        {"up": (16, 32), "bias": (32,), "down": (32, 16)},
        {"up": Cut(1), "bias": Cut(0), "down": Cut(0)},
    ),
    "whole bias": (mlp, {"up": (16, 32), "bias": (32,), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "only the first": (mlp, {"up": (16, 32), "bias": (32,), "down": (32, 16)}, {"up": Cut(1)}),
    "only the second": (mlp, {"up": (16, 32), "bias": (32,), "down": (32, 16)}, {"down": Cut(0)}),
    "the other way round": (
        mlp,
        {"up": (16, 32), "bias": (32,), "down": (32, 16)},
        {"up": Cut(0), "bias": Cut(0), "down": Cut(1)},
    ),
    "fused": (gated, {"up": (16, 64), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "fused, along positions": (smoothed, {"up": (16, 64), "down": (32, 16)}, {"up": Cut(1, 2), "down": Cut(0)}),
    "chunks": (in_chunks, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "reports": (reporting, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "linear system": (solved, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "fused, in pieces": (gated, {"up": (16, 64), "down": (32, 16)}, {"up": Cut(1, 2), "down": Cut(0)}),
    "queries, keys and values": (
        attention,
        {"qkv": (16, 96), "bias": (96,), "out": (32, 16)},
        {"qkv": Cut(1, 3), "bias": Cut(0, 3), "out": Cut(0)},
    ),
    "in one array of three": (
        reordered,
        {"qkv": (16, 96), "bias": (96,), "out": (32, 16)},
        {"qkv": Cut(1, 3), "bias": Cut(0, 3), "out": Cut(0)},
    ),
    "heads": (
        heads,
        {"q": (16, 32), "k": (16, 16), "v": (16, 16), "out": (32, 16)},
        {"q": Cut(1), "k": Cut(1), "v": Cut(1), "out": Cut(0)},
    ),
    "scan": (scanned, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "pieces": (reshaped, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "integers": (counted, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
    "branches": (branching, {"up": (16, 32), "down": (32, 16)}, {"up": Cut(1), "down": Cut(0)}),
}


@pytest.mark.parametrize("positions", [False, True], ids=["whole", "sequence parallel"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_together_compute_what_one_device_does(case: str, positions: bool) -> None:
    function, shapes, places = CASES[case]
    keys = iter(jax.random.split(jax.random.key(0), 9))
    weights = {name: jax.random.normal(next(keys), shape) / 4 for name, shape in sorted(shapes.items())}
    x, dy = jax.random.normal(next(keys), X), jax.random.normal(next(keys), X)

    def called(w: Tree, x: jax.Array, again: Tree) -> jax.Array:
        return function(w, x)

    given = Cut(1, yields=True) if positions else None
    shared = alone(called, [places.get(name) for name in sorted(shapes)], given=given, result=given)
    specs = {
        name: P(*("tensor" if places.get(name) == Cut(i) else None for i in range(len(shape))))
        for name, shape in shapes.items()
    }
    terms = {name for name in shapes if (positions if name not in places else places[name].pieces > 1)}
    of_x = P("data", "tensor" if positions else None)  # activations vary over other axes too

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=Mesh(np.array([jax.devices()[:RANKS]]), ("data", "tensor")),
        in_specs=(specs, of_x, of_x),
        out_specs=(of_x, specs, of_x),
    )
    def step(w: Tree, x: jax.Array, dy: jax.Array) -> Any:
        w = {name: lax.pcast(each, "tensor", to="varying") if name in terms else each for name, each in w.items()}
        y, vjp = jax.vjp(lambda w, x: shared(w, x, None), w, x)
        dw, dx = vjp(dy)
        return y, {name: lax.psum(each, "tensor") if name in terms else each for name, each in dw.items()}, dx

    y, vjp = jax.vjp(function, weights, x)
    chex.assert_trees_all_close(step(weights, x, dy), (y, *vjp(dy)), rtol=2e-5, atol=2e-5)


class PostNorm(modules.Block):
    """As in BERT: LayerNorm after each sum."""

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.norms[0](x + self.attention(x, mask=self.causal))
        return self.norms[1](x + self.down(nnx.gelu(self.up(x))))


def of_block(config: ModelConfig, block: Any = modules.Block) -> tuple[Any, list[str], Any]:
    """A trace of the value and gradients of a block, and the names of its weights."""
    graph, params, rest = nnx.split(block(config, rngs=nnx.Rngs(0)), nnx.Param, ...)
    params = jax.tree.map(lambda leaf: leaf.astype(config.dtype), params)
    x = jax.ShapeDtypeStruct((1, config.seq_len, config.hidden_size), config.dtype)

    def step(params: Tree, x: jax.Array, dy: jax.Array) -> Any:
        block = lambda params, x: nnx.merge(graph, params, rest, copy=True)(x)  # noqa: E731
        y, vjp = jax.vjp(block, params, x)
        return y, *vjp(dy)

    names = [".".join(map(str, path)) for path, _ in nnx.to_flat_state(params)]
    return Trace.of(step, params, x, x).closed.jaxpr, names, params


@pytest.mark.parametrize(
    ("ranks", "block", "dtype"),
    [(2, modules.Block, "float32"), (4, modules.Block, "bfloat16"), (4, PostNorm, "bfloat16")],
)
def test_a_block_without_annotations_is_shared_as_in_megatron(ranks: int, block: Any, dtype: str) -> None:
    jaxpr, names, _ = of_block(ModelConfig(num_heads=4, hidden_size=32, seq_len=16, dtype=dtype), block)
    places = choose(jaxpr, len(names), ranks, exchange=64.0)
    columns = {f"attention.{name}.kernel": Cut(1) for name in ("query", "key", "value")} | {"up.kernel": Cut(1)}
    biases = {f"attention.{name}.bias": Cut(0) for name in ("query", "key", "value")} | {"up.bias": Cut(0)}
    rows = {"attention.out.kernel": Cut(0), "down.kernel": Cut(0)}
    assert {name: each for name, each in zip(names, places, strict=True) if each is not None} == columns | biases | rows
    # Two sums in the forward pass, and two in the backward pass; nothing else is exchanged. With sequence parallelism
    # the ranks add up parts, and bring the parts of four arrays together.
    for x in (None, Cut(1, yields=True)):
        wanted: list[Place] = [x, *(of_gradient(place, terms=x is not None) for place in places), x]
        found = plan(jaxpr, [*places, x, x], wanted, ranks)
        moves = [
            (move, name.aval.dtype)
            for equation, step in zip(jaxpr.eqns, found.steps, strict=True)
            for name, move in zip(equation.invars, step.moves, strict=True)
        ]
        exchanged = {move for move in moves if move[0][0] not in (move[0][1], None) and move[0][1] != SUM}
        moved = {(SUM, x)} | ({(x, None)} if x else set())
        assert exchanged == {(move, jnp.dtype(dtype)) for move in moved}  # before a norm computes in float32
        assert {move for move in found.results if move[0] not in (move[1], None)} <= {(SUM, x)}
        assert found.exchanged == 4 * 2 * 16 * 32


def test_weights_stay_whole_where_parts_would_cost_more() -> None:
    jaxpr, names, _ = of_block(ModelConfig(num_heads=4, hidden_size=32, seq_len=16))
    assert set(choose(jaxpr, len(names), 2, exchange=1e6)) == {None}
    assert set(choose(jaxpr, len(names), 3, exchange=0.0)) == {None}  # no dimension has three equal parts
