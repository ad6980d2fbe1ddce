"""Descriptions of GPUs, from which XLA compiles for a GPU that the machine does not have.

XLA reads the description as a text proto (`GpuTargetConfigProto`). Its figures are in the topologies of the catalogue
(`[compiler.gpu]` of `fiddlex/hardware/topologies/*.toml`). They are the figures that a device of this kind reports
about itself; we took them from XLA's own tests (openxla/xla, `target_config/specs`).
"""

import dataclasses

from fiddlex.config import rules


@dataclasses.dataclass(frozen=True)
class GpuTarget:
    """The compiler's description of a GPU."""

    description: str  # the device's name for its own kind
    capability: int  # major number of the CUDA compute capability
    num_cores: int  # streaming multiprocessors
    units_per_core: int  # float32 units of each multiprocessor
    clock_ghz: float  # of the multiprocessors
    shared_bytes: int  # shared memory of each multiprocessor
    block_bytes: int  # shared memory that a block can request at most
    cache_bytes: int  # second-level cache
    memory_bytes: int
    bytes_per_s: int  # of the device's memory

    def validate(self, prefix: str) -> None:
        for field in dataclasses.fields(self):
            if field.type is not str:
                rules.positive(f"{prefix}{field.name}", float(getattr(self, field.name)))

    def text_proto(self) -> str:
        """The text proto that XLA reads. Figures that `GpuTarget` lacks are the same for all GPUs of the catalogue.

        XLA uses some features of CUDA's libraries only if the version of the runtime is known to have them, such as
        cuBLASLt's products of float8. The version here is that of jax's CUDA 12 plugin.
        """
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
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.description}"
"""
