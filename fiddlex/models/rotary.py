"""Rotary positions (RoPE, Su et al. 2021, arXiv:2104.09864): turns pairs of a head's elements by the position's angle.

Element i of the first half of a head forms a pair with element i of the second half, as in Llama's published weights.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from fiddlex.config import ModelConfig


def angular_frequencies(model: ModelConfig) -> np.ndarray:
    """The angle of each pair from one position to the next, in radians, float64 [head size / 2].

    Pair i of a head of width d has base^(-2i/d). With `rope_scaling=linear` the angles are divided by the factor
    (position interpolation, Chen et al. 2023, arXiv:2306.15595). With `llama3` only long wavelengths are: those above
    `rope_original_len / rope_low_frequency` wholly, those below `rope_original_len / rope_high_frequency` not at all,
    and between them the angle goes over linearly in the number of turns that the original length has (Llama 3.1,
    Grattafiori et al. 2024, arXiv:2407.21783).
    """
    exponents = np.arange(0, model.head_size, 2) / model.head_size
    frequencies = model.rope_base**-exponents
    if model.rope_scaling == "none":
        return frequencies
    if model.rope_scaling == "linear":
        return frequencies / model.rope_factor
    turns = model.rope_original_len * frequencies / (2 * math.pi)
    low, high = model.rope_low_frequency, model.rope_high_frequency
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return frequencies * (unscaled + (1 - unscaled) / model.rope_factor)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def rotate(x_BSND: jax.Array, positions_BS: jax.Array, frequencies: tuple[float, ...]) -> jax.Array:
    """Turns each pair by its angle at each position, in float32; returns the shape and dtype of `x_BSND`.

    Positions are int32, [1, S] where all rows have the same. `frequencies` are the `angular_frequencies`.
    """
    return _turned(x_BSND, positions_BS, frequencies, 1.0)


def _forward(x_BSND: jax.Array, positions_BS: jax.Array, frequencies: tuple[float, ...]) -> tuple[jax.Array, jax.Array]:
    return rotate(x_BSND, positions_BS, frequencies), positions_BS


def _backward(frequencies: tuple[float, ...], positions_BS: jax.Array, g_BSND: jax.Array) -> tuple[jax.Array, None]:
    return _turned(g_BSND, positions_BS, frequencies, -1.0), None


rotate.defvjp(_forward, _backward)


def _turned(x_BSND: jax.Array, positions_BS: jax.Array, frequencies: tuple[float, ...], sign: float) -> jax.Array:
    angles_BS1D = positions_BS[:, :, None, None] * np.asarray(frequencies, np.float32)
    cos, sin = jnp.cos(angles_BS1D), sign * jnp.sin(angles_BS1D)
    first, second = jnp.split(x_BSND.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_BSND.dtype)
