"""How well a run uses its devices: operations per second, and their share of the chip's peak.

Model FLOPs utilisation (MFU) as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the operations that the
model needs for a step (`fiddlex.costs.sizes.model_flops`, without recomputation), by the step's time, by the peak of
all devices.
"""

from typing import NamedTuple

from fiddlex.config import Config
from fiddlex.costs.sizes import model_flops
from fiddlex.errors import ConfigError
from fiddlex.hardware.topology import Topology, catalogue, load_topology


class Throughput(NamedTuple):
    """What a step gets done, to be divided by its time."""

    tokens: int  # of a batch
    device_flops: float  # operations of the model in a step, by the number of devices
    peak_flops: float | None  # operations/s of a device in matrix products of the model's dtype; None: unknown

    def rates(self, step_time_s: float) -> dict[str, float]:
        """What a record says of a step that takes so long; it has `mfu` only where the peak is known."""
        flops = self.device_flops / step_time_s
        rates = {
            "step_time_s": step_time_s,
            "tokens_per_second": self.tokens / step_time_s,
            "model_tflops_per_device": flops / 1e12,
        }
        return rates | ({"mfu": flops / self.peak_flops} if self.peak_flops else {})


def throughput(config: Config, device_kind: str) -> Throughput:
    """The throughput of a config's steps; `device_kind` is what jax calls the kind of the devices."""
    return Throughput(
        config.tokens_per_step, model_flops(config) / config.mesh.num_devices, _peak_flops(config, device_kind)
    )


def _peak_flops(config: Config, device_kind: str) -> float | None:
    topology = topology_of(config, device_kind)
    if topology is None:
        return None
    if not config.train.topology:
        return topology.chip.peak_flops.get(config.model.dtype)
    try:
        return topology.chip.peak(config.model.dtype)
    except ConfigError as error:
        raise ConfigError(f"train.topology={config.train.topology}: {error}") from error


def topology_of(config: Config, device_kind: str) -> Topology | None:
    """The cluster that a config runs on: `train.topology`, else that of the catalogue which has such devices, or None.

    Raises:
      ConfigError: when `train.topology` is no topology.
    """
    if config.train.topology:
        try:
            return load_topology(config.train.topology)
        except ConfigError as error:
            raise ConfigError(f"train.topology={config.train.topology}: {error}") from error
    topologies = map(load_topology, catalogue())
    return next((each for each in topologies if device_kind in each.chip.device_kinds), None)
