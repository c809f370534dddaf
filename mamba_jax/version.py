"""The version of mamba-jax as it is installed, and how to install its extras."""

import sys
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


def install_advice(extra: str) -> str:
    """Returns how to install an extra. The environment that bootstrap.py makes may have no pip."""
    if (Path(sys.prefix) / "installed").is_file():  # written by bootstrap.py
        return f"run `MAMBA_JAX_EXTRAS={extra} python3 bootstrap.py ...` once"
    return f"pip install '.[{extra}]'"
