"""The transformer block of GPT-2 and BERT, tensor-parallel inside `shard_map`.

Shape suffixes: B example, S whole sequence, T this rank's part of the sequence (S without sequence parallelism),
H hidden, F this rank's part of the MLP, N this rank's heads, D head size. Weights are written with global shapes and
applied to a device's shard. Attention and MLP are column-parallel then row-parallel products with one reduction each
per direction (Megatron-LM, Shoeybi et al. 2019, section 3); biases after a reduction are added once, after it.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from fiddlex.config import ModelConfig
from fiddlex.models.attention import attend
from fiddlex.models.context import Context
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE
from fiddlex.models.functional import param
from fiddlex.models.operators import add_bias, gelu, layer_norm, product
from fiddlex.parallel.collectives import enter_tensor_parallel, leave_tensor_parallel
from fiddlex.parallel.sharding import LogicalAxes


class LayerNorm(nnx.Module):
    """Layer normalisation over the hidden dimension, computed in float32."""

    def __init__(self, config: ModelConfig):
        self.epsilon = config.layer_norm_epsilon
        self.scale = param(jnp.ones(config.hidden_size), ("hidden",))
        self.bias = param(jnp.zeros(config.hidden_size), ("hidden",))

    def __call__(self, x_BTH: jax.Array) -> jax.Array:
        """Normalises each position; same shape and dtype as the input."""
        return layer_norm(x_BTH, self.scale[...], self.bias[...], self.epsilon)


class Linear(nnx.Module):
    """A kernel and a bias; the products are written where they are used."""

    def __init__(self, shape: tuple[int, ...], axes: LogicalAxes, *, num_inputs: int, std: float, rngs: nnx.Rngs):
        """Draws the kernel from N(0, std²); the bias, zero, has the kernel's dimensions from `num_inputs` on."""
        self.kernel = param(std * jax.random.normal(rngs.params(), shape, jnp.float32), axes)
        self.bias = param(jnp.zeros(shape[num_inputs:]), axes[num_inputs:])


class Attention(nnx.Module):
    """Multi-head self-attention, heads spread over `tensor`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, heads, size = config.hidden_size, config.num_heads, config.head_size
        self.qkv = Linear(
            (hidden, 3, heads, size), ("hidden", None, "heads", None), num_inputs=1, std=config.init_std, rngs=rngs
        )
        self.out = Linear(
            (heads, size, hidden), ("heads", None, "hidden"), num_inputs=2, std=residual_std(config), rngs=rngs
        )

    def __call__(self, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Returns what the residual stream gains, [B, T, H]."""
        x_BSH = enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)
        qkv_BS3ND = add_bias(product(x_BSH, self.qkv.kernel[...]), self.qkv.bias[...])
        q_BSND, k_BSND, v_BSND = jnp.moveaxis(qkv_BS3ND, 2, 0)
        y_BSND = attend(q_BSND, k_BSND, v_BSND, context)
        partial_BSH = product(y_BSND, self.out.kernel[...])
        y_BTH = leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel)
        return add_bias(y_BTH, self.out.bias[...])


class MLP(nnx.Module):
    """Two products with a tanh-approximated GELU between them, hidden units spread over `tensor`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.up = Linear((hidden, units), ("hidden", "mlp"), num_inputs=1, std=config.init_std, rngs=rngs)
        self.down = Linear((units, hidden), ("mlp", "hidden"), num_inputs=1, std=residual_std(config), rngs=rngs)

    def __call__(self, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Returns what the residual stream gains, [B, T, H]."""
        x_BSH = enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)
        y_BSF = gelu(add_bias(product(x_BSH, self.up.kernel[...]), self.up.bias[...]))
        partial_BSH = product(y_BSF, self.down.kernel[...])
        y_BTH = leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel)
        return add_bias(y_BTH, self.down.bias[...])


class Block(nnx.Module):
    """One transformer layer: pre-LN (GPT-2, Radford et al. 2019, section 2.3) or post-LN (BERT, Devlin et al. 2019)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.post_norm = config.post_norm
        self.attention_norm = LayerNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Maps the residual stream through the layer; same shape and dtype as the input."""
        if self.post_norm:
            y_BTH = _drop(self.attention(x_BTH, context), ATTENTION_OUTPUT_SITE, context)
            x_BTH = self.attention_norm(x_BTH + y_BTH)
            return self.mlp_norm(x_BTH + _drop(self.mlp(x_BTH, context), MLP_OUTPUT_SITE, context))
        x_BTH = x_BTH + _drop(self.attention(self.attention_norm(x_BTH), context), ATTENTION_OUTPUT_SITE, context)
        return x_BTH + _drop(self.mlp(self.mlp_norm(x_BTH), context), MLP_OUTPUT_SITE, context)


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of the kernels that write into the residual stream.

    With pre-LN scaled by 1/√(2·layers) (GPT-2); with post-LN the stream is normalised after every sum, and it is that
    of all other kernels (BERT).
    """
    return config.init_std if config.post_norm else config.init_std / math.sqrt(2 * config.num_layers)


def _drop(x_BTH: jax.Array, site: int, context: Context) -> jax.Array:
    if context.dropout is None:
        return x_BTH
    return context.dropout.residual(x_BTH, site, sequence_parallel=context.sequence_parallel)
