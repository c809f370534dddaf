"""Descriptions of GPUs for XLA's compiler, for machines without one: `GpuTargetConfigProto` as text."""

from __future__ import annotations

# Published figures, as XLA itself names them; what differs between the GPUs that can be described.
_GPUS = {
    "h100": (
        "NVIDIA H100 80GB HBM3",
        "memory_bandwidth: 3350000000000 l2_cache_size: 52428800 device_memory_size: 80000000000 "
        "core_count: 132 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 }",
    ),
    "h200": (
        "NVIDIA H200",
        "memory_bandwidth: 4800000000000 l2_cache_size: 62914560 device_memory_size: 141000000000 "
        "core_count: 132 clock_rate_ghz: 1.98 cuda_compute_capability { major: 9 }",
    ),
    "b200": (
        "NVIDIA B200",
        "memory_bandwidth: 7700000000000 l2_cache_size: 132120576 device_memory_size: 180000000000 "
        "core_count: 148 clock_rate_ghz: 1.965 cuda_compute_capability { major: 10 }",
    ),
}
DESCRIBED = tuple(_GPUS)
"""Names of GPUs that programs can be compiled for."""

# XLA compiles conditionals and loops into CUDA graphs only for a driver that is new enough, hence `driver_version`.
_TEXT = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 driver_version: "13.0.0" %s
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "%s"
"""


def gpu_description(kind: str) -> str:
    """The description of the GPU called `kind`, one of `DESCRIBED`."""
    name, figures = _GPUS[kind]
    return _TEXT % (figures, name)
