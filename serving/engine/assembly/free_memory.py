"""How much memory devices and the machine have left, for weights and for the store."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import jax

from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.gpu_memory import usable_share

GIB = 1 << 30
CPU_STORE_BYTES = 2 * GIB
"""Maximum size of the store on a CPU, whose memory other programs share, unless one sequence needs more."""


def check_fits(what: str, num_bytes: int, advice: str, *, devices: Iterable[jax.Device] | None = None) -> None:
    """Refuses what does not fit, before it is allocated. Otherwise the operating system would kill the process.

    Args:
        what: its name, in the plural.
        num_bytes: its size in this process.
        advice: what to do, in the message.
        devices: the devices over which the process divides it.

    Raises:
        ConfigError: it is larger than the free memory.
    """
    limits = [limit - used for limit, used in _limits(list(devices or jax.local_devices()[:1]))]
    free = len(limits) * min(limits) if limits else available_ram()
    if num_bytes > free:
        raise ConfigError(f"{what} need {show_bytes(num_bytes)} but only {show_bytes(free)} is free; {advice}")


def store_memory(config: EngineConfig, *, workspace: int, devices: Iterable[jax.Device] | None = None) -> int:
    """Returns the bytes for the store on each device: `memory_utilization` of the memory, minus memory in use,
    `workspace` and reserved bytes. For GPUs see `gpu_memory`.

    Raises:
        ConfigError: no memory is left.
    """
    found = list(devices or jax.local_devices()[:1])
    if limits := _limits(found):
        share = usable_share(found[0].platform, config.memory_utilization)
        free = min(int(limit * share) - used for limit, used in limits)
        free -= workspace + config.reserved_bytes
    elif any(device.platform == "gpu" for device in found):
        raise ConfigError(
            "this GPU's allocator does not say how much memory it has (XLA_PYTHON_CLIENT_ALLOCATOR=platform?): "
            "the store cannot be sized; unset the variable"
        )
    else:
        # Host devices share the machine's memory.
        free = int(available_ram() * config.memory_utilization) - workspace * len(found) - config.reserved_bytes
        free = min(free, CPU_STORE_BYTES) // len(found)
    if free <= 0:
        reserved = f", {show_bytes(config.reserved_bytes)} are reserved" if config.reserved_bytes else ""
        raise ConfigError(
            f"no memory is left for the state store at memory_utilization {config.memory_utilization:g}: "
            f"the weights are loaded and a step needs {show_bytes(workspace)}{reserved}"
        )
    return free


def _limits(devices: list[jax.Device]) -> list[tuple[int, int]]:
    """The limit and the bytes in use of each device that has memory of its own and says how much."""
    stats = [device.memory_stats() if device.platform != "cpu" else None for device in devices]
    return [(each["bytes_limit"], each.get("bytes_in_use", 0)) for each in stats if each and "bytes_limit" in each]


def available_ram() -> int:
    """Returns the bytes that can be allocated without swapping, within the limit of a container if there is one."""
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        # Not Linux: assume that half of the memory is free.
        free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:
        group = Path("/sys/fs/cgroup")
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # `memory.current` includes pages of files that the kernel drops when memory is needed.
        used = int((group / "memory.current").read_text()) - int(counts["inactive_file"])
        return max(min(free, int((group / "memory.max").read_text()) - used), 0)
    except (OSError, KeyError, ValueError):  # no cgroup v2, or "max"
        return free


def show_bytes(count: int) -> str:
    """Formats a number of bytes: 1536 -> '1.5 KiB'."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if abs(size) < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
