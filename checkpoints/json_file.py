"""Reading files that others have written: regular ones only, and JSON of a bounded size; and `hf_overrides`, fields
that replace those of a checkpoint's config.json."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from checkpoints.errors import CheckpointError, one_line

MOST_JSON = 16 << 20
"""Maximum bytes of a JSON file; an index of tensors may have more."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Makes an `OSError` of this context a `CheckpointError` that names the file or folder."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def open_at_once(path: Path, flags: int = 0) -> BinaryIO:
    """Opens a regular file: a pipe or a device could have no end, or wait for a writer. `flags`: more for `os.open`.

    Raises:
        OSError: the file cannot be read, or is not a regular one.
    """
    opener = lambda name, usual: os.open(name, usual | os.O_NONBLOCK | flags)  # noqa: E731
    file = open(path, "rb", opener=opener)  # noqa: SIM115 - the caller closes it
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return file


def open_regular(path: Path) -> BinaryIO:
    """Opens a file like `open_at_once`.

    Raises:
        CheckpointError: the file cannot be read, or is not a regular one.
    """
    with reading(path):
        try:
            return open_at_once(path)
        except ValueError as error:  # a zero byte, or half of a surrogate pair
            raise CheckpointError(f"{str(path)!r}: is no path ({error})") from error


def read_json(path: Path, most: int = MOST_JSON) -> dict[str, Any]:
    """Parses a JSON object. Infinities may be spelled `Infinity` or, as newer files do, `{"__float__": "Infinity"}`.

    Raises:
        CheckpointError: the file cannot be read, has more than `most` bytes, is not JSON, or holds something other than
            an object.
    """
    text = _content(path, most)
    try:
        special = lambda each: float(each["__float__"]) if each.keys() == {"__float__"} else each  # noqa: E731
        value = json.loads(text.decode(), object_hook=special)
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({one_line(error)})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_text(path: Path) -> str:
    """Reads a text file of at most `MOST_JSON` bytes.

    Raises:
        CheckpointError: the file cannot be read, is not a regular one, has more bytes, or is not UTF-8.
    """
    try:
        return _content(path, MOST_JSON).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{path}: cannot be read (not a text file)") from None


def _content(path: Path, most: int) -> bytes:
    with open_regular(path) as file, reading(path):
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(f"{path}: has more than {most:,} bytes")
    return content


def read_json_if_present(path: Path) -> dict[str, Any]:
    """Like `read_json`, with an absent file read as an empty object."""
    return read_json(path) if path.is_file() else {}


_ROPE = ("rope_parameters", "rope_scaling")
_SPELLINGS = (_ROPE, ("rope_type", "type"), ("dtype", "torch_dtype"))
"""Names of the same field."""


def parse_overrides(given: Mapping[str, Any] | str) -> dict[str, Any]:
    """Overrides as nested objects with sorted keys, from an object or its JSON text.

    A dotted key names a field of a nested object: `{"rope_parameters.factor": 4}`.

    Raises:
        CheckpointError: the text is not JSON, or the value is not an object.
    """
    try:
        try:
            found = json.loads(given) if isinstance(given, str) else given
        except ValueError as error:
            raise CheckpointError(f"hf_overrides: not JSON ({one_line(error)}): {str(given)[:80]}") from None
        if not isinstance(found, Mapping):
            raise CheckpointError(f"hf_overrides: a JSON object is expected, not {str(found)[:80]}")
        return _nested(found)
    except RecursionError:
        raise CheckpointError("hf_overrides: nested too deeply") from None


def _nested(given: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in given.items():
        first, dot, rest = str(key).partition(".")
        inner = {rest: value} if dot else value
        found = merged(found, {first: _nested(inner) if isinstance(inner, Mapping) else inner})
    return dict(sorted(found.items()))


def merged(fields: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with these overrides. Objects are merged, other values replaced.

    An override applies to the spelling of a field that config.json uses, also inside its `rope_parameters`.
    """
    found = dict(fields)
    for key, value in overrides.items():
        name = _spelling(key, found)
        before = found.get(name)
        both = isinstance(before, Mapping) and isinstance(value, Mapping)
        found[name] = merged(before, value) if both else value  # type: ignore[arg-type]
        for rope in _ROPE:
            if isinstance(found.get(rope), Mapping) and key in found[rope]:
                found[rope] = {**found[rope], key: value}
    return found


def _spelling(key: str, fields: Mapping[str, Any]) -> str:
    """Returns the spelling of `key` with a value in `fields`; `key` itself without one."""
    spellings = next((names for names in _SPELLINGS if key in names), ())
    return next((name for name in (key, *spellings) if fields.get(name) is not None), key)
