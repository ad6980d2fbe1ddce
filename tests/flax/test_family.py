"""Families made of Flax modules: they train as plain Flax does on one device, and are described as they are."""

import copy
import pathlib
from typing import Any

import chex
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

from experiments.benchmarks.programs import make_program, temporary_bytes
from fiddlex.config import Config, MeshConfig
from fiddlex.config.families import FAMILIES
from fiddlex.costs.sizes import model_flops, num_parameters
from fiddlex.errors import ConfigError
from fiddlex.flax import Loss, family
from fiddlex.flax.alone import alone
from fiddlex.hardware.topology import load_topology
from fiddlex.models.registry import make_model, network_of
from fiddlex.models.traced_layer import PerSequence, Traced
from fiddlex.planner.cost_model import CostModel
from fiddlex.planner.layouts import Problem, layouts
from fiddlex.planner.search import search
from fiddlex.train.run.checkpoints.checkpoint import Checkpoints
from fiddlex.train.run.records.metrics import describe_loss
from fiddlex.train.step.scaling import Scaling
from fiddlex.train.trainer import Trainer
from tests.costs.test_device_memory import predicted, temporaries
from tests.flax import modules
from tests.train.layouts import Case, cases, check_layout
from tests.train.step.test_gradients import a_batch

LAYOUTS = cases("""
mesh  model schedule         v m layers          sp recompute optimizer     zero1 dropout semantics     prediction
2x2x1 nnx   interleaved_1f1b 2 4 -               -  none      sgd           zero1 dropout 2bw           extrapolate,2,0.7
2x2x2 pair  zb_h1            1 4 -               sp none      adamw         zero1 -       2bw           -
1x2x2 linen zb_h1            1 4 -               -  none      lamb          -     -       sync          -
""")  # noqa: E501  # rows of a table
FURTHER = cases("""
mesh  model schedule         v m layers          sp recompute optimizer     zero1 dropout semantics     prediction
1x4x1 nnx   zb_h1            1 8 -               -  full      adamw         -     -       sync          -
2x2x1 nnx   1f1b             1 4 -               -  none      adamw         zero1 -       sync          -
1x2x1 linen zb_v             2 4 1,1,1,2         -  none      lamb          zero1 dropout sync          -
2x2x1 linen 1f1b             1 2 -               -  none      adamw         zero1 -       vertical_sync -
1x2x2 nnx   1f1b             1 4 -               -  none      adamw         -     dropout 2bw           -
2x1x1 nnx   gpipe            1 2 -               -  none      adam          -     dropout sync          -
1x4x1 nnx   1f1b             1 4 -               -  none      adamw         -     -       stash         momentum,1,1
2x2x1 nnx   zb_h2            1 4 -               -  none      lamb          zero1 -       delay:2       -
2x2x1 nnx   breadth_first    3 4 1,1,1,1,1,1     -  none      adamw,streams zero1 -       sync          -
1x4x1 linen interleaved_1f1b 2 8 1,1,1,1,1,1,1,1 -  full      sgd           -     -       2bw           -
2x4x1 linen zb_h1            1 4 -               -  none      adamw         zero1 dropout 2bw           -
1x2x1 linen dual_pipe_v      2 4 -               -  full      adamw         zero1 -       sync          -
2x2x2 nnx   interleaved_1f1b 2 4 -               -  full      adamw         zero1 -       sync          -
2x1x4 nnx   gpipe            1 2 -               -  none      sgd           zero1 -       sync          -
1x2x4 linen zb_v             2 4 -               -  none      adamw         -     dropout stash         momentum,1,1
2x2x2 fused 1f1b             1 4 -               -  none      lamb          zero1 dropout 2bw           -
2x1x4 fused zb_h1            1 2 -               -  full      adamw         -     -       sync          -
2x2x1 nnx   zb_h1            1 4 3,1             -  none      own:clipped   zero1 -       sync          -
1x2x1 linen 1f1b             1 2 -               -  full      own:lamb      zero1 -       2bw           -
2x2x1 linen 1f1b             1 2 -               -  none      own:belief    zero1 -       sync          -
2x2x1 sow   interleaved_1f1b 2 4 -               -  full      adamw         zero1 dropout sync          -
1x4x1 sow   1f1b             1 4 -               -  none      lamb          -     -       stash         -
2x2x1 sow   breadth_first    3 4 1,1,1,1,1,1     -  none      adamw,streams zero1 -       sync          -
1x2x2 sown  1f1b             1 4 3,1             -  none      adamw         -     dropout vertical_sync -
2x1x1 pair  gpipe            1 2 -               -  none      adamw         -     -       sync          -
2x2x2 pair  1f1b             1 4 -               -  none      adamw         zero1 -       2bw           -
2x2x2 nnx   interleaved_1f1b 2 4 -               sp full      lamb          zero1 dropout 2bw           -
1x2x4 nnx   zb_v             2 4 1,1,1,2         sp none      adamw         -     -       sync          -
1x2x2 linen zb_h1            1 4 -               sp none      adamw         zero1 dropout sync          -
2x1x4 fused gpipe            1 2 -               sp none      adamw         -     -       sync          -
1x2x2 nnx   breadth_first    3 4 1,1,1,1,1,1     sp none      adamw,streams -     -       sync          -
1x2x2 fused 1f1b             1 4 -               sp full      sgd           -     -       stash         momentum,1,1
1x2x2 sown  1f1b             1 4 -               sp none      adamw         -     dropout vertical_sync -
""")


@pytest.mark.parametrize("case", [*LAYOUTS, *(pytest.param(each, marks=pytest.mark.long) for each in FURTHER)], ids=str)
def test_every_layout_trains_as_plain_flax_does(case: Case, tiny_config: Config) -> None:
    check_layout(case, tiny_config)


def losses(config: Config, number: int = 3) -> list[float]:
    return [record["loss"] for record in Trainer(config).steps(number)]


@pytest.mark.long
def test_dropout_is_the_same_on_every_layout(config: Config) -> None:
    config.model.dropout = 0.2
    config.mesh.data, config.mesh.pipe, config.pipeline.num_microbatches = 1, 4, 2  # microbatches of 8, not of 2
    wide = losses(config)
    config.mesh.data, config.mesh.pipe, config.pipeline.num_microbatches = 2, 2, 4
    assert losses(config) == pytest.approx(wide, rel=1e-5)
    config.model.dropout = 0.0
    assert losses(config) != pytest.approx(wide, rel=1e-3)


def test_it_is_evaluated_and_its_checkpoint_restored_elsewhere(config: Config, tmp_path: pathlib.Path) -> None:
    config.model.dropout, config.optimizer.zero1 = 0.1, True
    trainer = Trainer(config)
    list(trainer.steps(2))
    with Checkpoints(tmp_path) as checkpoints:
        trainer.save(checkpoints)
    other = copy.deepcopy(config)
    other.mesh.data, other.mesh.pipe, other.pipeline.schedule = 1, 4, "zb_h1"
    restored = Trainer(other)
    with Checkpoints(tmp_path) as checkpoints:
        assert restored.restore(checkpoints)
    chex.assert_trees_all_equal(restored.weights(), trainer.weights())
    assert restored.evaluate()["eval_loss"] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)
    with pytest.raises(ConfigError, match=r"^model.family=nnx cannot go on with a text: .* apply its modules"):
        "".join(restored.generate("def ", 2))


def test_losses_of_blocks_are_recorded_scaled_as_that_of_the_head_and_left_out_of_evaluation(config: Config) -> None:
    plain = Trainer(config)
    config.model.family = "pair"  # of the same weights
    trainer = Trainer(config)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)
    source, state, batch = trainer._program.source, trainer.state, a_batch(config)
    gradients = jax.jit(source.gradients)
    loss, grads, _ = gradients(state, batch)
    scaled, times_8, _ = gradients(state._replace(scaling=Scaling(jnp.full(1, 8.0), jnp.int32(0))), batch)
    chex.assert_trees_all_close(scaled, loss, rtol=1e-6)  # the whole, and what layers add
    different = optax.tree.norm(jax.tree.map(lambda one, eight: 8 * one - eight, grads, times_8))
    assert different < 1e-5 * optax.tree.norm(times_8)
    ((record,), (without,)) = (list(each.steps(1)) for each in (trainer, plain))
    assert 0 < record["layer_loss"] == pytest.approx(record["loss"] - without["loss"], rel=1e-4)
    assert describe_loss(record) == f"loss {record['loss']:.4f} ({record['layer_loss']:.4f} of layers)"
    assert "layer_loss" not in without


class OwnLoss(Loss):
    pass


class Sown(modules.Block):
    """Adds the loss of `modules.Pair` in another way."""

    def __call__(self, x: jax.Array) -> jax.Array:
        y: jax.Array = super().__call__(x)
        self.add(0.1 * jnp.mean(self.up(y) ** 2))
        return y

    def add(self, loss: jax.Array) -> None:
        self.sow(OwnLoss, "of_its_own_type", loss)


class Halves(Sown):
    def add(self, loss: jax.Array) -> None:
        for _ in range(2):
            self.sow(Loss, "half", loss / 2, init_fn=lambda: 0.0, reduce_fn=lambda total, each: total + each)


class Assigned(Sown):
    def add(self, loss: jax.Array) -> None:
        self.balance = Loss(loss)


class Both(modules.Pair):
    def __call__(self, x: jax.Array) -> Any:
        y, loss = super().__call__(x)
        self.sow(Loss, "half", loss / 2)
        return y, loss / 2, 0.0


@pytest.mark.parametrize(
    "block", [Both, *(pytest.param(each, marks=pytest.mark.long) for each in (Sown, Halves, Assigned))]
)
def test_a_block_may_add_its_loss_in_any_way(block: Any, config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    config.model.family = "pair"
    expected = losses(config, 2)
    monkeypatch.setitem(FAMILIES, "pair", family(embed=modules.Embed, block=block, head=modules.Head))
    assert losses(config, 2) == pytest.approx(expected, rel=1e-6)


class Frugal(modules.Block):
    """Saves its input alone."""

    def __call__(self, x: jax.Array) -> jax.Array:
        computed: jax.Array = nnx.remat(modules.Block.__call__)(self, x)
        return computed


FRUGAL = family(embed=modules.Embed, block=Frugal, head=modules.Head)


def test_what_a_block_makes_again_is_not_saved(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = predicted(make_program(config).config).stash
    monkeypatch.setitem(FAMILIES, "nnx", FRUGAL)
    found = predicted(make_program(config).config).stash
    config.pipeline.recompute = "full"
    assert found == predicted(make_program(config).config).stash < saved / 10


@pytest.mark.long
def test_what_a_block_makes_again_changes_no_loss(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = losses(config)
    monkeypatch.setitem(FAMILIES, "nnx", FRUGAL)
    assert losses(config) == pytest.approx(expected, rel=1e-6)


def test_flops_and_parameters_are_those_of_the_same_gpt(config: Config) -> None:
    plain = copy.deepcopy(config)
    plain.model.family = "gpt"
    assert model_flops(config) == model_flops(plain)
    assert num_parameters(config) == num_parameters(plain)


@pytest.mark.parametrize(
    ("name", "schedule", "recompute"),
    [
        ("nnx", "1f1b", "none"),
        pytest.param("nnx", "zb_h1", "none", marks=pytest.mark.long),
        pytest.param("linen", "1f1b", "full", marks=pytest.mark.long),
    ],
)
def test_memory_is_predicted(name: str, schedule: str, recompute: str, config: Config) -> None:
    config.model.hidden_size, config.model.seq_len, config.model.vocab_size = 128, 256, 512
    config.model.family, config.model.ffn_size, config.mesh.data = name, 384, 1
    config.pipeline.schedule, config.pipeline.recompute = schedule, recompute
    program = make_program(config)
    assert temporaries(predicted(program.config)) == pytest.approx(temporary_bytes(program, program.step), rel=0.1)


class Gated(nnx.Module):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.gate, self.value, self.down = (
            nnx.Linear(*sizes, use_bias=False, rngs=rngs)
            for sizes in [(hidden, units), (hidden, units), (units, hidden)]
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.sigmoid(self.gate(x)) * self.value(x))


def test_what_elementwise_work_makes_from_other_arrays_is_not_saved(
    config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=modules.Embed, block=Gated, head=modules.Head))
    (operation,) = network_of(config).operations
    assert isinstance(operation, Traced)
    # The input and the results of two products; of these the sigmoid, its derivative and the last product's input.
    sizes = [config.model.seq_len * width for width in (config.model.hidden_size, *2 * [config.model.mlp_size])]
    assert sorted(each.elements for each in operation.saves) == [PerSequence(0, size) for size in sorted(sizes)]


class Merged(modules.Block):
    """Merges examples and positions: of one example a rank has parts along positions then, of two along pieces."""

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        y = self.up((flat * nnx.sigmoid(flat)).reshape(-1, 4, x.shape[-1])).reshape(len(flat), -1)
        return x + self.down(nnx.tanh(y)).reshape(x.shape)


def test_what_one_sequence_saves_may_differ_from_what_two_save(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=modules.Embed, block=Merged, head=modules.Head))
    config.mesh.data, config.mesh.tensor, config.mesh.sequence_parallel = 1, 2, True
    (operation,) = network_of(config).operations
    assert isinstance(operation, Traced)
    assert all(array.elements.each > 0 or array.elements.fixed > 0 for array in operation.saves)


def test_it_is_planned(config: Config) -> None:
    config.model.dtype, config.data.global_batch_size = "bfloat16", 64
    problem = Problem(config, load_topology("a100_80"), 8)
    assert {layout.mesh.tensor for layout in layouts(problem)} == {1, 2, 4}
    assert {layout.recompute for layout in layouts(problem)} == {"none", "full"}
    assert search(problem, keep=2).plans


def test_the_exchange_of_its_tensor_ranks_is_that_of_the_same_gpt(config: Config) -> None:
    def exchange(name: str, *, sequence_parallel: bool) -> float:
        config.model.family, mesh = name, MeshConfig(tensor=4, sequence_parallel=sequence_parallel)
        cost = CostModel(config, load_topology("a100_80"))
        return cost.microbatch(mesh, num_microbatches=1, recompute="none").exchange

    expected = exchange("gpt", sequence_parallel=False)
    assert exchange("nnx", sequence_parallel=False) == pytest.approx(expected)
    # The backward pass brings the inputs of two products together again, which a GPT saves: half a sum each.
    assert exchange("nnx", sequence_parallel=True) == pytest.approx(expected * 5 / 4)


def shared(name: str, config: Config) -> dict[str, int]:
    """The dimensions of a block's weights of which each of two tensor ranks has a part."""
    config.model.family, config.mesh.tensor = name, 2
    axes = {
        ".".join(str(key.key) for key in path): parameter.axes
        for path, parameter in jax.tree_util.tree_leaves_with_path(network_of(config).layer)
    }
    return {path: each.index("features") for path, each in axes.items() if "features" in each}


@pytest.mark.parametrize(
    ("block", "columns", "rows"),
    [
        (modules.Named, "up.kernel", "down.kernel"),
        pytest.param(modules.LinenNamed, "embed_mlp.kernel", "mlp_embed.kernel", marks=pytest.mark.long),
    ],
)
def test_names_of_axes_say_what_tensor_ranks_share(
    block: Any, columns: str, rows: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named(**rules: str | None) -> dict[str, int]:
        made = family(embed=modules.Embed, block=block, head=modules.Head, rules=rules or None)
        monkeypatch.setitem(FAMILIES, "named", made)
        return shared("named", config)

    assert named(embed=None, mlp="tensor") == {columns: 1, rows: 0}
    assert named(embed="tensor", mlp=None) != {columns: 1, rows: 0}
    assert named() == {columns: 1, rows: 0}  # what a search finds; it does not read names
    expected = losses(config, 2)
    named(embed="tensor", mlp=None)
    assert losses(config, 2) == pytest.approx(expected, rel=1e-5)
    with pytest.raises(ConfigError, match=r"of block has the logical axis 'embed', which no rule of its family maps"):
        named(mlp="tensor")
    config.model.ffn_size = 63
    with pytest.raises(
        ConfigError, match=r"of block is \[\d+, \d+\], and mesh\.tensor=2 does not divide .* axis 'mlp'"
    ):
        named(embed=None, mlp="tensor")
    with pytest.raises(ConfigError, match=r"rules='mlp'\): rules are a dictionary"):
        family(embed=modules.Embed, block=block, head=modules.Head, rules="mlp")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"maps 'mlp' to 'data'; it maps a logical axis to 'tensor', or to None"):
        named(mlp="data")


def test_ranks_share_a_fused_projection_that_each_has_whole(config: Config) -> None:
    assert shared("fused", config) == {"up.kernel": 1, "up.bias": 0, "down.kernel": 0, "out.kernel": 0}
    layer = network_of(config).layer
    assert layer["qkv"]["kernel"].partial == layer["qkv"]["bias"].partial == ("tensor",)
    (operation,) = network_of(config).operations
    assert {each.split for each in operation.products} == {"outputs", "inputs"}


class Searching(modules.Block):
    """Doubles its input until that is large: as often for each example as it needs."""

    def __call__(self, x: jax.Array) -> jax.Array:
        large = jax.vmap(lambda x: jax.lax.while_loop(lambda x: jnp.sum(x) < 30, lambda x: 2 * x + 0.1, x))
        return super().__call__(x) + 0.01 * large(jax.lax.stop_gradient(jnp.abs(x)))


def test_a_loop_ends_for_each_example_by_itself(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=modules.Embed, block=Searching, head=modules.Head))
    functions = make_model(config)._functions  # type: ignore[attr-defined]
    x = jnp.linspace(0.1, 3.0, 3)[:, None, None] * jnp.ones((3, 16, 32))
    weights = jax.jit(functions.parts["layers"].init)(jax.random.key(0))
    expected = functions.plain["block"](weights, x, None)
    assert jnp.allclose(jax.jit(alone(functions.plain["block"]))(weights, x, None), expected, rtol=1e-5)


def test_what_stays_whole_is_told_once(
    config: Config, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rules = {"embed": None, "mlp": "tensor"}
    made = family(embed=modules.Embed, block=modules.Named, head=modules.Head, rules=rules)
    monkeypatch.setitem(FAMILIES, "named", made)
    config.model.family, config.mesh.tensor = "named", 2
    Trainer(config)
    config.mesh.data = 1
    Trainer(config)
    (message,) = {each.getMessage() for each in caplog.records if "tensor rank has" in each.getMessage()}
    assert "all of square.kernel, 11% of a layer's weights, and computes what the other ranks compute" in message
    caplog.clear()
    config.mesh.sequence_parallel = True  # then a rank computes with it at its own positions
    Trainer(config)
    (message,) = {each.getMessage() for each in caplog.records if "tensor rank has" in each.getMessage()}
    assert "each tensor rank has all of square.kernel, 11% of a layer's weights. Its rules cut what has" in message
