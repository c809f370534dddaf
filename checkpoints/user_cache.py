"""Folders for files that this user's processes keep between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`XDG_CACHE_HOME`, or `.cache` in the home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def make_private(folder: Path) -> None:
    """Makes a folder, and those above it that do not exist, for this user only (`Path.mkdir` opens those to others).

    Raises:
        OSError: it cannot be made.
    """
    for each in (*reversed(folder.parents), folder):
        if not each.is_dir():
            each.mkdir(mode=0o700, exist_ok=True)
