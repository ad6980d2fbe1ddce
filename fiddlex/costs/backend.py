"""How XLA's backends use memory where the program does not determine it.

We read these facts off the buffers that XLA assigns (`--xla_dump_to`), on 2026-11-22 with jax 0.10.2, libtpu 0.0.52 and
jax's CUDA 12 plugin, for TPU v5e and v5p and for H100s; docs/memory.md reports their limits.
"""

import dataclasses
import functools
import itertools
import math

from fiddlex.config import ModelConfig
from fiddlex.hardware.flash import CUDNN_CAPABILITY, FlashKernel, flash_kernel
from fiddlex.hardware.topology import Compiler


@dataclasses.dataclass(frozen=True)
class Backend:
    """Facts about a backend.

    Attributes:
      platform: the platform of its devices as jax names it: `cpu`, `gpu` or `tpu`.
      fuses: whether the backend fuses long chains of elementwise operations with the products next to them, so that
        memory holds only their result, not the words of the random generator or exponentials and gradients of logits.
      rounds_products: whether products of float32 round their inputs to bfloat16 (the default precision), and arrays
        that only products read are stored in bfloat16.
      draws_inside: whether random words take no memory although `fuses` is False.
      rounds_gradients: whether memory holds the gradients of scores and logits only in the compute dtype, in addition
        to the float32 scores and logits from which they are computed.
      rounds_logits: whether memory holds the gradients of the logits in the compute dtype, in addition to the float32
        logits; `rounds_gradients` includes this.
      scatters_in_place: whether the backend adds rows to an embedding's gradient in place.
      capability: major number of the CUDA compute capability of the GPUs that it compiles for; 0: unknown.
      lanes: the backend pads the last dimension of an argument to a multiple of `lanes` and the last but one to a
        multiple of `sublanes`; it chooses as the last two dimensions those that need the least padding.
      sublanes: multiple to which the backend pads the last but one dimension, for 4-byte elements.
      whole_lanes_copy: whether the backend copies the stacked weights of queries, keys and values, transposed, for the
        backward pass where a head has a multiple of `lanes` elements.
      reduces_whole: whether the backend runs many reduce-scatters of gradients as an all-reduce, of which each replica
        keeps its part, so that memory holds all full sums in addition to all partial ones; it does not report which
        reduce-scatters these are.
      narrow_head: largest head size for which memory holds the gradient of the probabilities in the compute dtype; for
        larger heads it holds the product of this gradient and the probabilities, in float32.
    """

    platform: str
    fuses: bool
    rounds_products: bool
    draws_inside: bool = False
    rounds_gradients: bool = False
    rounds_logits: bool = False
    scatters_in_place: bool = False
    capability: int = 0
    lanes: int = 1
    sublanes: int = 1
    whole_lanes_copy: bool = False
    reduces_whole: bool = False
    narrow_head: int = 0

    def tiled(self, shape: tuple[int, ...]) -> int:
        """Elements that an array of 4-byte elements takes, padding included."""
        return _tiled(shape, self.sublanes, self.lanes)

    def in_lanes(self, width: int) -> int:
        """Elements that `width` elements of a last dimension take, padding included."""
        return _up(width, self.lanes)

    def flash_kernel(self, model: ModelConfig) -> FlashKernel:
        """The fused kernel in which attention runs when a model is trained."""
        return flash_kernel(self.platform, model, capability=self.capability, dropout=model.dropout > 0)


CPU = Backend("cpu", fuses=False, rounds_products=False)
TPU = Backend(
    "tpu",
    fuses=True,
    rounds_products=True,
    lanes=128,
    sublanes=8,
    whole_lanes_copy=True,
    reduces_whole=True,
    narrow_head=64,
)
TPU_V5P = dataclasses.replace(TPU, rounds_logits=True)
GPU = Backend(
    "gpu",
    fuses=False,
    rounds_products=False,
    draws_inside=True,
    rounds_gradients=True,
    scatters_in_place=True,
    capability=CUDNN_CAPABILITY,
)


def backend_of(compiler: Compiler | None) -> Backend:
    """The backend that compiles for a topology; without a compiler, GPUs of unknown capability."""
    if compiler and compiler.platform == "tpu":
        return TPU_V5P if compiler.name == "v5p" else TPU
    target = compiler.target if compiler else None
    return dataclasses.replace(GPU, capability=target.capability if target else 0)


def backend_for(topology: str) -> Backend:
    """The backend that compiles for a topology as `fiddlex compile` takes it: `cpu`, `tpu:v5e:2x4`, `gpu:h100:1x8`."""
    platform, _, rest = topology.partition(":")
    return backend_of(Compiler(platform, rest.partition(":")[0])) if rest else CPU


@functools.cache
def _tiled(shape: tuple[int, ...], sublanes: int, lanes: int) -> int:
    if len(shape) < 2:
        return math.prod(shape)
    size = math.prod(shape)
    return min(
        size // (last * before) * _up(last, lanes) * _up(before, sublanes)
        for last, before in itertools.permutations(shape, 2)
    )


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
