"""fiddlex's families as plain Flax modules for one device: `GPT`, `Llama` and `Bert`, made from `config.model`.

They compute what the families compute, for notebooks, analysis and plain loops, and know no mesh and no pipeline.
`fiddlex.flax.load` gives them the weights of a run. With dropout, `train()` lets them drop activations and `eval()`
not; the masks are Flax's, and not those of a run.

Shape suffixes: B example, S position, H hidden, N head of queries, K head of keys and values, D head size, V
vocabulary, C class.
"""

import copy
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fiddlex.config import ModelConfig
from fiddlex.errors import ConfigError
from fiddlex.models.descriptions import NUM_TOKEN_TYPES, residual_std
from fiddlex.models.rotary import angular_frequencies
from fiddlex.models.task_sizes import PAIR_CLASSES


class Decoder(nnx.Module):
    """What `GPT` and `Llama` have in common: `module(tokens)` gives the logits of the next token."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        _check_family(self, config)
        self.config = copy.copy(config)
        self.tokens = _table(config.vocab_size, config, rngs)
        self.positions = None if _is_llama(config) else _table(config.seq_len, config, rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = _norm(config.hidden_size, config, rngs)
        self.output = None if config.tied_embeddings else _table(config.vocab_size, config, rngs)

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        """Logits of the next token, float32 [B, S, V], from tokens, int32 of at most `seq_len` positions."""
        places_S = jnp.arange(tokens_BS.shape[1])
        x_BSH = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSH += self.positions(places_S)
        x_BSH = self.dropout(x_BSH)
        for layer in self.layers:
            x_BSH = layer(x_BSH, places_S[:, None] >= places_S)
        scored_by = self.tokens if self.output is None else self.output
        return scored_by.attend(self.norm(x_BSH)).astype(jnp.float32)


class GPT(Decoder):
    """GPT-2 (Radford et al. 2019): LayerNorm before each branch, learned positions."""


class Llama(Decoder):
    """Llama and its descendants: RMSNorm, rotary positions, a gated MLP, heads of keys that queries share."""


class BertOutput(NamedTuple):
    """What `Bert` gives; a part for which the objective has no head is None."""

    hidden_BSH: jax.Array  # what leaves the layers, in pre-LN after the last norm, in model.dtype
    masked_BSV: jax.Array | None  # logits of the token at each position, float32
    label_BC: jax.Array | None  # logits of classes, or in multiple choice the score [B, 1] of each row, float32


class Bert(nnx.Module):
    """BERT (Devlin et al., NAACL 2019), post-LN as published or pre-LN, with the heads of `model.objective`.

    `num_classes` is the number of labels of `model.objective=classification`, and of no use otherwise.
    """

    def __init__(self, config: ModelConfig, *, num_classes: int = 0, rngs: nnx.Rngs):
        _check_family(self, config)
        self.config = copy.copy(config)
        self.tokens = _table(config.vocab_size, config, rngs)
        self.positions = _table(config.seq_len, config, rngs)
        self.token_types = _table(NUM_TOKEN_TYPES, config, rngs)
        self.embedding_norm = _norm(config.hidden_size, config, rngs) if config.post_norm else None
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.norm = None if config.post_norm else _norm(config.hidden_size, config, rngs)
        self.masked = MaskedHead(config, rngs=rngs) if config.task.startswith("mlm") else None
        self.label = None if config.task == "mlm" else LabelHead(config, num_classes, rngs=rngs)

    def __call__(
        self, tokens_BS: jax.Array, segments_BS: jax.Array | None = None, token_types_BS: jax.Array | None = None
    ) -> BertOutput:
        """Hidden states and logits, from int32 arrays [B, S] of at most `seq_len` positions.

        Positions attend to their own segment, and count from its start; by default each row is one segment, and all
        tokens are of type 0, which is the first text of a pair.
        """
        segments_BS = jnp.zeros_like(tokens_BS) if segments_BS is None else segments_BS
        same_BSS = segments_BS[:, :, None] == segments_BS[:, None, :]
        places_BS = jnp.tril(same_BSS, -1).sum(axis=-1)  # how many of the segment come before
        types_BS = jnp.zeros_like(tokens_BS) if token_types_BS is None else token_types_BS
        x_BSH = self.tokens(tokens_BS) + self.positions(places_BS) + self.token_types(types_BS)
        x_BSH = self.dropout(x_BSH if self.embedding_norm is None else self.embedding_norm(x_BSH))
        for layer in self.layers:
            x_BSH = layer(x_BSH, same_BSS[:, None])
        if self.norm is not None:
            x_BSH = self.norm(x_BSH)
        return BertOutput(
            x_BSH,
            None if self.masked is None else self.masked(x_BSH, self.tokens),
            None if self.label is None else self.label(x_BSH),
        )


class MaskedHead(nnx.Module):
    """Scores the vocabulary at each position with the embedding's table."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden = config.hidden_size
        self.transform = _linear((hidden,), (hidden,), config, rngs=rngs)
        self.norm = _norm(hidden, config, rngs)
        self.bias = nnx.Param(jnp.zeros(config.vocab_size))
        self.approximate = config.gelu == "tanh"

    def __call__(self, x_BSH: jax.Array, tokens: nnx.Embed) -> jax.Array:
        x_BSH = self.norm(nnx.gelu(self.transform(x_BSH), approximate=self.approximate))
        return tokens.attend(x_BSH).astype(jnp.float32) + self.bias[...]


class LabelHead(nnx.Module):
    """Classes, or the score of a choice, from the first position."""

    def __init__(self, config: ModelConfig, num_classes: int, *, rngs: nnx.Rngs):
        hidden, last = config.hidden_size, functools.partial(nnx.Linear, dtype=jnp.float32, rngs=rngs)
        last = functools.partial(last, kernel_init=nnx.initializers.normal(config.init_std))
        self.pooler = _linear((hidden,), (hidden,), config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)
        num_classes = num_classes if config.task == "classification" else PAIR_CLASSES
        chooses = config.task == "multiple_choice"
        if not chooses and num_classes < 2:
            raise ConfigError(
                f"Bert with num_classes={num_classes} and model.objective={config.task}: give num_classes=, the number "
                "of its labels (data.labels), at least 2."
            )
        self.score = last(hidden, 1, use_bias=False) if chooses else None
        self.classifier = None if chooses else last(hidden, num_classes)

    def __call__(self, x_BSH: jax.Array) -> jax.Array:
        x_BH = self.dropout(jnp.tanh(self.pooler(x_BSH[:, 0]))).astype(jnp.float32)
        logits_BC: jax.Array = (self.score or self.classifier)(x_BH)  # type: ignore[misc]
        return logits_BC


class Layer(nnx.Module):
    """Attention and MLP, each added to the residual stream; a norm before each, or in post-LN after each sum."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.post_norm = config.post_norm
        self.attention_norm, self.mlp_norm = (_norm(config.hidden_size, config, rngs) for _ in range(2))
        self.attention, self.mlp = Attention(config, rngs=rngs), MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BSH: jax.Array, mask: jax.Array) -> jax.Array:
        """`mask`, bool, broadcasts to [B, N, S, S]: which positions a position attends to."""
        attend = functools.partial(self.attention, mask=mask)
        for branch, norm in ((attend, self.attention_norm), (self.mlp, self.mlp_norm)):
            y_BSH = self.dropout(branch(x_BSH if self.post_norm else norm(x_BSH)))
            x_BSH = norm(x_BSH + y_BSH) if self.post_norm else x_BSH + y_BSH
        return x_BSH


class Attention(nnx.Module):
    """Scaled dot-product attention; in Llama with rotary positions and heads of keys that queries share."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, size, llama = config.hidden_size, config.head_size, _is_llama(config)
        heads, into = (config.num_heads, size), functools.partial(_linear, (hidden,), config=config, rngs=rngs)
        into = functools.partial(into, bias=config.qkv_bias or not llama)
        self.q, self.k, self.v = into(heads), into((config.kv_heads, size)), into((config.kv_heads, size))
        self.out = _linear(heads, (hidden,), config, std=residual_std(config), bias=not llama, rngs=rngs)
        self.q_norm, self.k_norm = (_norm(size, config, rngs) if config.qk_norm else None for _ in range(2))
        self.frequencies = tuple(angular_frequencies(config).tolist()) if llama else ()
        self.dropout = nnx.Dropout(config.dropout, rngs=rngs)

    def __call__(self, x_BSH: jax.Array, mask: jax.Array) -> jax.Array:
        q_BSND, k_BSKD, v_BSKD = self.q(x_BSH), self.k(x_BSH), self.v(x_BSH)
        if self.q_norm is not None and self.k_norm is not None:
            q_BSND, k_BSKD = self.q_norm(q_BSND), self.k_norm(k_BSKD)
        if self.frequencies:
            q_BSND, k_BSKD = _rotated(q_BSND, self.frequencies), _rotated(k_BSKD, self.frequencies)
        shared = q_BSND.shape[2] // k_BSKD.shape[2]
        k_BSND, v_BSND = (jnp.repeat(each, shared, axis=2) for each in (k_BSKD, v_BSKD))
        scores_BNSS = jnp.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND, preferred_element_type=jnp.float32)
        scores_BNSS = jnp.where(mask, scores_BNSS / math.sqrt(q_BSND.shape[-1]), -jnp.inf)
        shares_BNSS = self.dropout(jax.nn.softmax(scores_BNSS).astype(q_BSND.dtype))
        return self.out(jnp.einsum("bnqk,bknd->bqnd", shares_BNSS, v_BSND))


class MLP(nnx.Module):
    """Two products with a GELU between them, or in Llama three with a SiLU as a gate."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, units, llama = (config.hidden_size,), (config.mlp_size,), _is_llama(config)
        self.gate = _linear(hidden, units, config, bias=False, rngs=rngs) if llama else None
        self.up = _linear(hidden, units, config, bias=not llama, rngs=rngs)
        self.down = _linear(units, hidden, config, std=residual_std(config), bias=not llama, rngs=rngs)
        self.approximate = config.gelu == "tanh"

    def __call__(self, x_BSH: jax.Array) -> jax.Array:
        y_BSF = self.up(x_BSH)
        if self.gate is None:
            return self.down(nnx.gelu(y_BSF, approximate=self.approximate))
        return self.down(nnx.silu(self.gate(x_BSH)) * y_BSF)


CLASSES: dict[str, type[GPT | Llama | Bert]] = {"gpt": GPT, "llama": Llama, "bert": Bert}  # by model.family


def _check_family(module: nnx.Module, config: ModelConfig) -> None:
    if CLASSES.get(config.family) is not type(module):
        rule = ", ".join(f"{made.__name__} is model.family={name}" for name, made in CLASSES.items())
        raise ConfigError(f"{type(module).__name__} with model.family={config.family}: {rule}.")


def _is_llama(config: ModelConfig) -> bool:
    return config.family == "llama"


def _table(rows: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.Embed:
    init = nnx.initializers.normal(config.init_std)
    return nnx.Embed(rows, config.hidden_size, dtype=config.dtype, embedding_init=init, rngs=rngs)


def _linear(
    inputs: tuple[int, ...],
    outputs: tuple[int, ...],
    config: ModelConfig,
    *,
    std: float = 0.0,
    bias: bool = True,
    rngs: nnx.Rngs,
) -> nnx.LinearGeneral:
    """A product over the last dimensions; `std` is that of the initial kernel, by default `model.init_std`."""
    return nnx.LinearGeneral(
        inputs,
        outputs,
        axis=tuple(range(-len(inputs), 0)),
        kernel_init=nnx.initializers.normal(std or config.init_std),
        use_bias=bias,
        dtype=config.dtype,
        rngs=rngs,
    )


def _norm(size: int, config: ModelConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    epsilon, dtype = config.layer_norm_epsilon, config.dtype
    if _is_llama(config):
        return nnx.RMSNorm(size, epsilon=epsilon, dtype=dtype, rngs=rngs)
    return nnx.LayerNorm(size, epsilon=epsilon, dtype=dtype, use_fast_variance=False, rngs=rngs)


def _rotated(x_BSND: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Element i of the first half of a head and element i of the second, turned by the position times frequency i."""
    angles_S1D = jnp.arange(x_BSND.shape[1])[:, None, None] * np.asarray(frequencies, np.float32)
    cos, sin = jnp.cos(angles_S1D), jnp.sin(angles_S1D)
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x_BSND.dtype)
