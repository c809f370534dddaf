"""Returns a digest of the source text of packages: other sources may compute other results."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.resources.abc import Traversable

PROGRAM_PACKAGES = ("kernels_pallas", "mamba_jax")
"""Those that define the programs of a step."""
STATE_PACKAGES = ("checkpoints", *PROGRAM_PACKAGES)
"""The packages that determine the content of a state: they read weights and compute with them."""


@cache
def source_digest(packages: tuple[str, ...]) -> str:
    """SHA-256 of every Python file and compiled extension of these packages."""
    digest = hashlib.sha256()
    for package in packages:
        for name, text in sorted(_sources(files(package), package)):
            digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()


def _sources(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        if entry.is_dir():
            yield from _sources(entry, f"{name}/{entry.name}")
        elif entry.name.endswith((".py", ".so")):  # with the compiled operations for CPU
            yield f"{name}/{entry.name}", entry.read_bytes()
