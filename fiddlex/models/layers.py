"""The transformer block of GPT-2, tensor-parallel inside `shard_map`.

Shape suffixes: B example, S whole sequence, T this rank's part of the sequence (S without sequence parallelism),
H hidden, F this rank's part of the MLP, N this rank's heads, D head size. Weights are written with global shapes and
applied to a device's shard. Attention and MLP are column-parallel then row-parallel products with one reduction each
per direction (Megatron-LM, Shoeybi et al. 2019, section 3); biases after a reduction are added once, after it.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fiddlex.config import ModelConfig
from fiddlex.models.attention import attend
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE, Dropout
from fiddlex.models.functional import param
from fiddlex.parallel.collectives import enter_tensor_parallel, leave_tensor_parallel
from fiddlex.parallel.sharding import LogicalAxes


@dataclasses.dataclass(frozen=True)
class Context:
    """What every layer of one microbatch is told besides its input.

    Attributes:
      sequence_parallel: whether activations between products are sharded along the sequence.
      recompute: none | selective | full, see `PipelineConfig`.
      dropout: the microbatch's random stream, or None when nothing is dropped.
    """

    sequence_parallel: bool
    recompute: str = "none"
    dropout: Dropout | None = None


class LayerNorm(nnx.Module):
    """Layer normalisation over the hidden dimension, computed in float32."""

    def __init__(self, config: ModelConfig):
        self.epsilon = config.layer_norm_epsilon
        self.scale = param(jnp.ones(config.hidden_size), ("hidden",))
        self.bias = param(jnp.zeros(config.hidden_size), ("hidden",))

    def __call__(self, x_BTH: jax.Array) -> jax.Array:
        """Normalises each position; same shape and dtype as the input."""
        x = x_BTH.astype(jnp.float32)
        x = x - x.mean(axis=-1, keepdims=True)
        x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + self.epsilon)
        y = x * self.scale[...].astype(jnp.float32) + self.bias[...].astype(jnp.float32)
        return y.astype(x_BTH.dtype)


class Linear(nnx.Module):
    """A kernel and a bias; the products are written where they are used."""

    def __init__(self, shape: tuple[int, ...], axes: LogicalAxes, *, num_inputs: int, std: float, rngs: nnx.Rngs):
        """Draws the kernel from N(0, std²); the bias, zero, has the kernel's dimensions from `num_inputs` on."""
        self.kernel = param(std * jax.random.normal(rngs.params(), shape), axes)
        self.bias = param(jnp.zeros(shape[num_inputs:]), axes[num_inputs:])


class Attention(nnx.Module):
    """Multi-head causal self-attention, heads spread over `tensor`."""

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
        qkv_BS3ND = product(x_BSH, self.qkv.kernel[...]) + self.qkv.bias[...]
        q_BSND, k_BSND, v_BSND = jnp.moveaxis(qkv_BS3ND, 2, 0)
        y_BSND = attend(q_BSND, k_BSND, v_BSND, dropout=context.dropout, recompute=context.recompute == "selective")
        partial_BSH = product(y_BSND, self.out.kernel[...], num_inputs=2)
        return leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel) + self.out.bias[...]


class MLP(nnx.Module):
    """Two products with a tanh-approximated GELU between them, hidden units spread over `tensor`."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        hidden, units = config.hidden_size, config.mlp_size
        self.up = Linear((hidden, units), ("hidden", "mlp"), num_inputs=1, std=config.init_std, rngs=rngs)
        self.down = Linear((units, hidden), ("mlp", "hidden"), num_inputs=1, std=residual_std(config), rngs=rngs)

    def __call__(self, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Returns what the residual stream gains, [B, T, H]."""
        x_BSH = enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)
        y_BSF = gelu(product(x_BSH, self.up.kernel[...]) + self.up.bias[...])
        partial_BSH = product(y_BSF, self.down.kernel[...])
        return leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel) + self.down.bias[...]


class Block(nnx.Module):
    """One pre-LN transformer layer (GPT-2, Radford et al. 2019, section 2.3)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = LayerNorm(config)
        self.mlp = MLP(config, rngs=rngs)

    def __call__(self, x_BTH: jax.Array, context: Context) -> jax.Array:
        """Maps the residual stream through the layer; same shape and dtype as the input."""
        x_BTH = x_BTH + _drop(self.attention(self.attention_norm(x_BTH), context), ATTENTION_OUTPUT_SITE, context)
        return x_BTH + _drop(self.mlp(self.mlp_norm(x_BTH), context), MLP_OUTPUT_SITE, context)


def product(x: jax.Array, kernel: jax.Array, *, num_inputs: int = 1) -> jax.Array:
    """Contracts the last `num_inputs` dimensions of `x` with the first of `kernel`, as one product of two matrices.

    Written with two matrices, the weight gradient is one as well; XLA's CPU backend runs a contraction over example
    and position as they stand at half the speed.
    """
    inputs = math.prod(kernel.shape[:num_inputs])
    y = x.reshape(-1, inputs) @ kernel.reshape(inputs, -1)
    return y.reshape(*x.shape[: x.ndim - num_inputs], *kernel.shape[num_inputs:])


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU (Hendrycks & Gimpel 2016). Backward keeps the input and nothing else."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return gelu(x), x


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    tanh = jnp.tanh(inner)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    # The barrier keeps XLA's CPU backend from computing this again inside both products that use it.
    return (lax.optimization_barrier(g * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)),)


gelu.defvjp(_gelu_forward, _gelu_backward)


def residual_std(config: ModelConfig) -> float:
    """Standard deviation of the kernels that write into the residual stream: scaled by 1/√(2·layers) (GPT-2)."""
    return config.init_std / math.sqrt(2 * config.num_layers)


def _drop(x_BTH: jax.Array, site: int, context: Context) -> jax.Array:
    if context.dropout is None:
        return x_BTH
    return context.dropout.residual(x_BTH, site, sequence_parallel=context.sequence_parallel)
