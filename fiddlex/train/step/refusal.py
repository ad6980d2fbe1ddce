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
    width, replicas = config.model.hidden_size, config.mesh.data
    refused = refused_width(device.platform, width, replicas=replicas) if config.pipeline.streams else ""
    remedy = refused or "Try another layout (mesh, pipeline), or another version of the compiler."
    return f"{compiler} does not compile the train step for {device.device_kind}: {reason} {remedy}"
