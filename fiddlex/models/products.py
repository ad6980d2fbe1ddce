"""Products with kernels, which save what their input is made from instead of the input itself.

The backward pass of a product needs the product's input for the gradient of the kernel. Where a norm or an activation
function makes this input, the backward pass can make it again from what that has read and saved anyway (Jain et al.,
"Gist", ISCA 2018, encode such arrays; making them again is exact).

Shape suffixes: B example, S position, I inputs, O outputs, as in `fiddlex.models.operators.multiplied`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp

from fiddlex.models.operators import input_gradient, kernel_gradient, multiplied

Arrays = tuple[jax.Array, ...]


class Input(NamedTuple):
    """The input of products, `make(*arguments)`."""

    make: Callable[..., jax.Array]  # differentiable; closes over no traced value
    arguments: Arrays  # the arrays that products save

    def value(self) -> jax.Array:
        return self.make(*self.arguments)

    def saved(self) -> "Input":
        """The same input, which products save itself."""
        return given(self.value())

    def then(self, function: Callable[[jax.Array], jax.Array]) -> "Input":
        """The input `function(self.value())`; it is saved itself if this one is."""
        if self.make is _itself:
            return given(function(*self.arguments))
        return Input(lambda *arguments: function(self.make(*arguments)), self.arguments)


def given(x: jax.Array) -> Input:
    """An input that products save itself."""
    return Input(_itself, (x,))


def _itself(x: jax.Array) -> jax.Array:
    return x


class Rule(Protocol):
    """How the products of one input and several kernels, and their gradients, are computed."""

    def forward(self, x: jax.Array, kernels: Arrays) -> Arrays:
        """The products, one for each kernel."""

    def backward(self, x: jax.Array, kernels: Arrays, gs: Arrays) -> tuple[jax.Array, Arrays]:
        """The gradients of the input and of the kernels, from those of the products."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _products(rule: Rule, make: Callable[..., jax.Array], arguments: Arrays, kernels: Arrays) -> Arrays:
    return rule.forward(make(*arguments), kernels)


def _forward(
    rule: Rule, make: Callable[..., jax.Array], arguments: Arrays, kernels: Arrays
) -> tuple[Arrays, tuple[Arrays, Arrays]]:
    return _products(rule, make, arguments, kernels), (arguments, kernels)


def _backward(
    rule: Rule, make: Callable[..., jax.Array], saved: tuple[Arrays, Arrays], gs: Arrays
) -> tuple[Arrays, Arrays]:
    arguments, kernels = saved
    x, pull = jax.vjp(make, *arguments)
    dx, dkernels = rule.backward(x, kernels, gs)
    return pull(dx), dkernels


_products.defvjp(_forward, _backward)


class Whole(NamedTuple):
    """A `Rule` for an input that the device has whole."""

    def forward(self, x: jax.Array, kernels: Arrays) -> Arrays:
        return tuple(multiplied(x, kernel, x.dtype) for kernel in kernels)

    def backward(self, x: jax.Array, kernels: Arrays, gs: Arrays) -> tuple[jax.Array, Arrays]:
        gs = flat(gs)
        dx = input_gradients(x.shape[2:], kernels, gs, x.dtype)
        return dx, tuple(kernel_gradient(x, kernel, g) for kernel, g in zip(kernels, gs, strict=True))


def flat(gs: Arrays) -> Arrays:
    """Gradients of products with all outputs in one dimension, [B, S, O]."""
    # W gets these gradients through a stash, in which XLA:TPU would pad heads of 64 elements, and copy it.
    return tuple(g.reshape(*g.shape[:2], -1) for g in gs)


def input_gradients(inputs: Sequence[int], kernels: Arrays, gs: Sequence[jax.Array], dtype: jnp.dtype) -> jax.Array:
    """The gradient of the input that products share, with sums in `dtype`."""
    of_each = (input_gradient(inputs, kernel, g, dtype) for kernel, g in zip(kernels, gs, strict=True))
    return functools.reduce(jnp.add, of_each)


def products(x: Input, kernels: Sequence[jax.Array], rule: Rule | None = None) -> Arrays:
    """The products of an input, [B, S, I…], with each kernel, [I…, O…]: [B, S, O…] in the dtype of the input."""
    return _products(Whole() if rule is None else rule, x.make, x.arguments, tuple(kernels))


def product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """The product of `x`, which is saved itself, and a kernel, in the dtype of `x`."""
    return products(given(x), (kernel,))[0]
