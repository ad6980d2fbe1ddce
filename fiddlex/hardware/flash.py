"""Which fused kernel computes the attention of a model on a kind of device, or why none does.

A fused kernel keeps no scores and no probabilities in memory (Dao et al., FlashAttention, NeurIPS 2022). On NVIDIA GPUs
it is cuDNN's; the rules are those that jax checks (`jax/_src/cudnn/fused_attention_stablehlo.py`). On TPUs it is
"splash", which jax brings (`jax.experimental.pallas.ops.tpu.splash_attention`). On CPUs it is "blocked", which consists
of XLA's own operations (`fiddlex.models.blocked_attention`).
"""

from typing import NamedTuple

from fiddlex.config import Config, ModelConfig
from fiddlex.config.families import family

CUDNN, SPLASH, BLOCKED = "cudnn", "splash", "blocked"
CUDNN_CAPABILITY = 8  # the lowest major compute capability for which cuDNN has the kernel
WIDE_CAPABILITY = 9  # the lowest for which cuDNN takes heads wider than `NARROW`
NARROW, WIDE = 128, 256
SPLASH_NARROWEST = 64  # memory and kernel hold narrower heads padded to 128 elements
SPLASH_BLOCK = 128  # positions that the kernel takes at a time, or a multiple of them
_BLOCK = 128  # queries that blocked takes at a time, or a multiple of them
_MOST_BLOCKS = 8  # into which blocked cuts a sequence: each has operations of its own in the program


class FlashKernel(NamedTuple):
    """The fused kernel of attention."""

    name: str  # `blocked`, `cudnn` or `splash`; empty: attention computes its scores and probabilities in memory
    reason: str = ""  # why there is no kernel; empty where there is one

    def __str__(self) -> str:
        if self.name:
            return f"attention runs in the flash kernel {self.name}"
        return f"attention runs without a flash kernel: {self.reason}"


def flash_kernel(platform: str, config: Config, *, capability: int = 0, dropout: bool = False) -> FlashKernel:
    """The kernel in which a model's attention runs on a platform, as jax names it: `cpu`, `gpu` or `tpu`.

    `capability` is the major number of a GPU's CUDA compute capability; 0: it has none, or none is known. `dropout`
    says whether attention probabilities are dropped.
    """
    if not family(config.model.family).attends:
        return FlashKernel("", f"layers of model.family={config.model.family} attend by code of their own")
    name = {"cpu": BLOCKED, "gpu": CUDNN, "tpu": SPLASH}.get(platform, "")
    model = config.model
    reason = _obstacle(platform, model, capability)
    if not reason and dropout:
        reason = f"{name} drops no attention probabilities, and model.dropout={model.dropout:g}"
    return FlashKernel("", reason) if reason else FlashKernel(name)


def _obstacle(platform: str, model: ModelConfig, capability: int) -> str:
    """Why no kernel takes a model on a kind of device; empty when one does."""
    match platform:
        case "cpu":
            return _obstacle_to_blocked(model)
        case "gpu":
            return _obstacle_to_cudnn(model, capability)
        case "tpu":
            return _obstacle_to_splash(model)
    return f"there is none for platform {platform}"


def _obstacle_to_cudnn(model: ModelConfig, capability: int) -> str:
    if capability < CUDNN_CAPABILITY:
        found = f"these have {capability}" if capability else "none is known of these"
        return f"cuDNN's takes GPUs of compute capability {CUDNN_CAPABILITY} or above; {found}"
    if model.dtype == "float32":
        return "cuDNN's takes model.dtype=bfloat16 or float16, not float32"
    widest = WIDE if capability >= WIDE_CAPABILITY else NARROW
    if model.head_size % 8 or model.head_size > widest:
        return (
            f"for compute capability {capability} cuDNN's takes heads whose width is a multiple of 8, up to {widest}; "
            f"the model's are {model.head_size} wide"
        )
    if model.task != "lm" and model.seq_len % 2:  # the mask of segments
        return f"with a mask cuDNN's takes an even number of positions; model.seq_len is {model.seq_len}"
    return ""


def _obstacle_to_splash(model: ModelConfig) -> str:
    if model.dtype == "float16":
        return "splash takes model.dtype=bfloat16 or float32, not float16"
    if not SPLASH_NARROWEST <= model.head_size <= WIDE:
        return f"splash takes heads {SPLASH_NARROWEST} to {WIDE} wide; the model's are {model.head_size} wide"
    if model.seq_len % SPLASH_BLOCK:
        return f"splash takes model.seq_len in multiples of {SPLASH_BLOCK}; it is {model.seq_len}"
    return ""


def _obstacle_to_blocked(model: ModelConfig) -> str:
    if block_length(model.seq_len) == model.seq_len:
        return (
            f"that of CPUs, blocked, cuts a sequence into 2 to {_MOST_BLOCKS} equal blocks, each of a multiple of "
            f"{_BLOCK} positions; model.seq_len is {model.seq_len}"
        )
    return ""


def block_length(length: int) -> int:
    """How many queries of a sequence blocked takes at a time; all, where it does not take the length."""
    least = -(-length // (_MOST_BLOCKS * _BLOCK)) * _BLOCK
    sizes = range(least, length, _BLOCK)
    return next((size for size in sizes if length % size == 0), length)
