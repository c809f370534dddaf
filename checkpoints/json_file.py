"""Reading the small JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """Parses a JSON object. Infinities may be spelled `Infinity` or, as newer files do, `{"__float__": "Infinity"}`.

    Raises:
        CheckpointError: the file cannot be read, is not JSON, or holds something other than an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json`, with an absent file read as an empty object."""
    return read_json(path) if path.is_file() else {}


def _special_float(value: dict[str, Any]) -> Any:
    if value.keys() == {"__float__"}:
        return float(value["__float__"])
    return value
