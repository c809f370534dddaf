"""Reading files that others have written: regular ones only, and JSON of a bounded size."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from checkpoints.errors import CheckpointError, one_line

MOST_JSON = 16 << 20
"""Maximum bytes of a JSON file; an index of tensors may have more."""


def open_regular(path: Path) -> BinaryIO:
    """Opens a file, at once: a pipe or a device could have no end, or wait for a writer.

    Raises:
        CheckpointError: the file cannot be read, or is not a regular one.
    """
    try:
        file = open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:  # a zero byte, or half of a surrogate pair
        raise CheckpointError(f"{str(path)!r}: is no path ({error})") from error
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise CheckpointError(f"{path}: cannot be read (not a regular file)")
    return file


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """Parses a JSON object. Infinities may be spelled `Infinity` or, as newer files do, `{"__float__": "Infinity"}`.

    Raises:
        CheckpointError: the file cannot be read, has more than `most` bytes, is not JSON, or holds something other than
            an object.
    """
    with open_regular(path) as file:
        try:
            text = file.read(most + 1)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    if len(text) > most:
        raise CheckpointError(f"{path}: has more than {most:,} bytes")
    try:
        special = lambda each: float(each["__float__"]) if each.keys() == {"__float__"} else each  # noqa: E731
        value = json.loads(text.decode(), object_hook=special)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json`, with an absent file read as an empty object."""
    return read_json(path) if path.is_file() else {}
