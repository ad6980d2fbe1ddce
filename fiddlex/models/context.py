"""The settings that every layer of one microbatch receives in addition to its input."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh

from fiddlex.models.cache import LayerCache
from fiddlex.models.dropout import Dropout


@dataclasses.dataclass(frozen=True)
class Context:
    """The settings of a forward pass.

    Attributes:
      sequence_parallel: whether activations between products are sharded along the sequence.
      flash: whether attention runs in cuDNN's flash kernel (`fiddlex.cluster.gpu_targets.runs_flash`).
      recompute: what the backward pass recomputes: none | selective | full, see `PipelineConfig`.
      dropout: the microbatch's random stream, or None when nothing is dropped.
      causal: whether a position attends only to itself and to earlier positions.
      segments_BS: int32 [rows, whole sequence]; a position attends only to its own segment. None: each row is one
        segment.
      cache: in incremental decoding, the key-value cache of the layer; None otherwise.
    """

    sequence_parallel: bool
    flash: bool = False
    recompute: str = "none"
    dropout: Dropout | None = None
    causal: bool = True
    segments_BS: jax.Array | None = None
    cache: LayerCache | None = None

    @property
    def positions(self) -> jax.Array | None:
        """Where each token is in its segment or text, int32 [rows, whole sequence]; None: 0, 1, … in each row."""
        if self.cache is not None:
            return self.cache.positions
        return None if self.segments_BS is None else positions_in_segments(self.segments_BS)


def positions_in_segments(segments_BS: jax.Array) -> jax.Array:
    """Each position's distance from the start of its segment, int32 [B, S]; a segment's positions are contiguous."""
    indices_S = jnp.arange(segments_BS.shape[1], dtype=jnp.int32)
    before_BS = jnp.pad(segments_BS[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    starts_BS = jnp.where(segments_BS != before_BS, indices_S, 0)
    return indices_S - lax.cummax(starts_BS, axis=1)


def compute_capability(mesh: Mesh) -> int:
    """The major number of the CUDA compute capability of a mesh's devices; 0 for devices without one."""
    device: jax.Device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return 0
    major = str(device.compute_capability).partition(".")[0]  # for AMD GPUs a name, such as gfx942
    return int(major) if major.isdigit() else 0
