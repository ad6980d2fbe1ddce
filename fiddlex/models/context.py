"""The settings that every layer of one microbatch receives in addition to its input."""

import dataclasses

import jax
from jax.sharding import Mesh

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
    """

    sequence_parallel: bool
    flash: bool = False
    recompute: str = "none"
    dropout: Dropout | None = None
    causal: bool = True
    segments_BS: jax.Array | None = None


def compute_capability(mesh: Mesh) -> int:
    """The major number of the CUDA compute capability of a mesh's devices; 0 for devices without one."""
    device: jax.Device = mesh.devices.flat[0]
    if device.platform != "gpu":
        return 0
    major = str(device.compute_capability).partition(".")[0]  # for AMD GPUs a name, such as gfx942
    return int(major) if major.isdigit() else 0
