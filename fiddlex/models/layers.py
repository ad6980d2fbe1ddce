"""The transformer layer of GPT-2 and BERT, tensor-parallel inside `shard_map`, as functions of a device's weights.

Shape suffixes: B example, S whole sequence, T this rank's part of the sequence (S without sequence parallelism), H
hidden, F this rank's part of the MLP, N this rank's heads, D head size. Attention and MLP are column-parallel then
row-parallel products with one reduction each per direction (Megatron-LM, Shoeybi et al. 2019, section 3). A bias that
follows a reduction is added once, after the reduction.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from fiddlex.models.attention import attend
from fiddlex.models.collective_matmul import Gathered, Scattered
from fiddlex.models.context import Context
from fiddlex.models.dropout import ATTENTION_OUTPUT_SITE, MLP_OUTPUT_SITE
from fiddlex.models.operators import GELUS, add_bias, layer_norm
from fiddlex.models.products import Input, given, product, products
from fiddlex.models.weights import Weights
from fiddlex.parallel.collectives import enter_tensor_parallel, leave_tensor_parallel


def norm(weights: Weights, x_BTH: jax.Array, epsilon: float) -> jax.Array:
    return layer_norm(x_BTH, weights["scale"], weights["bias"], epsilon)


def linear(weights: Weights, x: jax.Array) -> jax.Array:
    """The product of each position and a kernel, plus the bias if there is any; [example, position, outputs…]."""
    return biased(weights, product(x, weights["kernel"]))


def column_parallel(kernels: Sequence[jax.Array], x_BTH: Input, context: Context) -> tuple[jax.Array, ...]:
    """Products of one input whose outputs are sharded over `tensor`; each is [B, S, outputs…]."""
    if context.exchange is not None:
        return products(x_BTH, kernels, Gathered(context.exchange))
    enter = functools.partial(enter_tensor_parallel, sequence_parallel=context.sequence_parallel)
    return products(x_BTH.then(enter), kernels)


def row_parallel(weights: Weights, x: Input, context: Context) -> jax.Array:
    """A product whose inputs are sharded over `tensor`, reduced, plus the bias if there is one; returns [B, T, H]."""
    if context.exchange is not None:
        return biased(weights, *products(x, [weights["kernel"]], Scattered(context.exchange)))
    (partial_BSH,) = products(x, [weights["kernel"]])
    return biased(weights, leave_tensor_parallel(partial_BSH, sequence_parallel=context.sequence_parallel))


def normed(norm: Callable[..., jax.Array], x_BTH: jax.Array, scales: Sequence[jax.Array], context: Context) -> Input:
    """The result of a norm as the input of products; `norm` takes the activations, then `scales`."""
    made = Input(norm, (x_BTH, *scales))
    return made if "norms" in context.recompute else made.saved()


def activated(function: Callable[..., jax.Array], arguments: Sequence[jax.Array], context: Context) -> Input:
    made = Input(function, tuple(arguments))
    return made if "gelu" in context.recompute else made.saved()


def biased(weights: Weights, y: jax.Array) -> jax.Array:
    return add_bias(y, weights["bias"]) if "bias" in weights else y


def attention(weights: Weights, x_BTH: Input, context: Context) -> jax.Array:
    """Multi-head self-attention with heads sharded over `tensor`; returns the branch's output, [B, T, H]."""
    (qkv_BS3ND,) = column_parallel([weights["qkv"]["kernel"]], x_BTH, context)
    q_BSND, k_BSND, v_BSND = jnp.moveaxis(biased(weights["qkv"], qkv_BS3ND), 2, 0)
    return row_parallel(weights["out"], given(attend(q_BSND, k_BSND, v_BSND, context)), context)


def mlp(weights: Weights, x_BTH: Input, context: Context, *, gelu: str) -> jax.Array:
    """Two products with a GELU of `GELUS` between them, hidden units sharded over `tensor`; [B, T, H]."""
    (up_BSF,) = column_parallel([weights["up"]["kernel"]], x_BTH, context)
    return row_parallel(weights["down"], activated(GELUS[gelu], [biased(weights["up"], up_BSF)], context), context)


def transformer_layer(
    weights: Weights, x_BTH: jax.Array, context: Context, *, post_norm: bool, epsilon: float, gelu: str
) -> jax.Array:
    """Maps the residual stream through one layer; shape and dtype stay.

    LayerNorm comes after each residual sum if `post_norm` (BERT, Devlin et al. 2019), or before each branch (GPT-2,
    Radford et al. 2019, section 2.3).
    """
    branches = (
        ("attention", attention, ATTENTION_OUTPUT_SITE),
        ("mlp", functools.partial(mlp, gelu=gelu), MLP_OUTPUT_SITE),
    )

    def after_norm(name: str, x_BTH: jax.Array) -> Input:
        scales = weights[f"{name}_norm"]["scale"], weights[f"{name}_norm"]["bias"]
        return normed(functools.partial(layer_norm, epsilon=epsilon), x_BTH, scales, context)

    stream = given(x_BTH)
    for name, branch, site in branches:
        read = stream if post_norm else after_norm(name, stream.value())
        x_BTH = stream.value() + dropped(branch(weights[name], read, context), site, context)
        stream = after_norm(name, x_BTH) if post_norm else given(x_BTH)
    return stream.value()


def dropped(x_BTH: jax.Array, site: int, context: Context) -> jax.Array:
    if context.dropout is None:
        return x_BTH
    return context.dropout.residual(x_BTH, site, context.sequence_axes)
