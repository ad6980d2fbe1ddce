"""GPUs that the compiler can be told of without one being there.

XLA compiles for a GPU that it gets as a text proto (`GpuTargetConfigProto`). The topologies of the catalogue have the
figures (`[compiler.gpu]` of `fiddlex/cluster/topologies/*.toml`): those that a device of the kind reports of itself, as
XLA's own tests have them (openxla/xla, `target_config/specs`).
"""

import dataclasses

from fiddlex.config import ModelConfig, rules

FLASH_CAPABILITY = 8  # the least major compute capability for which cuDNN has a flash kernel


def runs_flash(capability: int, model: ModelConfig, *, dropout: bool) -> bool:
    """Whether attention runs in cuDNN's flash kernel: the GPU has it, it takes the model, and nothing is dropped.

    Args:
      capability: major number of the GPU's CUDA compute capability; 0 where there is none.
      model: whose attention it is.
      dropout: whether probabilities are dropped.
    """
    return capability >= FLASH_CAPABILITY and model.suits_flash and not dropout


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """A GPU as a device of the kind describes itself, and as the compiler takes it.

    Attributes:
      description: what a device of the kind calls itself.
      capability: major number of its CUDA compute capability.
      num_cores: streaming multiprocessors.
      units_per_core: float32 units of each.
      clock_ghz: of the cores.
      shared_bytes: shared memory of a core.
      block_bytes: of that, the most that a block can ask for.
      cache_bytes: of the second level.
      memory_bytes: of the device.
      bytes_per_s: of its memory.
    """

    description: str
    capability: int
    num_cores: int
    units_per_core: int
    clock_ghz: float
    shared_bytes: int
    block_bytes: int
    cache_bytes: int
    memory_bytes: int
    bytes_per_s: int

    def validate(self, prefix: str) -> None:
        """Raises ConfigError when a figure is not above 0; `prefix` precedes the names of fields."""
        for field in dataclasses.fields(self):
            if field.type is not str:
                rules.positive(f"{prefix}{field.name}", float(getattr(self, field.name)))

    def text_proto(self) -> str:
        """What XLA takes. What is not in `GpuTarget` is the same for all of these GPUs."""
        return f"""
gpu_device_info {{
  cuda_compute_capability {{ major: {self.capability} }}
  core_count: {self.num_cores}
  fpus_per_core: {self.units_per_core}
  clock_rate_ghz: {self.clock_ghz}
  shared_memory_per_core: {self.shared_bytes}
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.block_bytes}
  l2_cache_size: {self.cache_bytes}
  device_memory_size: {self.memory_bytes}
  memory_bandwidth: {self.bytes_per_s}
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 8 }}
device_description_str: "{self.description}"
"""
