"""Options that name a file to write: another file of the user is never replaced or changed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from serving.config import ConfigError


def check_replaceable(option: str, path: Path | None, command: str, is_ours: Callable[[Any], bool]) -> None:
    """Refuses a file that this command has not written before.

    Args:
        option: the option's name.
        path: its value. A device or a pipe may always be written to.
        command: what writes such files.
        is_ours: whether a JSON value is the content of one, or the first line of a file of several.
    """
    if path is None or not (path.is_file() or path.is_dir()):
        return
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(1 << 24)
        value = text.partition("\n")[0] if text.startswith("{") and "\n{" in text else text
        ours = not text or is_ours(json.loads(value))
    except (ValueError, TypeError, LookupError, AttributeError, OSError, RecursionError):
        ours = False
    if not ours:
        raise ConfigError(f"{option} {path}: exists and is not a report of `mamba-jax {command}`; give another file")
