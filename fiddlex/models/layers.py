"""The transformer layer of GPT-2 and BERT, tensor-parallel inside `shard_map`, as functions of its weights.

Shape suffixes: B example, S whole sequence, T this rank's part of the sequence (S without sequence parallelism),
H hidden, F this rank's part of the MLP, N this rank's heads, D head size. Weights are described with global shapes
(`fiddlex.models.descriptions`) and applied to a device's shard. Attention and MLP are column-parallel then row-parallel
products with one reduction each per direction (Megatron-LM, Shoeybi et al. 2019, section 3). A bias that follows a
reduction is added once, after the reduction.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fiddlex.models.attention import attend
from fiddlex.models.collective_matmul import gathered_products, scattered_product
from fiddlex.models.context import Context
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE
from fiddlex.models.operators import GELUS, add_bias, layer_norm, product
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import enter_tensor_parallel, leave_tensor_parallel


def norm(weights: Weights, x_BTH: jax.Array, epsilon: float) -> jax.Array:
    """LayerNorm of each position, computed in float32; returns the shape and dtype of the input."""
    return layer_norm(x_BTH, weights["scale"], weights["bias"], epsilon)


def linear(weights: Weights, x: jax.Array) -> jax.Array:
    """The product of each position and a kernel, plus the bias if there is any; [example, position, outputs…]."""
    return biased(weights, product(x, weights["kernel"]))


def column_parallel(kernels: Sequence[jax.Array], x_BTH: jax.Array, context: Context) -> tuple[jax.Array, ...]:
    """Products of one input whose outputs are sharded over `tensor`; each is [B, S, outputs…]."""
    if context.exchange is not None:
        return gathered_products(x_BTH, tuple(kernels), context.exchange)
    x_BSH = enter_tensor_parallel(x_BTH, sequence_parallel=context.sequence_parallel)
    return tuple(product(x_BSH, kernel) for kernel in kernels)


def row_parallel(weights: Weights, x: jax.Array, context: Context) -> jax.Array:
    """A product whose inputs are sharded over `tensor`, reduced, plus the bias if there is one; returns [B, T, H]."""
    if context.exchange is not None:
        return biased(weights, scattered_product(x, weights["kernel"], context.exchange))
    partial_BSH = product(x, weights["kernel"])
    return biased(weights, leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel))


def biased(weights: Weights, y: jax.Array) -> jax.Array:
    """`y` plus the bias, if there is one."""
    return add_bias(y, weights["bias"]) if "bias" in weights else y


def attention(weights: Weights, x_BTH: jax.Array, context: Context) -> jax.Array:
    """Multi-head self-attention with heads sharded over `tensor`; returns the branch's output, [B, T, H]."""
    (qkv_BS3ND,) = column_parallel([weights["qkv"]["kernel"]], x_BTH, context)
    q_BSND, k_BSND, v_BSND = jnp.moveaxis(biased(weights["qkv"], qkv_BS3ND), 2, 0)
    return row_parallel(weights["out"], attend(q_BSND, k_BSND, v_BSND, context), context)


def mlp(weights: Weights, x_BTH: jax.Array, context: Context, *, gelu: str) -> jax.Array:
    """Two products with a GELU of `GELUS` between them, hidden units sharded over `tensor`; [B, T, H]."""
    (up_BSF,) = column_parallel([weights["up"]["kernel"]], x_BTH, context)
    return row_parallel(weights["down"], GELUS[gelu](biased(weights["up"], up_BSF)), context)


def transformer_layer(
    weights: Weights, x_BTH: jax.Array, context: Context, *, post_norm: bool, epsilon: float, gelu: str
) -> jax.Array:
    """Maps the residual stream through one layer.

    Args:
      weights: the layer's weights.
      x_BTH: the residual stream.
      context: the settings of the microbatch.
      post_norm: whether LayerNorm comes after each residual sum (BERT, Devlin et al. 2019) instead of before each
        branch (GPT-2, Radford et al. 2019, section 2.3).
      epsilon: the epsilon of the norms.
      gelu: the MLP's GELU, of `GELUS`.

    Returns:
      The residual stream after the layer, with the shape and dtype of `x_BTH`.
    """
    branches = (
        ("attention", attention, ATTENTION_OUTPUT_SITE),
        ("mlp", functools.partial(mlp, gelu=gelu), MLP_OUTPUT_SITE),
    )
    for name, branch, site in branches:
        norm_weights = weights[f"{name}_norm"]
        if post_norm:
            y_BTH = dropped(branch(weights[name], x_BTH, context), site, context)
            x_BTH = norm(norm_weights, x_BTH + y_BTH, epsilon)
        else:
            y_BTH = branch(weights[name], norm(norm_weights, x_BTH, epsilon), context)
            x_BTH = x_BTH + dropped(y_BTH, site, context)
    return x_BTH


def dropped(x_BTH: jax.Array, site: int, context: Context) -> jax.Array:
    """Applies the dropout of a site (`fiddlex.models.dropout`) to activations, if anything is dropped."""
    if context.dropout is None:
        return x_BTH
    return context.dropout.residual(x_BTH, site, sequence_parallel=context.sequence_parallel)
