"""What every layer of one microbatch is told besides its input."""

import dataclasses

import jax
from jax.sharding import Mesh

from fiddlex.config import ModelConfig
from fiddlex.models.dropout import Dropout


@dataclasses.dataclass(frozen=True)
class Context:
    """The settings of a forward pass.

    Attributes:
      sequence_parallel: whether activations between products are sharded along the sequence.
      flash: whether attention runs in cuDNN's flash kernel (`has_flash`).
      recompute: none | selective | full, see `PipelineConfig`.
      dropout: the microbatch's random stream, or None when nothing is dropped.
      causal: whether a position sees no position after it.
      segments_BS: int32 [rows, whole sequence]; a position sees those of its own segment alone. None: all are of one.
    """

    sequence_parallel: bool
    flash: bool = False
    recompute: str = "none"
    dropout: Dropout | None = None
    causal: bool = True
    segments_BS: jax.Array | None = None


def has_flash(model: ModelConfig, mesh: Mesh) -> bool:
    """Whether the mesh's devices have cuDNN's flash kernel for this model.

    It wants half precision, head sizes up to 128, and for a mask, which BERT has, sequences of even length.
    """
    device: jax.Device = mesh.devices.flat[0]
    if device.platform != "gpu" or "nvidia" not in device.device_kind.lower():
        return False
    if model.family == "bert" and model.seq_len % 2:
        return False
    return model.dtype != "float32" and model.head_size % 8 == 0 and model.head_size <= 128
