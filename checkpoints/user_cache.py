"""The directory for files that this user's processes keep between runs."""

from __future__ import annotations

import os
from pathlib import Path


def cache_home() -> Path:
    """`XDG_CACHE_HOME`, or `.cache` in the home directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
