"""Refuses to train with arrays in host memory on devices that have no other memory."""

from fiddlex.cluster.mesh import make_mesh
from fiddlex.config import Config
from fiddlex.errors import ConfigError


def require_host_memory(config: Config) -> None:
    """Checks that a run which keeps arrays in the memory of hosts has devices with a memory of their own.

    Such programs run on CPU devices too, as tests run them, but save nothing there.

    Raises:
      ConfigError: when the run's devices are CPU devices.
      DeviceError: when there are no such devices (`make_mesh`).
    """
    uses = {
        "pipeline.stash_memory=host": config.pipeline.spills,
        "pipeline.weights_memory=host": config.pipeline.streams,
        "optimizer.offload=true": config.optimizer.offload,
    }
    fields = [field for field, is_set in uses.items() if is_set]
    if fields and make_mesh(config.mesh).devices.flat[0].platform == "cpu":
        raise ConfigError(
            f"{' and '.join(fields)}: CPU devices have one memory, which is that of the host, so there is nothing to "
            "move. Leave it out here, or compile for a target instead, as in fiddlex compile --topology=tpu:v5e:2x4."
        )
