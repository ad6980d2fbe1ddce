"""How XLA's backends use memory where the program does not determine it.

We read these facts off the buffers that XLA assigns (`--xla_dump_to`), on 2026-11-22 with jax 0.10.2, libtpu 0.0.52 and
jax's CUDA 12 plugin, for TPU v5e and v5p and for H100s; docs/memory.md reports their limits.
"""

import dataclasses
import functools
import itertools
import math

from fiddlex.config import Config
from fiddlex.hardware.flash import CUDNN_CAPABILITY, FlashKernel, flash_kernel
from fiddlex.hardware.topology import Compiler


@dataclasses.dataclass(frozen=True)
class Backend:
    """Facts about a backend."""

    platform: str  # as jax names it: `cpu`, `gpu` or `tpu`
    # products fuse with long elementwise chains: memory holds no random words, exponentials or gradients of logits
    fuses: bool
    # float32 products round inputs to bfloat16 (default precision), in which memory holds arrays that only they read
    rounds_products: bool
    draws_inside: bool = False  # random words take no memory although `fuses` is False
    # memory holds gradients of scores and logits only in the compute dtype, beside the float32 scores and logits
    rounds_gradients: bool = False
    rounds_logits: bool = False  # as `rounds_gradients`, which includes this, for logits alone
    scatters_in_place: bool = False  # it adds rows to an embedding's gradient in place
    capability: int = 0  # major number of the CUDA compute capability of the GPUs that it compiles for; 0: unknown
    # an argument's last dimension is padded to a multiple of this; its last two are those that need least padding
    lanes: int = 1
    sublanes: int = 1  # an argument's last dimension but one is padded to a multiple of this, for 4-byte elements
    # if `lanes` divides a head, stacked weights of queries, keys and values are copied, transposed, for backward passes
    whole_lanes_copy: bool = False
    # many reduce-scatters of gradients, unknown which, run as all-reduces: memory holds full and partial sums
    reduces_whole: bool = False
    narrow_head: int = 0  # largest head size for which memory holds the probabilities' gradient in the compute dtype

    def tiled(self, shape: tuple[int, ...]) -> int:
        """Elements that an array of 4-byte elements takes, padding included."""
        return _tiled(shape, self.sublanes, self.lanes)

    def in_lanes(self, width: int) -> int:
        """Elements that `width` elements of a last dimension take, padding included."""
        return _up(width, self.lanes)

    def flash_kernel(self, config: Config) -> FlashKernel:
        """The fused kernel in which attention runs when the model of a config is trained."""
        return flash_kernel(self.platform, config, capability=self.capability, dropout=config.model.dropout > 0)


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
