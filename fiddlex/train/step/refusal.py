"""What a compiler's refusal of a train step means for the person who asked for the step."""

import jaxlib.version
from jax.sharding import Mesh

from fiddlex.config import Config
from fiddlex.hardware.compilers import libtpu_version, refused_width

_LONGEST_REASON = 300  # characters of a compiler's message, which may go on with a whole instruction


def refusal(message: str, config: Config, mesh: Mesh) -> str:
    """One line about a step that the compiler does not compile, from the first line of its own message."""
    device = mesh.devices.flat[0]
    compiler = f"libtpu {libtpu_version()}" if device.platform == "tpu" else f"jaxlib {jaxlib.version.__version__}"
    reason = message.splitlines()[0]
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]}…"
    refused = ""
    if config.pipeline.streams:
        width, zero1 = config.model.hidden_size, config.optimizer.zero1
        refused = refused_width(device.platform, width, replicas=config.mesh.data, zero1=zero1)
    remedy = refused or "Try another layout (mesh, pipeline), or another version of the compiler."
    return f"{compiler} does not compile the train step for {device.device_kind}: {reason} {remedy}"
