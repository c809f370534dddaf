"""Machines that can be planned for: names as cloud users write them, and published figures of one device."""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass
from typing import Literal

from serving.config import ConfigError
from serving.engine.assembly.free_memory import GIB


@dataclass(frozen=True)
class Device:
    """Published figures of one device as JAX sees it (half a chip on TPU7x)."""

    name: str
    platform: Literal["tpu", "gpu"]
    memory: int
    """Bytes that programs may use."""
    bandwidth: float
    """Of that memory, in bytes per second."""
    flops: float
    """Dense bfloat16 products, per second."""


# TPUs: bandwidth and flops from docs.cloud.google.com/tpu/docs/{v5e,v5p,v6e,tpu7x}; memory is what the compiler
# lets a program have, as its error messages say (libtpu of JAX 0.10). One TPU7x chip is two devices, each with half of
# the chip's published 2307 TFLOP/s and 7380 GB/s.
TPUS = {
    "v5e": Device("TPU v5e", "tpu", int(15.75 * GIB), 819e9, 197e12),
    "v5p": Device("TPU v5p", "tpu", int(95.74 * GIB), 2765e9, 459e12),
    "v6e": Device("TPU v6e", "tpu", int(31.25 * GIB), 1640e9, 918e12),
    "tpu7x": Device("TPU7x (half a chip)", "tpu", int(94.75 * GIB), 3690e9, 1153e12),
}

# GPUs: NVIDIA's data sheets, SXM forms where there are several, without sparsity. Memory is the total that the CUDA
# driver reports.
GPUS = {
    "a10g": Device("NVIDIA A10G", "gpu", int(22.0 * GIB), 600e9, 70e12),
    "a100-40gb": Device("NVIDIA A100 40 GB", "gpu", int(39.4 * GIB), 1555e9, 312e12),
    "a100": Device("NVIDIA A100 80 GB", "gpu", int(79.1 * GIB), 2039e9, 312e12),
    "l4": Device("NVIDIA L4", "gpu", int(22.0 * GIB), 300e9, 121e12),
    "l40s": Device("NVIDIA L40S", "gpu", int(44.4 * GIB), 864e9, 362e12),
    "h100": Device("NVIDIA H100 SXM", "gpu", int(79.1 * GIB), 3350e9, 989e12),
    "h200": Device("NVIDIA H200", "gpu", int(139.7 * GIB), 4800e9, 989e12),
    "b200": Device("NVIDIA B200", "gpu", int(178.3 * GIB), 7700e9, 2250e12),
}

# What else XLA's compiler must know of a GPU that is not at hand: its name, bytes of memory and of the L2 cache, cores,
# GHz, and the compute capability.
_COMPILED_GPUS = {
    "h100": ("NVIDIA H100 80GB HBM3", 80_000_000_000, 52_428_800, 132, 1.98, 9),
    "h200": ("NVIDIA H200", 141_000_000_000, 62_914_560, 132, 1.98, 9),
    "b200": ("NVIDIA B200", 180_000_000_000, 132_120_576, 148, 1.965, 10),
}
# XLA compiles conditionals and loops into CUDA graphs only for a driver that is new enough, hence `driver_version`.
_DESCRIPTION = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048 fpus_per_core: 128
  shared_memory_per_block: 49152 shared_memory_per_core: 233472 shared_memory_per_block_optin: 232448
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 driver_version: "13.0.0"
  memory_bandwidth: %d device_memory_size: %d l2_cache_size: %d core_count: %d clock_rate_ghz: %s
  cuda_compute_capability { major: %d }
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 10 } runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "%s"
"""

GPU_COUNTS = (1, 2, 4, 8)

# Machines by kind and size, smallest first, with the compiler's shape of a slice. A size counts chips for v5e and v6e,
# cores, two to a chip, for v5p and TPU7x, and GPUs of one host.
_FLAT = {1: "2x2", 4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8", 128: "8x16", 256: "16x16"}
_CUBES = {8: "2x2x1", 16: "2x2x2", 32: "2x2x4", 64: "2x4x4", 128: "4x4x4"}
_CORES_PER_CHIP = {"v5p": 2, "tpu7x": 2}
_SIZES: dict[str, dict[int, str]] = {"v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT, "tpu7x": _CUBES}
_SIZES |= {kind: {count: f"1x1x{count}" for count in GPU_COUNTS} for kind in GPUS}

_OTHER_NAMES = {"v5litepod": "v5e", "trillium": "v6e", "ironwood": "tpu7x", "nvidia-": "", "-sxm": "", "-80gb": ""}


@dataclass(frozen=True)
class Target:
    """A machine, or a slice of one."""

    name: str
    """As the user wrote it."""
    device: Device
    count: int
    """Devices as JAX sees them: the model is divided over all of them."""
    topology: str | None
    """The compiler's name, such as `v6e:2x4` or `h200:1x1x8` (slices, hosts, GPUs of each); None where nothing can be
    compiled. It may describe more devices than `count`."""


def target(name: str) -> Target:
    """The machine called `name`: a slice such as `v6e-8` or the compiler's `v6e:2x4`, or GPUs: `h100-8`, `8xH100`.

    Raises:
        ConfigError: there is none of this name; the message lists the known ones.
    """
    plain = re.sub(r"[\s_]+", "-", name.strip().lower())
    for other, usual in _OTHER_NAMES.items():
        plain = plain.replace(other, usual)
    if (match := re.fullmatch(r"(\w+):(\d+(?:x\d+){1,2})", plain)) and match[1] in TPUS:
        chips = math.prod(map(int, match[2].split("x")))
        return Target(name, TPUS[match[1]], chips * _devices_per_chip(match[1]), plain)
    kind, count = _kind_and_count(plain)
    if (shape := _SIZES.get(kind, {}).get(count)) is None:
        near = _nearest(plain, kind, count)
        hint = f"did you mean {near!r}? " if near else ""
        raise ConfigError(f"topology {name!r} is not known; {hint}known are {_listed()}")
    if kind in TPUS:
        count = count // _CORES_PER_CHIP.get(kind, 1) * _devices_per_chip(kind)
    compiles = kind in TPUS or kind in _COMPILED_GPUS
    return Target(name, (TPUS | GPUS)[kind], count, f"{kind}:{shape}" if compiles else None)


def _kind_and_count(plain: str) -> tuple[str, int]:
    """Returns kind and size of `h100-4`, `4xh100`, `h100x4`, `h100:4` or `h100`."""
    if match := re.fullmatch(r"(\d+)-?[x*]-?(.+)", plain):
        chips, kind = int(match[1]), match[2]
        return kind, chips * _CORES_PER_CHIP.get(kind, 1)
    if match := re.fullmatch(rf"({'|'.join(_SIZES)})(?:-|-?[x*:]-?)(\d+)", plain):
        return match[1], int(match[2])
    return plain, 1


def _nearest(plain: str, kind: str, count: int) -> str | None:
    """The name of the smallest machine of this kind with so many devices, or of one with a similar name."""
    if kind in _SIZES:
        sizes = list(_SIZES[kind])
        return f"{kind}-{next((size for size in sizes if size >= count), sizes[-1])}"
    return next(iter(difflib.get_close_matches(plain, known(), n=1)), None)


def known() -> list[str]:
    """Every name of a machine."""
    return [f"{kind}-{size}" for kind, sizes in _SIZES.items() for size in sizes]


def families() -> list[list[Target]]:
    """All machines by kind of device, smallest first."""
    return [[target(f"{kind}-{size}") for size in sizes] for kind, sizes in _SIZES.items()]


def larger(of: Target) -> list[Target]:
    """Machines of the same kind with more devices, smallest first."""
    return [each for family in families() for each in family if each.device is of.device and each.count > of.count]


def _devices_per_chip(kind: str) -> int:
    return 2 if kind == "tpu7x" else 1


def _listed() -> str:
    names = [f"{kind}-{{{','.join(map(str, sizes))}}}" for kind, sizes in _SIZES.items()]
    return ", ".join(names) + ", and the compiler's own such as v6e:2x4"


def gpu_description(kind: str) -> str:
    """The description of the GPU called `kind`, one of those that programs can be compiled for."""
    name, *figures = _COMPILED_GPUS[kind]
    return _DESCRIPTION % (GPUS[kind].bandwidth, *figures, name)
