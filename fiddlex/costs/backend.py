"""What XLA's backends do with memory that the program does not say.

All of it was read off the buffers that XLA assigns (`--xla_dump_to`), on 2026-11-22 with jax 0.10.2, libtpu 0.0.52 and
jax's CUDA 12 plugin, for TPU v5e and v5p and for H100s; docs/memory.md tells how far it holds.
"""

import dataclasses
import functools
import itertools
import math

from fiddlex.cluster.gpu_targets import FLASH_CAPABILITY, runs_flash
from fiddlex.cluster.topology import Compiler
from fiddlex.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Backend:
    """Facts of a backend.

    Attributes:
      fuses: long chains of elementwise operations, with the products beside them, leave nothing in memory but their
        result: neither the words of the random generator, nor exponentials and gradients of logits.
      draws_inside: where `fuses` does not hold, random words still leave nothing in memory.
      rounds_gradients: gradients of scores and logits are in memory in the compute dtype alone, beside the float32 ones
        that they are made of.
      scatters_in_place: rows are added to an embedding's gradient where it is.
      capability: major number of the CUDA compute capability of the GPUs that it compiles for; 0 where that is unknown.
      rounds_products: products of float32 take bfloat16 (the default precision), and what products alone read is kept
        so.
      lanes: the last dimension of an argument is padded to a multiple of this, and the last but one to one of
        `sublanes`; of the dimensions those are chosen to be last that make the least padding.
      sublanes: of 4-byte elements.
      whole_lanes_copy: where a head has a multiple of `lanes` elements, the stacked weights of queries, keys and
        values are copied for the backward pass, transposed.
      reduces_whole: many a reduce-scatter of gradients is run as an all-reduce of which each replica keeps its part, so
        that all sums are there whole beside all the partial ones; which, it does not say.
      narrow_head: up to this size of a head the gradient of the probabilities is kept in the compute dtype; of larger
        heads its product with them is, in float32.
    """

    fuses: bool
    rounds_products: bool
    draws_inside: bool = False
    rounds_gradients: bool = False
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

    def runs_flash(self, model: ModelConfig) -> bool:
        """Whether attention runs in the flash kernel when a model is trained."""
        return runs_flash(self.capability, model, dropout=model.dropout > 0)


CPU = Backend(fuses=False, rounds_products=False)
TPU = Backend(
    fuses=True, rounds_products=True, lanes=128, sublanes=8, whole_lanes_copy=True, reduces_whole=True, narrow_head=64
)
GPU = Backend(
    fuses=False,
    rounds_products=False,
    draws_inside=True,
    rounds_gradients=True,
    scatters_in_place=True,
    capability=FLASH_CAPABILITY,
)


def backend_of(compiler: Compiler | None) -> Backend:
    """The backend that compiles for a topology; what names none is taken for GPUs of unknown capability."""
    if compiler and compiler.platform == "tpu":
        return TPU
    target = compiler.target if compiler else None
    return dataclasses.replace(GPU, capability=target.capability if target else 0)


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
