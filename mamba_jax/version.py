"""The version of mamba-jax, from the installed package's metadata."""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path


def version() -> str:
    """Returns the version that pyproject.toml states: as installed, or read from a checkout that is not installed."""
    try:
        return metadata.version("mamba-jax")
    except metadata.PackageNotFoundError:
        file = Path(__file__).resolve().parents[1] / "pyproject.toml"
        return str(tomllib.loads(file.read_text())["project"]["version"]) if file.is_file() else "unknown"
