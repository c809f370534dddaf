"""Tiers below the device for one engine: from flags to books, folders and threads."""

from __future__ import annotations

import logging
from pathlib import Path

import jax

from mamba_jax.model import HybridModel
from serving.config import ConfigError, EngineConfig
from serving.core.tiers.prices import Prices
from serving.core.tiers.tier import Tier
from serving.core.tiers.tiers import Tiers
from serving.engine.loop import StepLoop
from serving.engine.narrow_states import waiting_form
from serving.engine.sizing import GIB, available_ram, show_bytes
from serving.points.arrangement import Arrangement
from serving.points.digest import model_digest
from serving.points.point import PointPrograms
from serving.tiers.folder import Folder
from serving.tiers.layout import Layout
from serving.tiers.listing import make_room
from serving.tiers.mover import Mover

log = logging.getLogger(__name__)

MAX_LEAVING = 256 << 20
"""Bytes on their way off the device, or from memory to disk, at once: one checkpoint may always go."""


def check_tiers(config: EngineConfig) -> None:
    """Raise `ConfigError` for tiers that cannot be, before minutes are spent on loading."""
    if not (config.host_cache_gib or config.disk_cache):
        return
    if jax.process_count() > 1:
        raise ConfigError("host_cache_gib and disk_cache need an engine of one process")
    wanted = int((config.host_cache_gib or 0) * GIB)
    if wanted > available_ram():
        raise ConfigError(
            f"host_cache_gib {config.host_cache_gib:g} does not fit: {show_bytes(available_ram())} of memory are free"
        )


def connect_tiers(config: EngineConfig, loop: StepLoop, model: HybridModel) -> None:
    """Give a loop that nobody drives yet the tiers that its flags ask for.

    Raises:
        ConfigError: the disk's folder cannot be used at all.
    """
    store = loop.store
    if not (config.host_cache_gib or config.disk_cache) or store is None:
        return
    if loop.scheduler.index is None:
        log.warning("host_cache_gib and disk_cache have no effect: prefix caching is switched off")
        return
    arrangement = Arrangement.of(model.config, store, waiting_form(config))
    layout = Layout.of(arrangement, store, config.state_block_size, exact=config.rounds_rows)
    host = disk = folder = None
    if config.host_cache_gib:
        host = Tier("host", int(config.host_cache_gib * GIB), layout.sizes(in_files=False))
        log.info(_line("host", host, layout))
    if config.disk_cache:
        capacity = int(config.disk_cache_gib * GIB)
        folder = _folder(Path(config.disk_cache), layout.fingerprint(model_digest(model, model.config)), capacity)
        if folder is not None:
            disk = Tier("disk", capacity, layout.sizes(in_files=True))
            log.info("%s in %s", _line("disk", disk, layout), folder.path)
    if host is None and disk is None:
        return
    tiers = Tiers(host, disk, prices=Prices(), max_leaving=MAX_LEAVING, only_blocks=config.rounds_rows)
    loop.scheduler.use_tiers(tiers)
    loop.mover = Mover(tiers, layout, PointPrograms(arrangement), folder)


def _folder(root: Path, fingerprint: str, capacity: int) -> Folder | None:
    """None where nothing can be written: the server runs without."""
    path = root / fingerprint
    if root.exists() and not root.is_dir():
        raise ConfigError(f"disk_cache {root} is not a folder")
    try:
        folder = Folder(path)
        folder.try_out()
        make_room(root, path, capacity)
        return folder
    except OSError as error:
        log.warning("disk_cache %s cannot be used: %s", root, error.strerror or error)
        return None


def _line(name: str, tier: Tier, layout: Layout) -> str:
    sizes = tier.sizes
    tokens = f" and {show_bytes(sizes.whole_block)} for each {layout.block} tokens" if layout.kv is not None else ""
    return f"{name} cache: {show_bytes(tier.capacity)} for checkpoints of {show_bytes(sizes.state)}{tokens}"
