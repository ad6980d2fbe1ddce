"""The Trainer as a library: steps, records, evaluation, sampling, weights, errors, and the compiled step."""

import copy
import logging
import math
import pathlib
import re
from collections.abc import Callable, Iterator

import chex
import jax
import numpy as np
import pytest

from fiddlex.config import Config
from fiddlex.costs.sizes import num_parameters
from fiddlex.data import load_corpus
from fiddlex.errors import ConfigError, DataError, DeviceError
from fiddlex.models.weights import Weights
from fiddlex.train.inference.sampling import SamplingConfig
from fiddlex.train.loop import _log_what_runs
from fiddlex.train.record import Record
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.trainer import Trainer
from tests import reference
from tests.train.bert import random_dataset


def test_records_and_learning(tiny_config: Config) -> None:
    tiny_config.optimizer.learning_rate = 1e-2
    tiny_config.optimizer.warmup_steps = 4
    tiny_config.train.num_steps = 30
    trainer = Trainer(tiny_config)
    records = list(trainer.steps(30))
    assert [r["step"] for r in records] == list(range(1, 31))
    assert records[0]["loss"] == pytest.approx(math.log(257), rel=0.03)
    assert records[-1]["loss"] < 4.0
    assert records[0]["learning_rate"] == pytest.approx(1e-2 / 4)
    assert all(r["step_time_s"] > 0 and r["tokens_per_second"] > 0 and r["grad_norm"] > 0 for r in records)


def test_a_run_names_the_fields_that_change_nothing_and_says_that_it_keeps_nothing(
    tiny_config: Config, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_config.mesh.pipe, tiny_config.pipeline.num_microbatches = 2, 4
    tiny_config.pipeline.stash_memory, tiny_config.pipeline.recompute = "host", "gelu,masks"
    with caplog.at_level(logging.INFO):
        _log_what_runs(Trainer(tiny_config))
    assert "pipeline.stash_memory=host changes nothing with pipeline.schedule=1f1b" in caplog.text
    assert "masks in pipeline.recompute=gelu,masks changes nothing with model.dropout=0" in caplog.text
    kept = "train.checkpoint_every=0: a run that comes to its end keeps no weights. Set a number of steps, or auto."
    assert kept in caplog.messages
    caplog.clear()
    tiny_config.train.checkpoint_every = 5
    with caplog.at_level(logging.INFO):
        _log_what_runs(Trainer(tiny_config))
    assert kept not in caplog.messages


# Values other than jax's defaults, of settings that change random numbers, dtypes, or what jax refuses to combine.
SETTINGS: dict[str, object] = {
    "jax_enable_x64": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_random_seed_offset": 7,
    "jax_numpy_dtype_promotion": "strict",
    "jax_numpy_rank_promotion": "raise",
    "jax_debug_key_reuse": True,
    "jax_softmax_custom_jvp": True,
}


@pytest.fixture
def settings() -> Iterator[Callable[[dict[str, object]], None]]:
    """Sets settings of jax until the test ends."""
    before: dict[str, object] = {}

    def update(values: dict[str, object]) -> None:
        before.update({name: getattr(jax.config, name) for name in values})
        for name, value in values.items():
            jax.config.update(name, value)

    yield update
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_settings_of_jax_change_no_bit_of_a_run(
    settings: Callable[[dict[str, object]], None],
    tiny_config: Config,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny_config.model.dropout, tiny_config.model.num_layers = 0.1, 3
    moved = copy.deepcopy(tiny_config)
    moved.mesh.pipe, moved.pipeline.num_microbatches, moved.pipeline.layers_per_stage = 2, 2, "1,2"

    def run(workdir: pathlib.Path) -> tuple[list[float], Record, str, Weights, Weights]:
        trainer, other = Trainer(tiny_config), Trainer(moved)
        losses = [record["loss"] for record in trainer.steps(3)]
        assert {leaf.dtype for leaf in jax.tree.leaves(trainer.state)} == {np.dtype("int32"), np.dtype("float32")}
        text = "".join(trainer.generate("def ", 8, SamplingConfig(0.9, 20, 0.9)))
        with Checkpoints(workdir) as checkpoints:
            trainer.save(checkpoints)
            checkpoints.wait()
            assert other.restore(checkpoints)
        return losses, trainer.evaluate(), text, trainer.weights(), other.weights()

    *numbers, weights, weights_moved = run(tmp_path / "defaults")
    chex.assert_trees_all_equal(weights_moved, weights)
    settings(SETTINGS)
    *numbers_set, weights_set, weights_moved = run(tmp_path / "settings")
    assert not caplog.records
    assert numbers_set == numbers
    chex.assert_trees_all_equal(weights_set, weights)
    chex.assert_trees_all_equal(weights_moved, weights)


def test_a_run_that_goes_on_tells_of_another_precision_of_products(
    settings: Callable[[dict[str, object]], None],
    tiny_config: Config,
    tmp_path: pathlib.Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    trainer = Trainer(tiny_config)
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
        checkpoints.wait()
        settings({"jax_default_matmul_precision": "highest"})
        assert trainer.restore(checkpoints)
    assert caplog.messages == [
        "jax_default_matmul_precision=highest (JAX_DEFAULT_MATMUL_PRECISION) was None when "
        f"{tmp_path}/checkpoints/0 was made: from here on, the numbers are not those of an uninterrupted run."
    ]


def test_without_jit_nothing_is_computed(tiny_config: Config) -> None:
    with jax.disable_jit(), pytest.raises(DeviceError, match=r"^jax_disable_jit is True .* Unset JAX_DISABLE_JIT"):
        Trainer(tiny_config)


def test_nothing_is_compiled_after_the_first_round(tiny_config: Config) -> None:
    compiled: list[str] = []

    def listen(event: str, duration: float, **kwargs: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    tiny_config.mesh.data = tiny_config.mesh.tensor = 2
    trainer = Trainer(tiny_config)

    def a_round() -> None:
        list(trainer.steps(2))
        trainer.evaluate()
        list(trainer.generate("a", 2))

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        a_round()
        assert compiled  # the listener hears compilations
        compiled.clear()
        a_round()
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_state_is_donated(tiny_config: Config) -> None:
    trainer = Trainer(tiny_config)
    state = trainer.state
    list(trainer.steps(1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_gradients_are_reduced_over_data_once_per_batch(tiny_config: Config) -> None:
    tiny_config.mesh.data = 4
    tiny_config.pipeline.num_microbatches = 4
    trainer = Trainer(tiny_config)
    trainer.compile()
    assert trainer._compiled is not None
    computations = re.split(r"\n(?=\S.*\{\n)", trainer._compiled.as_text())
    scattering = [computation for computation in computations if "reduce-scatter(" in computation]
    assert len(scattering) == 1
    assert scattering[0].startswith("ENTRY")  # not in the loop over microbatches
    assert scattering[0].count("reduce-scatter(") == len(jax.tree.leaves(trainer.state.weights))


@pytest.mark.parametrize("zero1", [True, False])
def test_zero1_shards_masters_and_moments_over_data(tiny_config: Config, zero1: bool) -> None:
    tiny_config.mesh.data, tiny_config.mesh.tensor, tiny_config.optimizer.zero1 = 4, 2, zero1
    trainer = Trainer(tiny_config)
    list(trainer.steps(1))
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves((trainer.state.weights, trainer.state.optimizer)))
    held = sum(
        shard.data.nbytes
        for leaf in jax.tree.leaves((trainer.state.weights, trainer.state.optimizer))
        for shard in leaf.addressable_shards
        if shard.device == trainer.mesh.devices.flat[0]
    )
    assert held / whole == pytest.approx(1 / 8 if zero1 else 1 / 2, rel=0.15)


@pytest.mark.parametrize(
    ("schedule", "family"),
    [("zb_h1", "gpt"), *(pytest.param("1f1b", family, marks=pytest.mark.long) for family in ("gpt", "bert"))],
)
def test_bfloat16_gradients_are_those_of_float32_up_to_rounding(
    schedule: str, family: str, tiny_config: Config
) -> None:
    # Long sequences: a sum over positions in bfloat16 would be far off.
    tiny_config.model.seq_len = 256
    tiny_config.optimizer.name, tiny_config.optimizer.momentum = "sgd", 0.0
    tiny_config.optimizer.schedule, tiny_config.optimizer.learning_rate = "constant", 1.0
    tiny_config.model.family, tiny_config.model.objective = family, {"gpt": "lm", "bert": "mlm_nsp"}[family]
    dataset = random_dataset(tiny_config) if family == "bert" else None
    updates = {}
    for dtype in ("float32", "bfloat16"):
        tiny_config.model.dtype = dtype
        if dtype == "bfloat16":
            tiny_config.mesh.pipe, tiny_config.mesh.tensor = 2, 2
            tiny_config.pipeline.schedule, tiny_config.pipeline.num_microbatches = schedule, 2
        trainer = Trainer(copy.deepcopy(tiny_config), dataset)
        before = trainer.weights()
        list(trainer.steps(1))
        after = trainer.weights()
        assert {leaf.dtype for leaf in jax.tree.leaves(after)} == {np.dtype("float32")}
        updates[dtype] = jax.tree.map(lambda a, b: a - b, after, before)
    wanted = jax.tree_util.tree_leaves_with_path(updates["float32"])
    for (path, exact), rounded in zip(wanted, jax.tree.leaves(updates["bfloat16"]), strict=True):
        error = np.linalg.norm(rounded - exact) / np.linalg.norm(exact)
        assert error < 0.02, f"{jax.tree_util.keystr(path)}: relative error {error:.3f}"


def test_weights_are_whole_and_counted_right(tiny_config: Config) -> None:
    tiny_config.model.num_layers, tiny_config.mesh.pipe, tiny_config.mesh.tensor = 3, 2, 4
    weights = Trainer(tiny_config).weights()
    assert weights["embedding"]["tokens"].shape == (257, 32)
    assert sum(leaf.size for leaf in jax.tree.leaves(weights)) == num_parameters(tiny_config)


@pytest.mark.parametrize("schedule", ["1f1b", "zb_v"])
def test_evaluation_scores_every_heldout_token_once(schedule: str, tiny_config: Config) -> None:
    tiny_config.data.eval_batches = 0
    tiny_config.data.global_batch_size = 24  # does not divide the number of windows
    tiny_config.mesh.data, tiny_config.mesh.tensor = 2, 2
    tiny_config.pipeline.num_microbatches = 3
    if schedule == "zb_v":
        tiny_config.model.num_layers, tiny_config.mesh.pipe, tiny_config.pipeline.num_chunks = 5, 2, 2
        tiny_config.pipeline.schedule = schedule
    trainer = Trainer(tiny_config)
    record = trainer.evaluate()
    corpus = load_corpus(tiny_config.data, vocab_size=257, seq_len=tiny_config.model.seq_len)
    tokens = np.asarray(corpus.heldout.tokens, np.int32)
    losses, length = [], tiny_config.model.seq_len
    weights = reference.unstack(trainer.weights())
    logits_fn = jax.jit(lambda tokens: jax.nn.log_softmax(reference.logits_fn(weights, tokens, None, tiny_config)))
    padded = np.zeros(-(-(len(tokens) - 1) // length) * length + 1, np.int32)
    padded[: len(tokens)] = tokens
    scores = np.asarray(logits_fn(padded[:-1].reshape(-1, length))).reshape(len(padded) - 1, -1)
    losses = -scores[np.arange(len(tokens) - 1), tokens[1:]]
    assert record["eval_tokens"] == len(tokens) - 1
    assert record["eval_loss"] == pytest.approx(losses.mean(), rel=1e-5)
    assert record["eval_perplexity"] == pytest.approx(math.exp(losses.mean()), rel=1e-4)
    assert record["eval_perplexity_per_byte"] == pytest.approx(
        math.exp(losses.sum() / len(losses) * len(tokens) / corpus.heldout.num_bytes), rel=1e-4
    )
    assert record["eval_accuracy"] == (scores.argmax(-1)[: len(tokens) - 1] == tokens[1:]).mean()


def test_nothing_held_out(tiny_config: Config) -> None:
    tiny_config.data.eval_fraction = 0.0
    with pytest.raises(DataError, match=r"to evaluate on: set data\.eval_source, or data\.eval_fraction above 0"):
        Trainer(tiny_config).evaluate()


@pytest.mark.parametrize("pipe", [pytest.param(1, marks=pytest.mark.long), 4])
def test_sampling_is_the_same_on_every_layout_and_follows_the_logits(pipe: int, tiny_config: Config) -> None:
    tiny_config.model.num_layers, tiny_config.mesh.pipe, tiny_config.mesh.tensor = 4, pipe, 2
    tiny_config.optimizer.learning_rate = 1e-2
    trainer = Trainer(tiny_config)
    list(trainer.steps(20))
    greedy = "".join(trainer.generate("def ", 24, SamplingConfig(temperature=0.0)))
    # The reference, one token at a time, over the last seq_len tokens.
    weights, tokens, length = reference.unstack(trainer.weights()), list(b"def "), tiny_config.model.seq_len
    logits_fn = jax.jit(lambda tokens: reference.logits_fn(weights, tokens, None, tiny_config))
    for _ in range(24):
        window = tokens[-length:]
        logits = logits_fn(np.asarray([window + [0] * (length - len(window))]))
        tokens.append(int(np.argmax(logits[0, len(window) - 1])))
    assert greedy == bytes(tokens[4:]).decode(errors="replace")
    once, again = (
        ["".join(trainer.generate("x", 12, SamplingConfig(0.9, 20, 0.9, seed=s))) for s in (1, 2)] for _ in "ab"
    )
    assert once == again
    assert once[0] != once[1]


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingConfig(temperature=-1), "temperature=-1"),
        (SamplingConfig(top_k=-1), "top_k=-1"),
        (SamplingConfig(top_p=0), "top_p=0"),
    ],
)
def test_sampling_values_out_of_range(sampling: SamplingConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sampling.validate()


def test_too_few_devices(tiny_config: Config) -> None:
    tiny_config.mesh.data = 16
    with pytest.raises(DeviceError, match=r"data=16 × pipe=1 × tensor=1 needs 16 devices; there are 8 \(cpu\)"):
        Trainer(tiny_config)


def test_all_sizes_in_which_the_config_differs_from_a_table_are_told_as_its_fields(
    tiny_config: Config, tmp_path: pathlib.Path
) -> None:
    table = tmp_path / "mine.csv"
    table.write_text("0F0,0B0,0F1,0B1\n1F0,1B0,1F1,1B1\n")
    tiny_config.pipeline.schedule = f"file:{table}"
    tiny_config.mesh.pipe, tiny_config.pipeline.num_chunks, tiny_config.pipeline.num_microbatches = 4, 2, 8
    remedy = "set mesh.pipe=2 (not 4), pipeline.num_chunks=1 (not 2), pipeline.num_microbatches=2 (not 8), or name a "
    with pytest.raises(ConfigError, match=re.escape(remedy)):
        Trainer(tiny_config)


@pytest.mark.parametrize(
    ("data", "pipe", "tensor", "schedule"), [(2, 1, 4, "1f1b"), (1, 3, 2, "1f1b"), (2, 2, 1, "zb_v")]
)
def test_initial_weights_do_not_depend_on_the_layout(
    data: int, pipe: int, tensor: int, schedule: str, tiny_config: Config
) -> None:
    tiny_config.model.num_layers = 5
    plain = Trainer(copy.deepcopy(tiny_config)).weights()
    tiny_config.mesh.data, tiny_config.mesh.pipe, tiny_config.mesh.tensor = data, pipe, tensor
    tiny_config.pipeline.schedule, tiny_config.pipeline.num_chunks = schedule, 2 if schedule == "zb_v" else 1
    chex.assert_trees_all_equal(Trainer(tiny_config).weights(), plain)
