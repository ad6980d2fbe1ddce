"""Makes the fused kernel of attention for a config on a mesh, where the devices have one (`fiddlex.hardware.flash`)."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from fiddlex.config import Config
from fiddlex.hardware.flash import BLOCKED, CUDNN, WIDE_CAPABILITY, FlashKernel, flash_kernel
from fiddlex.models.attention import same_segment
from fiddlex.models.blocked_attention import blocked_attention
from fiddlex.models.context import AttentionKernel
from fiddlex.models.registry import network_of
from fiddlex.models.splash import Sizes, splash_attention
from fiddlex.models.task_sizes import example_fields


def kernel_on(mesh: Mesh, config: Config, *, dropout: bool) -> FlashKernel:
    """The kernel in which attention runs on a mesh's devices; `dropout`: whether probabilities are dropped."""
    platform = mesh.devices.flat[0].platform
    return flash_kernel(platform, config, capability=compute_capability(mesh), dropout=dropout)


def make_kernel(config: Config, mesh: Mesh) -> AttentionKernel | None:
    """The fused kernel of attention without dropout, made outside `shard_map` for use inside; None: there is none."""
    name = kernel_on(mesh, config, dropout=False).name
    if not name:
        return None
    causal = network_of(config).attention.causal
    if name == BLOCKED:
        return blocked_attention(causal=causal)
    return functools.partial(_cudnn, causal=causal) if name == CUDNN else make_splash(config)


def make_splash(config: Config, *, interpret: bool = False) -> AttentionKernel:
    """The kernel of TPUs for a config's local heads; with `interpret`, for any device (`splash_attention`)."""
    model, tensor = config.model, config.mesh.tensor
    kv_heads = max(model.kv_heads // tensor, 1)  # several ranks may share one head of keys
    return splash_attention(
        Sizes(model.seq_len, model.num_heads // tensor, kv_heads, model.head_size),
        jnp.dtype(model.dtype),
        causal=network_of(config).attention.causal,
        segmented="segments" in example_fields(config),
        interpret=interpret,
    )


def _cudnn(
    q_BSND: jax.Array, k_BSKD: jax.Array, v_BSKD: jax.Array, segments_BS: jax.Array | None, *, causal: bool
) -> jax.Array:
    mask_B1SS = same_segment(segments_BS)
    return jax.nn.dot_product_attention(
        q_BSND, k_BSKD, v_BSKD, mask=mask_B1SS, is_causal=causal, implementation="cudnn"
    )


def compute_capability(mesh: Mesh) -> int:
    """The major number of the CUDA compute capability of a mesh's devices; 0 for devices without one."""
    device: jax.Device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return 0
    major = str(device.compute_capability).partition(".")[0]  # for AMD GPUs a name, such as gfx942
    capability = int(major) if major.isdigit() else 0
    # For GPUs that this machine lacks, it is at most that up to which jax takes only narrow heads: for wide ones jax
    # asks the machine's own GPUs whether they take them.
    return capability if jax.default_backend() == "gpu" else min(capability, WIDE_CAPABILITY - 1)
