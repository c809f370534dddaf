"""JAX's compilation cache on disk, so that the next start of the same model on the same machine is quick."""

from __future__ import annotations

import hashlib
import logging
import platform
from pathlib import Path

import jax

from checkpoints.user_cache import cache_home

log = logging.getLogger(__name__)


def use_compilation_cache() -> Path | None:
    """Sets JAX's persistent compilation cache to the user's cache directory, unless one is already configured.

    JAX has one cache for the whole process. Returns the directory in use; None if it cannot be created.
    """
    elsewhere = getattr(jax.config, "jax_compilation_cache_dir", None)
    if elsewhere:
        return Path(elsewhere)
    directory = cache_home() / "mamba-jax" / f"xla-{machine()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not saved: %s: %s", directory, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # A tiny model's programs compile in less than JAX's default threshold, but there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return directory


def machine() -> str:
    """Returns a digest of the kind of CPU: machines may share a home directory, but not code compiled for a CPU."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
