"""Creates the host and disk tiers of an engine, or of all its replicas, from the flags."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from mamba_jax.config import HybridConfig
from serving.config import ConfigError, EngineConfig
from serving.core.tiers.tier import Tier
from serving.core.tiers.tiers import Tiers
from serving.engine.assembly.design import waiting_form
from serving.engine.assembly.free_memory import GIB, available_ram, show_bytes
from serving.engine.steps.loop import StepLoop
from serving.state_transfer.programs import Arrangement, PointPrograms
from serving.tiers.folder import Folder
from serving.tiers.listing import make_room
from serving.tiers.mover import Layout, Mover
from serving.tiers.storage import Disk, Memory

log = logging.getLogger(__name__)

MAX_COPYING = 256 << 20
"""Maximum bytes in transfer from the device, or from memory to disk. A single checkpoint may exceed it."""


def check_tiers(config: EngineConfig) -> None:
    """Raises `ConfigError` for a tier larger than the memory, before the weights are loaded."""
    wanted = int((config.host_cache_gib or 0) * GIB)
    if wanted > available_ram():
        raise ConfigError(
            f"host_cache_gib {config.host_cache_gib:g} does not fit: only {show_bytes(available_ram())} is free"
        )


def connect_tiers(
    config: EngineConfig, loops: Sequence[StepLoop], model: HybridConfig, digest: Callable[[], str]
) -> None:
    """Connects the tiers of the flags to loops that do not run yet; replicas share them.

    Args:
        config: every flag.
        loops: the engines' loops.
        model: the model's configuration.
        digest: returns the digest of the model's weights.

    Raises:
        ConfigError: `disk_cache` is not a folder.
    """
    stores = [loop.store for loop in loops]
    if not (config.host_cache_gib or config.disk_cache) or stores[0] is None:
        return
    if loops[0].scheduler.index is None:
        log.warning("host_cache_gib and disk_cache have no effect: prefix caching is switched off")
        return
    layouts = [
        Layout.of(Arrangement.of(model, store, waiting_form(config)), store, config.state_block_size)
        for store in stores
        if store is not None
    ]
    memory, disk = None, _disk(config, layouts[0], digest)
    if config.host_cache_gib:
        tier = Tier("host", int(config.host_cache_gib * GIB), layouts[0].sizes(in_files=False))
        log.info(_line("host", tier, layouts[0]))
        memory = Memory(tier)
    if memory is None and disk is None:
        return
    for loop, layout in zip(loops, layouts, strict=True):
        tiers = Tiers(
            None if memory is None else memory.tier,
            None if disk is None else disk.tier,
            max_copying=MAX_COPYING,
            only_blocks=config.narrows_states,
        )
        loop.scheduler.use_tiers(tiers)
        loop.sources.append(Mover(tiers, layout, PointPrograms(layout.arrangement), memory, disk, loop.inbox))
    if disk is not None and disk.tier.units:
        log.info("disk cache: %d checkpoints found in %s", len(disk.tier), disk.folder.path)


def _disk(config: EngineConfig, layout: Layout, digest: Callable[[], str]) -> Disk | None:
    if not config.disk_cache:
        return None
    root, capacity = Path(config.disk_cache), int(config.disk_cache_gib * GIB)
    path = root / layout.fingerprint(digest())
    try:
        if root.exists() and not root.is_dir():
            raise ConfigError(f"disk_cache {root} is not a folder")
        folder = Folder(path)
        folder.try_out()
        make_room(root, path, capacity)
    except OSError as error:
        log.warning("disk_cache %s cannot be used: %s", root, error.strerror or error)
        return None
    room = folder.room()
    if room < capacity:
        log.warning(
            "disk_cache %s has room for %s; disk_cache_gib is %g", folder.path, show_bytes(room), config.disk_cache_gib
        )
    tier = Tier("disk", min(capacity, room), layout.sizes(in_files=True))
    log.info("%s in %s", _line("disk", tier, layout), folder.path)
    return Disk(tier, folder, layout.block, with_blocks=layout.kv is not None)


def _line(name: str, tier: Tier, layout: Layout) -> str:
    sizes = tier.sizes
    tokens = f" and {show_bytes(sizes.whole_block)} for each {layout.block} tokens" if layout.kv is not None else ""
    return f"{name} cache: {show_bytes(tier.capacity)} for checkpoints of {show_bytes(sizes.state)}{tokens}"
