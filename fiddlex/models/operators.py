"""The differentiable operators of a layer, with backward passes that save little and sum in float32.

Each operator saves only its inputs for the backward pass, in the compute dtype (`attention_probabilities` also saves
its result): nothing derived from a weight, and no float32 copy of an activation. A pipeline stage stashes this for each
microbatch in flight. Sums over examples and positions, such as the gradient of a bias, run in float32: in bfloat16 they
would stop growing after some hundred terms.

Inside `shard_map` the arguments of one call must vary over the same mesh axes (`enter_tensor_parallel` ensures this).
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

Pair = tuple[jax.Array, jax.Array]


def multiplied(x: jax.Array, kernel: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Contracts `x`, [example, position, inputs…], and `kernel`, [inputs…, outputs…], as one product of two matrices.

    `x` may also have the first two dimensions of the kernel as one. Both products of the backward pass are products of
    two matrices as well: XLA's CPU backend runs a contraction over separate dimensions for example and position at half
    the speed. Returns [example, position, outputs…], with sums in `dtype`.
    """
    inputs = math.prod(x.shape[2:])
    x_TI, kernel_IO = x.reshape(-1, inputs), kernel.reshape(inputs, -1)
    num_inputs = 2 if x.ndim == 3 and x.shape[2] != kernel.shape[0] else x.ndim - 2
    y_TO = jnp.matmul(x_TI, kernel_IO, preferred_element_type=dtype)
    return y_TO.reshape(*x.shape[:2], *kernel.shape[num_inputs:])


def input_gradient(inputs: Sequence[int], kernel: jax.Array, g: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The gradient of the input of `multiplied`, [example, position, inputs…], from that of its value, `g`.

    `inputs` are the sizes of the input's dimensions after the first two; `dtype` is that of the sums and of the result.
    """
    kernel_IO = kernel.reshape(math.prod(inputs), -1)
    dx_TI = jnp.matmul(g.reshape(-1, kernel_IO.shape[1]), kernel_IO.T, preferred_element_type=dtype)
    return dx_TI.reshape(*g.shape[:2], *inputs)


def kernel_gradient(x: jax.Array, kernel: jax.Array, g: jax.Array) -> jax.Array:
    """The gradient of the kernel of `multiplied` from that of its value, [inputs…, outputs…]."""
    x_TI = x.reshape(-1, math.prod(x.shape[2:]))
    return (x_TI.T @ g.reshape(len(x_TI), -1)).reshape(kernel.shape)


@jax.custom_vjp
def scores(x_BSH: jax.Array, table_VH: jax.Array) -> jax.Array:
    """Float32 products of every position with every row of a table, [B, S, V].

    The backward pass rounds the gradient to the compute dtype first, so that its products run in the compute dtype too.
    """
    return jnp.einsum("bsh,vh->bsv", x_BSH, table_VH, preferred_element_type=jnp.float32)


def _scores_forward(x_BSH: jax.Array, table_VH: jax.Array) -> tuple[jax.Array, Pair]:
    return scores(x_BSH, table_VH), (x_BSH, table_VH)


def _scores_backward(saved: Pair, g_BSV: jax.Array) -> Pair:
    x_BSH, table_VH = saved
    g_TV = g_BSV.astype(x_BSH.dtype).reshape(-1, g_BSV.shape[-1])
    return (g_TV @ table_VH).reshape(x_BSH.shape), g_TV.T @ x_BSH.reshape(-1, x_BSH.shape[-1])


scores.defvjp(_scores_forward, _scores_backward)


def add_bias(y: jax.Array, bias: jax.Array) -> jax.Array:
    """`y + bias` in the dtype of `y`; the bias's gradient is summed in float32."""
    return (y.astype(jnp.float32) + bias.astype(jnp.float32)).astype(y.dtype)


@jax.custom_vjp
def gelu(x: jax.Array) -> jax.Array:
    """The tanh approximation of GELU (Hendrycks & Gimpel 2016)."""
    return jax.nn.gelu(x, approximate=True)


def _gelu_forward(x: jax.Array) -> Pair:
    return gelu(x), x


def _gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
    tanh = jnp.tanh(inner)
    slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * x * x)
    # The barrier keeps XLA's CPU backend from recomputing this gradient in both products that use it.
    return (lax.optimization_barrier(g * (0.5 * (1 + tanh) + 0.5 * x * (1 - tanh * tanh) * slope)),)


gelu.defvjp(_gelu_forward, _gelu_backward)


@jax.custom_vjp
def exact_gelu(x: jax.Array) -> jax.Array:
    """GELU with the error function (Hendrycks & Gimpel 2016), as in BERT's published weights."""
    return jax.nn.gelu(x, approximate=False)


def _exact_gelu_forward(x: jax.Array) -> Pair:
    return exact_gelu(x), x


def _exact_gelu_backward(x: jax.Array, g: jax.Array) -> tuple[jax.Array]:
    distribution = 0.5 * (1 + lax.erf(x / math.sqrt(2)))
    density = jnp.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return (lax.optimization_barrier(g * (distribution + x * density)),)  # as in `gelu`


exact_gelu.defvjp(_exact_gelu_forward, _exact_gelu_backward)

GELUS = {"tanh": gelu, "erf": exact_gelu}


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def layer_norm(x: jax.Array, scale_H: jax.Array, bias_H: jax.Array, epsilon: float) -> jax.Array:
    """Normalises the last dimension in float32 (Ba et al. 2016), then scales and shifts; returns the dtype of `x`."""
    normal, _ = _normalise(x, epsilon)
    return (normal * scale_H.astype(jnp.float32) + bias_H.astype(jnp.float32)).astype(x.dtype)


def _layer_norm_forward(x: jax.Array, scale_H: jax.Array, bias_H: jax.Array, epsilon: float) -> tuple[jax.Array, Pair]:
    return layer_norm(x, scale_H, bias_H, epsilon), (x, scale_H)


def _layer_norm_backward(epsilon: float, saved: Pair, g: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    x, scale_H = saved
    normal, inverse = _normalise(x, epsilon)
    g = g.astype(jnp.float32)
    scaled = g * scale_H.astype(jnp.float32)
    centred = scaled - scaled.mean(axis=-1, keepdims=True) - normal * (scaled * normal).mean(axis=-1, keepdims=True)
    positions = tuple(range(g.ndim - 1))
    dscale_H, dbias_H = (g * normal).sum(axis=positions), g.sum(axis=positions)
    return (inverse * centred).astype(x.dtype), dscale_H.astype(scale_H.dtype), dbias_H.astype(scale_H.dtype)


def _normalise(x: jax.Array, epsilon: float) -> Pair:
    """`x` normalised to mean 0 and variance 1 in float32, and the inverse of its standard deviation."""
    x = x.astype(jnp.float32)
    x = x - x.mean(axis=-1, keepdims=True)
    inverse = lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + epsilon)
    return x * inverse, inverse


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """Divides the last dimension by its root mean square in float32 (Zhang & Sennrich, NeurIPS 2019), then scales."""
    return (x.astype(jnp.float32) * _inverse_rms(x, epsilon) * scale.astype(jnp.float32)).astype(x.dtype)


def _rms_norm_forward(x: jax.Array, scale: jax.Array, epsilon: float) -> tuple[jax.Array, Pair]:
    return rms_norm(x, scale, epsilon), (x, scale)


def _rms_norm_backward(epsilon: float, saved: Pair, g: jax.Array) -> Pair:
    x, scale = saved
    inverse = _inverse_rms(x, epsilon)
    normal, g = x.astype(jnp.float32) * inverse, g.astype(jnp.float32)
    scaled = g * scale.astype(jnp.float32)
    centred = scaled - normal * (scaled * normal).mean(axis=-1, keepdims=True)
    return (inverse * centred).astype(x.dtype), (g * normal).sum(axis=tuple(range(g.ndim - 1))).astype(scale.dtype)


def _inverse_rms(x: jax.Array, epsilon: float) -> jax.Array:
    return lax.rsqrt(jnp.square(x.astype(jnp.float32)).mean(axis=-1, keepdims=True) + epsilon)


rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)


@jax.custom_vjp
def gated_silu(gate: jax.Array, x: jax.Array) -> jax.Array:
    """`silu(gate) * x` (SwiGLU, Shazeer 2020, arXiv:2002.05202)."""
    return jax.nn.silu(gate) * x


def _gated_silu_forward(gate: jax.Array, x: jax.Array) -> tuple[jax.Array, Pair]:
    return gated_silu(gate, x), (gate, x)


def _gated_silu_backward(saved: Pair, g: jax.Array) -> Pair:
    gate, x = saved
    sigmoid = jax.nn.sigmoid(gate)
    slope = sigmoid * (1 + gate * (1 - sigmoid))
    # The barrier keeps XLA's CPU backend from recomputing these gradients in both products that use them.
    first, second = lax.optimization_barrier((g * x * slope, g * gate * sigmoid))
    return first, second


gated_silu.defvjp(_gated_silu_forward, _gated_silu_backward)


@jax.custom_vjp
def attention_probabilities(q_BSND: jax.Array, k_BSND: jax.Array, mask: jax.Array) -> jax.Array:
    """The softmax of scaled products of queries and keys, [B, N, S, S] in the dtype of the inputs.

    Scores and their softmax are float32. The backward pass uses the saved probabilities but no saved scores, and rounds
    the gradient of the scores to the compute dtype, so that its products run in the compute dtype too. `mask`, bool,
    broadcasts to [B, N, queries, keys]: which keys a query sees, at least one.
    """
    scores_BNQK = jnp.einsum("bqnd,bknd->bnqk", q_BSND, k_BSND, preferred_element_type=jnp.float32)
    scores_BNQK = jnp.where(mask, scores_BNQK / math.sqrt(q_BSND.shape[-1]), jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(scores_BNQK, axis=-1).astype(q_BSND.dtype)


def _probabilities_forward(
    q_BSND: jax.Array, k_BSND: jax.Array, mask: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    probabilities_BNQK = attention_probabilities(q_BSND, k_BSND, mask)
    return probabilities_BNQK, (q_BSND, k_BSND, probabilities_BNQK)


def _probabilities_backward(saved: tuple[jax.Array, ...], g_BNQK: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    q_BSND, k_BSND, probabilities_BNQK = saved
    weighted_BNQK = probabilities_BNQK.astype(jnp.float32) * g_BNQK.astype(jnp.float32)
    rows_BNQ1 = weighted_BNQK.sum(axis=-1, keepdims=True)
    g_BNQK = weighted_BNQK - probabilities_BNQK.astype(jnp.float32) * rows_BNQ1
    g_BNQK = (g_BNQK / math.sqrt(q_BSND.shape[-1])).astype(q_BSND.dtype)
    return jnp.einsum("bnqk,bknd->bqnd", g_BNQK, k_BSND), jnp.einsum("bnqk,bqnd->bknd", g_BNQK, q_BSND), None


attention_probabilities.defvjp(_probabilities_forward, _probabilities_backward)
