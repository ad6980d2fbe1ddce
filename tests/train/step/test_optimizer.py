"""Optimizers on stacked, padded weights against plain optax on unstacked, unpadded ones; schedules; clipping."""

import dataclasses
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fiddlex.config import OptimizerConfig
from fiddlex.config.sections import LEARNING_RATE_SCHEDULES, OPTIMIZERS
from fiddlex.models.spec import Matrix
from fiddlex.train.step.blockwise import Block, factored_axes, scale_by_factored_rms
from fiddlex.train.step.optimizer import clip_by_global_norm, learning_rate_schedule, make_optimizer

Tree = dict[str, Any]

NUM_STEPS = 5
NUM_LAYERS = 3
VOCAB, PADDED_VOCAB, HIDDEN = 129, 136, 128
VECTOR = Block(stacked=True, decay=False, padding=1.0)
MATRIX = Block(stacked=True, decay=True, padding=1.0, matrix=Matrix((0,), (1,)))
BLOCKS = {
    "embedding": {"tokens": Block(stacked=False, decay=True, padding=PADDED_VOCAB / VOCAB)},
    "layers": {
        "qkv": dataclasses.replace(MATRIX, matrix=Matrix((0,), (2, 3))),
        "out": dataclasses.replace(MATRIX, matrix=Matrix((0, 1), (2,))),
        "up": MATRIX,
        "bias": VECTOR,
        "gain": VECTOR,
    },
    "head": {"scale": Block(stacked=False, decay=False, padding=1.0)},
}


def make_tree(seed: int, *, zero_bias: bool = False) -> Tree:
    """Values whose magnitude differs by layer, so that statistics taken over several layers stand out."""
    random = np.random.default_rng(seed)

    def layers(*shape: int) -> np.ndarray:
        magnitudes = np.array([1.0, 0.01, 30.0]).reshape(NUM_LAYERS, *[1] * len(shape))
        return (magnitudes * random.normal(size=(NUM_LAYERS, *shape))).astype(np.float32)

    tokens = random.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    tokens[3] = 0  # a token that no batch contains
    bias = layers(HIDDEN)
    return {
        "embedding": {"tokens": np.pad(tokens, ((0, PADDED_VOCAB - VOCAB), (0, 0)))},
        "layers": {
            "qkv": layers(HIDDEN, 3, 2, 64),
            "out": layers(2, 64, HIDDEN),
            "up": layers(HIDDEN, 160),
            "bias": np.zeros_like(bias) if zero_bias else bias,
            "gain": layers(),
        },
        "head": {"scale": 1 + 0.1 * random.normal(size=HIDDEN).astype(np.float32)},
    }


def plain(tree: Tree) -> Tree:
    """One entry for every layer, and no padding."""
    return {
        "embedding": {"tokens": tree["embedding"]["tokens"][:VOCAB]},
        "layers": [{name: x[i] for name, x in tree["layers"].items()} for i in range(NUM_LAYERS)],
        "head": tree["head"],
    }


def decays(tree: Tree) -> Tree:
    """The decay mask of a plain tree."""
    return jax.tree.map_with_path(lambda path, _: path[-1].key in ("tokens", "qkv", "out", "up"), tree)


MATRICES = {
    "qkv": optax.contrib.MuonDimensionNumbers(0, (2, 3)),
    "out": optax.contrib.MuonDimensionNumbers((0, 1), 2),
    "up": optax.contrib.MuonDimensionNumbers(0, 1),
}


def muon_dimensions(tree: Tree) -> Tree:
    """The rows and columns of every matrix of a plain tree; None for other weights."""
    return jax.tree.map_with_path(lambda path, _: MATRICES.get(path[-1].key), tree)


def oracle(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """Optax's own optimizer, for plain trees."""
    decay = config.weight_decay
    moments = {"b1": config.beta1, "b2": config.beta2, "eps": config.epsilon}
    if config.name == "adamw":
        return optax.adamw(schedule, **moments, weight_decay=decay, mask=decays)
    if config.name == "nadamw":
        return optax.nadamw(schedule, **moments, weight_decay=decay, mask=decays)
    if config.name == "adan":
        return optax.chain(
            optax.scale_by_adan(config.beta1, config.beta2, config.beta3, config.epsilon),
            optax.add_decayed_weights(decay, mask=decays),
            optax.scale_by_learning_rate(schedule),
        )
    if config.name == "lion":
        return optax.lion(schedule, config.beta1, config.beta2, weight_decay=decay, mask=decays)
    if config.name == "muon":
        # `optax.contrib.muon` would give the other weights to NAdamW; Muon's authors use AdamW.
        muon = optax.contrib.muon(
            schedule,
            beta=config.momentum,
            weight_decay=decay,
            muon_weight_dimension_numbers=muon_dimensions,
            consistent_rms=0.2,
        )
        adamw = optax.adamw(schedule, **moments, weight_decay=decay, mask=decays)

        def rules(tree: Tree) -> Tree:
            return jax.tree.map_with_path(lambda path, _: "muon" if path[-1].key in MATRICES else "adamw", tree)

        return optax.partition({"muon": muon, "adamw": adamw}, rules)
    if config.name == "lamb":
        return optax.lamb(schedule, **moments, weight_decay=decay, mask=decays)
    if config.name == "adafactor":
        return optax.adafactor(
            schedule, weight_decay_rate=lambda count: decay * schedule(count), weight_decay_mask=decays
        )
    rule = optax.adam(schedule, **moments) if config.name == "adam" else optax.sgd(schedule, config.momentum)
    return optax.chain(optax.add_decayed_weights(decay, mask=decays), rule)


def make(config: OptimizerConfig) -> optax.GradientTransformation:
    return make_optimizer(config, num_steps=NUM_STEPS, blocks=BLOCKS)


def run(optimizer: optax.GradientTransformation, weights: Tree, grads: list[Tree]) -> tuple[list[Tree], Any]:
    """The update of every step with the weights after the last, and the state."""

    @jax.jit
    def step(weights: Tree, state: Any, grads: Tree) -> tuple[Tree, Tree, Any]:
        updates, state = optimizer.update(grads, state, weights)
        return updates, optax.apply_updates(weights, updates), state

    state, trees = jax.jit(optimizer.init)(weights), []
    for g in grads:
        updates, weights, state = step(weights, state, g)
        trees.append(updates)
    return [*trees, weights], state


def assert_close(actual: Tree, expected: Tree, *, relative: float = 1e-6) -> None:
    """Every leaf equal up to `relative` times its largest element."""

    def check(x: jax.Array, y: jax.Array) -> None:
        np.testing.assert_allclose(x, y, rtol=0, atol=relative * np.abs(y).max())

    jax.tree.map(check, actual, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("weight_decay", [pytest.param(0.0, marks=pytest.mark.long), 0.1])
def test_stacked_and_padded_equals_plain_optax(name: str, weight_decay: float) -> None:
    config = OptimizerConfig(
        name, learning_rate=0.1, warmup_steps=2, final_learning_rate=0.01, weight_decay=weight_decay, epsilon=1e-6
    )
    weights, grads = make_tree(0, zero_bias=True), [make_tree(1 + i) for i in range(NUM_STEPS)]
    actual, _ = run(make(config), weights, grads)
    schedule = learning_rate_schedule(config, NUM_STEPS)
    expected, _ = run(oracle(config, schedule), plain(weights), [plain(g) for g in grads])
    # Each of Muon's five iterations multiplies small singular values, and rounding errors with them, by up to 3.4445.
    tolerance = 1e-7 * 3.4445**5 if name == "muon" else 1e-6
    for x, y in zip(actual, expected, strict=True):
        assert_close(plain(x), y, relative=tolerance)
        assert not np.any(x["embedding"]["tokens"][VOCAB:])


@pytest.mark.parametrize(
    ("vocab", "padded", "hidden"), [(127, 144, 128), (130, 144, 136), (200, 1000, 130)], ids=["small", "across", "much"]
)
def test_adafactor_does_not_depend_on_padding(vocab: int, padded: int, hidden: int) -> None:
    random = np.random.default_rng(0)
    config = OptimizerConfig("adafactor", weight_decay=0.1)

    def train(rows: int) -> tuple[list[Tree], optax.FactoredState]:
        pad = [(0, rows - vocab), (0, 0)]
        block = Block(stacked=False, decay=True, padding=rows / vocab)
        optimizer = make_optimizer(config, num_steps=NUM_STEPS, blocks={"tokens": block})
        trees = [{"tokens": np.pad(x, pad)} for x in values]
        updates, state = run(optimizer, trees[0], trees[1:])
        return updates, state[0]

    values = [random.normal(size=(vocab, hidden)).astype(np.float32) for _ in range(1 + NUM_STEPS)]
    (updates, state), (expected, expected_state) = train(padded), train(vocab)
    for x, y in zip(updates, expected, strict=True):
        assert_close(x["tokens"][:vocab], y["tokens"])
        assert not np.any(x["tokens"][vocab:])
    # So that a run may go on with another padding.
    assert_close(state.v_row["tokens"][:vocab], expected_state.v_row["tokens"][:vocab])
    assert_close(state.v_col, expected_state.v_col)


def test_adafactor_survives_rows_without_gradient_beside_large_ones() -> None:
    grads = {"tokens": jnp.zeros((144, 128)).at[0].set(1e12)}
    rule = scale_by_factored_rms({"tokens": Block(stacked=False, decay=True, padding=144 / 130)})
    updates, _ = rule.update(grads, rule.init(grads))
    chex.assert_tree_all_finite(updates)
    assert not np.any(updates["tokens"][1:])


@pytest.mark.parametrize(
    ("shape", "block", "axes"),
    [
        ((200, 128, 160), MATRIX, (1, 2)),  # more layers than either dimension
        ((200, 160, 128), MATRIX, (1, 2)),
        ((200, 128), VECTOR, None),
        ((200, 127, 500), MATRIX, None),
        ((2, 512, 3, 8, 128), MATRIX, (1, 4)),
        ((200, 128), Block(stacked=False, decay=True, padding=1.0), (0, 1)),
        ((128, 512), Block(stacked=False, decay=True, padding=128 / 127), None),
        ((136, 512), Block(stacked=False, decay=True, padding=136 / 128), (0, 1)),
        ((), Block(stacked=False, decay=False, padding=1.0), None),
    ],
)
def test_factored_axes(shape: tuple[int, ...], block: Block, axes: tuple[int, int] | None) -> None:
    assert factored_axes(shape, block) == axes


@pytest.mark.parametrize("name", ["adamw", "lamb", "adafactor"])
def test_decoupled_decay_shrinks_what_the_blocks_say(name: str) -> None:
    config = OptimizerConfig(name, learning_rate=0.5, schedule="constant", weight_decay=0.1)
    weights = make_tree(0)
    updates, _ = make(config).update(optax.tree.zeros_like(weights), make(config).init(weights), weights)
    # LAMB normalises the update, which is the decay alone, to the norm of the weights.
    rate = 0.5 if name == "lamb" else 0.5 * 0.1
    expected = jax.tree.map(lambda block, w: -rate * w if block.decay else 0 * w, BLOCKS, weights)
    assert_close(updates, expected)


@pytest.mark.parametrize("name", ["adam", "sgd"])
def test_coupled_decay_is_part_of_the_gradient(name: str) -> None:
    weights, grads = make_tree(0), make_tree(1)
    with_decay, without = (make(OptimizerConfig(name, weight_decay=decay)) for decay in (0.1, 0.0))
    summed = jax.tree.map(lambda block, g, w: g + 0.1 * w * block.decay, BLOCKS, grads, weights)
    actual, _ = with_decay.update(grads, with_decay.init(weights), weights)
    expected, _ = without.update(summed, without.init(weights), weights)
    assert_close(actual, expected)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_mirrors_the_weights(name: str) -> None:
    optimizer, weights = make(OptimizerConfig(name)), make_tree(0)
    state = optimizer.init(weights)

    def kind(x: Any, weight: np.ndarray, block: Block) -> Any:
        if isinstance(x, optax.MaskedNode):
            return x
        if x.shape == weight.shape:
            return "mirror"
        rows, columns = factored_axes(weight.shape, block) or (0, 0)
        factors = {weight.shape[:axis] + weight.shape[axis + 1 :] for axis in (rows, columns)}
        return "factor" if x.shape in factors | {(1,)} else "unknown"

    kinds = jax.tree.leaves(
        optax.tree.map_params(
            optimizer,
            kind,
            state,
            weights,
            BLOCKS,
            transform_non_params=lambda x: "scalar",
            is_leaf=lambda x: isinstance(x, optax.MaskedNode),
        )
    )
    num_leaves = len(jax.tree.leaves(weights))
    # Adafactor factors two of the weights (tokens, up), keeps the moments of the others and has three trees. Muon has
    # one moment of each of the three matrices.
    mirrors = {
        "sgd": num_leaves,
        "lion": num_leaves,
        "adafactor": num_leaves - 2,
        "muon": 2 * num_leaves - 3,
        "adan": 4 * num_leaves,
    }.get(name, 2 * num_leaves)
    assert kinds.count("mirror") == mirrors
    assert kinds.count("factor") == (3 * num_leaves - mirrors if name == "adafactor" else 0)
    assert kinds.count("scalar") == {"sgd": 1, "muon": 3}.get(name, 2)
    assert "unknown" not in kinds
    for x in jax.tree.leaves(state):
        assert x.dtype == (jnp.float32 if x.ndim else jnp.int32)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_is_donatable_and_deterministic(name: str) -> None:
    optimizer = make(OptimizerConfig(name, weight_decay=0.1))
    step = jax.jit(lambda grads, state, weights: optimizer.update(grads, state, weights), donate_argnums=1)

    def steps() -> Any:
        weights, grads = make_tree(0), make_tree(1)
        _, state = step(grads, optimizer.init(weights), weights)
        return step(grads, state, weights)

    first, second = steps(), steps()
    chex.assert_trees_all_equal(first, second)
    assert {int(x) for x in jax.tree.leaves(first[1]) if x.ndim == 0} == {2}


def test_sgd_without_momentum_keeps_no_buffer() -> None:
    optimizer = make(OptimizerConfig("sgd", momentum=0.0, schedule="constant", learning_rate=0.5))
    weights, grads = make_tree(0), make_tree(1)
    state = optimizer.init(weights)
    assert [x.shape for x in jax.tree.leaves(state)] == [()]
    assert_close(optimizer.update(grads, state, weights)[0], jax.tree.map(lambda g: -0.5 * g, grads))


@pytest.mark.parametrize(
    ("schedule", "middle"), [("cosine", 0.6), ("linear", 0.6), ("constant", 1.0)], ids=LEARNING_RATE_SCHEDULES
)
def test_schedule_at_its_corners(schedule: str, middle: float) -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule=schedule, warmup_steps=4, final_learning_rate=0.2)
    rate = learning_rate_schedule(config, 12)
    np.testing.assert_array_equal(rate(jnp.arange(5)), [0.25, 0.5, 0.75, 1, 1])
    assert rate(8) == pytest.approx(middle, rel=1e-6)
    last = np.float32(1.0 if schedule == "constant" else 0.2)
    np.testing.assert_array_equal(rate(jnp.array([12, 13, 10**6])), [last] * 3)
    chex.assert_shape(rate(jnp.int32(3)), ())
    assert rate(jnp.int32(3)).dtype == jnp.float32


def test_schedule_without_warmup_starts_at_the_peak_and_decay_steps_outrank_the_run() -> None:
    rate = learning_rate_schedule(OptimizerConfig(learning_rate=0.3, schedule="linear", decay_steps=10), 1000)
    np.testing.assert_allclose(rate(jnp.array([0, 5, 9, 10, 999])), [0.3, 0.15, 0.03, 0, 0], rtol=1e-6)


def test_schedule_that_is_all_warmup_ends_at_the_final_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=4, decay_steps=4, final_learning_rate=0.5)
    np.testing.assert_array_equal(learning_rate_schedule(config, 9)(jnp.arange(2, 6)), [0.75, 1, 0.5, 0.5])


@settings(deadline=None)  # the first example compiles
@given(
    schedule=st.sampled_from(LEARNING_RATE_SCHEDULES),
    peak=st.floats(1e-6, 10),
    fraction=st.floats(0, 1),
    warmup=st.integers(0, 200),
    length=st.integers(0, 200),
    num_steps=st.integers(1, 400),
)
def test_schedule_rises_then_falls_within_bounds(
    schedule: str, peak: float, fraction: float, warmup: int, length: int, num_steps: int
) -> None:
    config = OptimizerConfig(
        learning_rate=peak,
        schedule=schedule,
        warmup_steps=warmup,
        decay_steps=warmup + length,
        final_learning_rate=peak * fraction,
    )
    config.validate()
    rates = np.asarray(learning_rate_schedule(config, num_steps)(jnp.arange(1000)))
    rising, falling = rates[:warmup], rates[warmup:]
    slack = 1e-6 * peak
    assert np.all(rising > 0)
    assert np.all(np.diff(rising) > 0)
    assert np.all(np.diff(falling) <= slack)
    assert np.all(falling >= min(peak * fraction, peak) - slack)
    assert rates.max() <= peak + slack
    if warmup:
        assert abs(rising[-1] - peak) <= slack


@pytest.mark.parametrize("clip_norm", [0.5, 5.0, 50.0])
def test_clip_equals_optax(clip_norm: float) -> None:
    grads = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([[4.0]])}
    clip = optax.clip_by_global_norm(clip_norm)
    expected, _ = clip.update(grads, clip.init(grads))
    actual = jax.jit(clip_by_global_norm, static_argnums=2)(grads, optax.tree.norm(grads), clip_norm)
    chex.assert_trees_all_close(actual, expected, rtol=1e-6)
    assert optax.tree.norm(actual) <= clip_norm * (1 + 1e-6)


def test_clip_at_zero_norm_without_limit_and_without_a_number() -> None:
    zeros, ones = {"a": jnp.zeros(3)}, {"a": jnp.ones(3)}
    with jax.debug_nans(True), jax.debug_infs(True):
        chex.assert_trees_all_equal(clip_by_global_norm(zeros, jnp.zeros(()), 1.0), zeros)
    assert clip_by_global_norm(ones, jnp.sqrt(3.0), 0.0) is ones
    assert np.all(np.isnan(clip_by_global_norm(ones, jnp.array(jnp.nan), 1.0)["a"]))
