"""Flax modules that know nothing of fiddlex, of NNX and of Linen, and the plain loss of each on one device."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from fiddlex.config import Config
from fiddlex.flax import Loss, family
from tests.reference import compiled

Tree = Any


class Embed(nnx.Module):
    def __init__(self, config, *, rngs):
        self.tokens = nnx.Embed(config.vocab_size, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.positions = nnx.Embed(config.seq_len, config.hidden_size, dtype=config.dtype, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, tokens):
        return self.dropout(self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[-1])))


class Block(nnx.Module):
    """Of GPT: LayerNorm before attention and MLP. It has a list of layers, and an array that is no parameter."""

    def __init__(self, config, *, rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.norms = nnx.List([nnx.LayerNorm(hidden, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(config.num_heads, hidden, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(hidden, units, rngs=rngs), nnx.Linear(units, hidden, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.causal = jnp.tril(jnp.ones((config.seq_len, config.seq_len), bool))

    def __call__(self, x):
        x = x + self.dropout(self.attention(self.norms[0](x), mask=self.causal))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Head(nnx.Module):
    """Scores with the embedding's table."""

    def __init__(self, config, *, rngs):
        self.norm = nnx.LayerNorm(config.hidden_size, rngs=rngs)

    def __call__(self, x, embed):
        return embed.tokens.attend(self.norm(x))


class LinenEmbed(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, tokens):
        return linen.Embed(self.config.vocab_size, self.config.hidden_size)(tokens)


class LinenBlock(linen.Module):
    """RMSNorm, attention to all earlier positions by a running mean in a scan, and an MLP with exact GELU."""

    config: Any

    @linen.compact
    def __call__(self, x, deterministic: bool):
        config = self.config
        y = linen.Dense(config.hidden_size, use_bias=False)(linen.RMSNorm()(x))

        def mean(total, y_t):  # starts from zeros, which do not vary over devices
            total = 0.9 * total + y_t
            return total, total

        _, y = jax.lax.scan(mean, jnp.zeros_like(y, shape=(len(y), config.hidden_size)), y.swapaxes(0, 1))
        x = x + linen.Dropout(config.dropout, deterministic=deterministic)(y.swapaxes(0, 1))
        y = linen.gelu(linen.Dense(config.mlp_size)(linen.RMSNorm()(x)), approximate=False)
        return x + linen.Dropout(config.dropout, deterministic=deterministic)(linen.Dense(config.hidden_size)(y))


class Fused(Block):
    """With one kernel for queries, keys and values, of which tensor ranks use three pieces each."""

    def __init__(self, config, *, rngs):
        super().__init__(config, rngs=rngs)
        del self.attention
        self.heads = config.num_heads
        self.qkv, self.out = (nnx.Linear(config.hidden_size, width * config.hidden_size, rngs=rngs) for width in (3, 1))

    def __call__(self, x):
        q, k, v = (
            each.reshape(*x.shape[:2], self.heads, -1) for each in jnp.split(self.qkv(self.norms[0](x)), 3, axis=-1)
        )
        x = x + self.dropout(self.out(nnx.dot_product_attention(q, k, v, mask=self.causal).reshape(x.shape)))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class Pair(Block):
    """Returns a loss beside its activations."""

    def __call__(self, x):
        y = super().__call__(x)
        return y, 0.1 * jnp.mean(self.up(y) ** 2)


class Sown(Block):
    """Sows two losses."""

    def __call__(self, x):
        y = super().__call__(x)
        self.sow(Loss, "size", 0.1 * jnp.mean(y**2))
        self.sow(Loss, "change", 0.2 * jnp.mean(jnp.abs(self.down(self.up(y - x)))))
        return y


class Sow(linen.Module):
    """The same of Linen."""

    config: Any

    @linen.compact
    def __call__(self, x, deterministic: bool):
        y = LinenBlock(self.config)(x, deterministic)
        for _ in range(2):
            self.sow("losses", "size", 0.1 * jnp.mean(linen.Dense(8)(y) ** 2))
        self.sow("intermediates", "output", y)
        return y


class Named(nnx.Module):
    """An MLP whose parameters have logical axes."""

    def __init__(self, config, *, rngs):
        def linear(inputs, outputs, *names):
            init = nnx.with_partitioning(nnx.initializers.lecun_normal(), names)
            return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)

        hidden, units = config.hidden_size, config.mlp_size
        self.norm = nnx.LayerNorm(hidden, rngs=rngs)
        self.up, self.down = linear(hidden, units, "embed", "mlp"), linear(units, hidden, "mlp", "embed")
        self.square = linear(hidden, hidden, "embed", None)

    def __call__(self, x):
        return x + self.square(self.down(nnx.gelu(self.up(self.norm(x)))))


class LinenNamed(linen.Module):
    """The same of Linen."""

    config: Any

    @linen.compact
    def __call__(self, x):
        def dense(units, *names):
            init = linen.with_logical_partitioning(linen.initializers.lecun_normal(), names)
            return linen.Dense(units, use_bias=False, kernel_init=init, name="_".join(map(str, names)))

        y = linen.gelu(dense(self.config.mlp_size, "embed", "mlp")(linen.LayerNorm()(x)))
        y = dense(self.config.hidden_size, "mlp", "embed")(y)
        return x + dense(self.config.hidden_size, "embed", None)(y)


class LinenHead(linen.Module):
    config: Any

    @linen.compact
    def __call__(self, x):
        sharpness = self.param("sharpness", linen.initializers.ones, ()).astype(x.dtype)
        return sharpness * linen.Dense(self.config.vocab_size, use_bias=False, name="output")(linen.RMSNorm()(x))


NNX = family(embed=Embed, block=Block, head=Head)
LINEN = family(embed=LinenEmbed, block=LinenBlock, head=LinenHead)


def plain_loss(embed: Any, block: Any, head: Any) -> Callable[[Tree, Tree, jax.Array, Config], jax.Array]:
    """The loss of three modules, of NNX or Linen, that are called one after another on one device.

    A head that takes the module `embed` scores with its part `tokens`, whose weights `head` has too.
    """

    def bound(kind: Any, values: Tree, config: Config) -> Any:
        if not issubclass(kind, nnx.Module):
            return kind(config.model).bind({"params": values})
        made = kind(config.model, rngs=nnx.Rngs(0))
        flat = dict(_flat(values))
        for path, variable in nnx.to_flat_state(nnx.state(made, nnx.Param)):
            variable.set_value(flat.pop(tuple(map(str, path))))
        assert not flat
        return made

    def called(kind: Any, values: Tree, key: jax.Array | None, x: jax.Array, config: Config, **others: Any) -> Any:
        if "deterministic" in inspect.signature(kind.__call__).parameters:
            others["deterministic"] = False
        if not issubclass(kind, nnx.Module):
            rngs = {} if key is None else {"dropout": key}
            y, sown = kind(config.model).apply({"params": values}, x, **others, rngs=rngs, mutable=["losses"])
            return (y, sum(jax.tree.leaves(sown))) if sown else y
        made = bound(kind, values, config)
        if key is not None:
            nnx.reseed(made, default=jax.random.fold_in(key, 0))
        y, sown = nnx.capture(made, Loss)(x, **others)
        return (y, sum(jax.tree.leaves(sown))) if sown else y

    def part(kind: Any) -> Callable[..., jax.Array]:
        def computed(values: Tree, x: jax.Array, layer: int, step: jax.Array, table: Tree, config: Config) -> jax.Array:
            others = {}
            if "embed" in inspect.signature(kind.__call__).parameters:
                others["embed"] = bound(embed, table, config)
            if not config.model.dropout:
                return called(kind, values, None, x, config, **others)

            def one(key: jax.Array, x: jax.Array) -> Any:
                y = called(kind, values, key, x[None], config, **others)
                return (y[0][0], y[1]) if isinstance(y, tuple) else y[0]

            return _by_example(one, x, layer, step, config)

        return computed

    embedded, of_layer, scored = map(part, (embed, block, head))

    def loss(weights: Tree, batch: Tree, number: jax.Array, config: Config) -> jax.Array:
        num_layers, table = len(weights["layers"]), weights["embedding"]
        x = compiled(embedded, config)(table, batch["tokens"], num_layers, number, {})
        added = 0.0
        for layer, values in enumerate(weights["layers"]):
            result = compiled(of_layer, config)(values, x, layer, number, {})
            x, *losses = result if isinstance(result, tuple) else (result,)
            added += sum(each.mean() for each in losses)
        values = dict(weights["head"])
        table = table | {"tokens": values.pop("tokens")}
        logits = compiled(scored, config)(values, x, num_layers + 1, number, table)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean() + added

    return loss


FUSED = family(embed=Embed, block=Fused, head=Head)
WITH_LOSSES = {
    "pair": family(embed=Embed, block=Pair, head=Head),
    "sow": family(embed=LinenEmbed, block=Sow, head=LinenHead),
    "sown": family(embed=Embed, block=Sown, head=Head),
}
LOSSES = {
    "pair": plain_loss(Embed, Pair, Head),
    "sow": plain_loss(LinenEmbed, Sow, LinenHead),
    "sown": plain_loss(Embed, Sown, Head),
    "nnx": plain_loss(Embed, Block, Head),
    "linen": plain_loss(LinenEmbed, LinenBlock, LinenHead),
    "fused": plain_loss(Embed, Fused, Head),
}


def _by_example(call: Any, x: jax.Array, layer: int, step: jax.Array, config: Config) -> jax.Array:
    """Keys as docs/flax.md has them: seed → 1 → step → example → layer."""
    fold = jax.random.fold_in
    key = fold(fold(jax.random.key(config.train.seed), 1), step)
    return jax.vmap(lambda example, x: call(fold(fold(key, example), layer), x))(jnp.arange(len(x)), x)


def _flat(tree: Tree, before: tuple[str, ...] = ()) -> Any:
    for name, each in tree.items():
        yield from _flat(each, (*before, name)) if isinstance(each, dict) else [((*before, name), each)]
