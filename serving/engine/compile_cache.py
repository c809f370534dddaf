"""Compiled programs on disk, so that the next start of the same model on the same machine is quick."""

from __future__ import annotations

import hashlib
import logging
import platform
from pathlib import Path

import jax

from checkpoints.user_cache import cache_home

log = logging.getLogger(__name__)


def use_compilation_cache() -> Path | None:
    """Point JAX's persistent compilation cache at the user's cache directory, unless it has been pointed elsewhere.

    JAX has one cache for the whole process. Returns the directory in use; None where none can be made.
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
    """Names the kind of CPU: a home directory may be shared by machines, and compiled code for a CPU must not be."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]
