"""Flax modules, and settings, that a pipeline cannot run: each is refused with its rule and a remedy."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from fiddlex.config import Config
from fiddlex.config.families import FAMILIES
from fiddlex.errors import ConfigError
from fiddlex.flax import Loss, family
from fiddlex.train.trainer import Trainer
from tests.flax import modules
from tests.flax.test_family import Sown, losses


class Normalised(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.batch = nnx.BatchNorm(config.hidden_size, rngs=rngs)


class Adding(modules.Block):
    """Leaves a loss for whoever called it."""

    def __call__(self, x: jax.Array) -> jax.Array:
        self.balance = nnx.Intermediate(jnp.mean(x))
        return super().__call__(x)


class Remembering(modules.Block):
    """Counts its calls, in a layer that the backward pass runs again."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x: jax.Array) -> jax.Array:
        def called(self: Any, x: jax.Array) -> jax.Array:
            self.calls[...] += 1
            return super().__call__(x)

        computed: jax.Array = nnx.remat(called)(self, x)
        return computed


class Rounded(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.last = nnx.Linear(config.hidden_size, config.hidden_size, param_dtype=jnp.bfloat16, rngs=rngs)


class Masked(modules.Block):
    def __call__(self, x: jax.Array, mask: jax.Array, deterministic: bool) -> jax.Array:  # type: ignore[override]
        return super().__call__(x)


class Pair(modules.Block):
    def __call__(self, x: jax.Array) -> Any:
        return super().__call__(x), x


class Nothing(modules.Block):
    def __call__(self, x: jax.Array) -> Any:
        return super().__call__(x), None


class InTraining(Sown):
    def add(self, loss: jax.Array) -> None:
        if not self.dropout.deterministic:
            self.sow(Loss, "balance", loss)


class Kept(Sown):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.balance = Loss(jnp.zeros(()))

    def add(self, loss: jax.Array) -> None:
        self.balance[...] = loss


class Sowing(modules.Embed):
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x: jax.Array = super().__call__(tokens)
        self.sow(Loss, "size", jnp.mean(x))
        return x


class Wide(modules.Head):
    def __call__(self, x: jax.Array, embed: Any) -> jax.Array:
        return jnp.concatenate([super().__call__(x, embed)] * 2, axis=-1)


class Dropping(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


class Noisy(modules.Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        return super().__call__(x) + jax.random.normal(jax.random.key(0), x.shape)


class Random(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.offset = nnx.Variable(jax.random.normal(rngs.params(), (config.hidden_size,)))


class Counting(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return linen.BatchNorm(use_running_average=True)(x)


class Together(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.scales = nnx.Param({"a": jnp.ones(config.hidden_size), "b": jnp.ones(config.hidden_size)})


class Streamless(modules.Block):
    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.further = nnx.Dict(drop=nnx.Dropout(0.1))


class OfNoise(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x + jax.random.normal(self.make_rng("noise"), x.shape)


class LinenFailing(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return x * jnp.ones(7)


class Failing(modules.Block):
    def __call__(self, x: jax.Array) -> jax.Array:
        return x @ self.nothing  # type: ignore[no-any-return]


class Tied(linen.Module):
    """Scores with the table of an embedding that is made in a compact call."""

    config: Any

    @linen.compact
    def __call__(self, x: jax.Array, embed: Any) -> jax.Array:
        return x @ embed.table.T  # type: ignore[no-any-return]


class Inheriting(Failing):
    pass


@pytest.mark.parametrize(
    ("replaced", "message"),
    [
        ({"block": Normalised}, r"block keeps batch\.mean, a nnx.BatchStat, .*LayerNorm in place"),
        (
            {"block": Adding},
            r"block keeps balance, a nnx\.Intermediate, which a call changes\. .*let it sow fiddlex\.flax\.Loss only",
        ),
        ({"block": Remembering}, r"block keeps calls, a nnx\.Variable, which a call changes\. .*would lose the change"),
        ({"block": Counting}, r"block keeps the collection 'batch_stats', .*use a module without"),
        ({"block": Random}, r"block keeps offset, random numbers outside a nnx.Param\. .*make it a nnx.Param"),
        ({"block": Rounded}, r"block has last\.bias in bfloat16\. .*param_dtype=float32"),
        ({"block": lambda config: nnx.Linear(32, 32, rngs=nnx.Rngs(0))}, r"block is made without `rngs`; let it take"),
        ({"block": linen.Dense(32)}, r"block is a module; give its class, or a function that"),
        ({"block": Masked}, r"block is called with mask too, which fiddlex cannot give\. .*wrap the module"),
        ({"block": Pair}, r"block returns or sows float32\[1, 16, 32\] beside .*floating-point numbers"),
        ({"block": Nothing}, r"block returns or sows a NoneType beside its activations\."),
        ({"block": InTraining}, r"block adds a loss only where it is to drop something\. .*in every call"),
        ({"block": Kept}, r"block keeps balance, a nnx\.Loss, which a call changes"),
        ({"embed": Sowing}, r"embed sows a loss, which only a block may: let the block sow it"),
        (
            {"head": Wide},
            r"head returns float32\[1, 16, 514\] .*must return float32\[1, 16, 257\], logits of",
        ),
        ({"block": Dropping}, r"block drops activations at a rate of its own, and model\.dropout=0: .*config\.dropout"),
        ({"block": Noisy}, r"block draws random numbers where it is to drop nothing, .*by `rngs`"),
        (
            {"embed": lambda config: 3},
            r"embed makes int; it must make a flax.nnx.Module from the config and `rngs`, or a flax.l",
        ),
        ({"block": Together}, r"block has scales, a nnx.Param that holds a dict in .*\. Make a nnx.Param of each"),
        (
            {"embed": modules.LinenEmbed, "head": Tied},
            r"head uses what embed has only .*\. Let LinenEmbed make its submodules in `setup`",
        ),
        ({"block": Streamless}, r"block\.further\.drop is a nnx\.Dropout without random .*: make it with rngs"),
        ({"block": OfNoise}, r"block asks for random numbers .*PRNG for .noise. .*The only stream is 'dropout'"),
        ({"block": Failing}, r"test_refused_modules\.py, line \d+: AttributeError: .*nothing"),
        ({"block": Inheriting}, r"test_refused_modules\.py, line \d+: AttributeError: .*nothing"),
        ({"block": LinenFailing}, r"test_refused_modules\.py, line \d+: \w+Error: .*shapes"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_a_pipeline_cannot_run_is_told(
    replaced: dict[str, Any], message: str, config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = {"embed": modules.Embed, "block": modules.Block, "head": modules.Head} | replaced
    monkeypatch.setitem(FAMILIES, "nnx", family(**parts))
    config.mesh.tensor = 2
    with pytest.raises(ConfigError, match=message):
        Trainer(config)


class Routed(nnx.Module):
    """Each position has one of four experts, by products that `jax.vmap` does not take. Keeps tables in a tuple."""

    def __init__(self, config: Any, *, rngs: nnx.Rngs):
        hidden, shape = config.hidden_size, (4, config.hidden_size, config.hidden_size)
        self.router = nnx.Linear(hidden, 4, rngs=rngs)
        self.kernels = nnx.Param(nnx.initializers.normal(0.2)(rngs.params(), shape))
        self.tables, self.cache = nnx.Variable((jnp.full(hidden, 1.5), jnp.full(hidden, 0.5))), nnx.Cache(None)

    def __call__(self, x: jax.Array) -> jax.Array:
        flat = x.reshape(-1, x.shape[-1])
        shares = jax.nn.softmax(self.router(flat))
        order, (scale, offset) = jnp.argsort(shares.argmax(-1)), self.tables.get_value()
        sizes = jnp.bincount(shares.argmax(-1), length=4)
        y = jax.lax.ragged_dot(flat[order] * scale + offset, self.kernels.get_value(), sizes)
        return x + (y[jnp.argsort(order)] * shares.max(-1, keepdims=True)).reshape(x.shape)


@pytest.fixture
def routed(config: Config, monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.setitem(FAMILIES, "nnx", family(embed=modules.Embed, block=Routed, head=modules.Head))
    return config


@pytest.mark.long
def test_what_takes_no_single_examples_runs_where_nothing_is_dropped(routed: Config) -> None:
    expected = losses(routed, 2)
    routed.mesh.data, routed.mesh.tensor, routed.mesh.sequence_parallel = 1, 2, True
    assert losses(routed, 2) == pytest.approx(expected, rel=1e-5)


def test_what_takes_no_single_examples_is_refused_where_something_is_dropped(routed: Config) -> None:
    routed.model.dropout = 0.1
    with pytest.raises(
        ConfigError, match=r"^.*: block cannot be called for one example at a time, as under model\.dro"
    ):
        Trainer(routed)


@pytest.mark.parametrize(
    ("section", "field", "value", "message"),
    [
        ("mesh", "collective_matmul", True, r"^mesh.collective_matmul=True with model.family=nnx: "),
        (
            "pipeline",
            "recompute",
            "gelu",
            r"^pipeline.recompute=gelu with model.family=nnx: .* Use none or full, or",
        ),
    ],
)
def test_what_needs_the_parts_of_layers_is_refused(
    section: str, field: str, value: Any, message: str, config: Config
) -> None:
    config.mesh.tensor, config.mesh.sequence_parallel = 2, True
    setattr(getattr(config, section), field, value)
    with pytest.raises(ConfigError, match=message):
        config.validate()
