"""A folder of parts, one file each: written whole under another name and then renamed, checked whenever they are read.

A part is a safetensors file named after its content; its header notes what it is, and a CRC-32 of that and of all its
arrays. Nothing is flushed to the disk by force: what a machine that loses its power leaves half-written is found by
size or checksum, and dropped. A unit's own part is written after its blocks and removed before them, so where it is,
they are, unless something has gone wrong; and that is found, too.

Files are as trustworthy as the folder: a user who can write to it can change the model's output.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import socket
import stat
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from checkpoints.json_file import open_at_once
from checkpoints.tensors.safetensors_file import read_header
from checkpoints.user_cache import make_private
from serving.core.cache.content import SIZE, Name
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.tiers.tier import Unit

Arrays = dict[str, np.ndarray]

ENDING, UNFINISHED = ".safetensors", ".unfinished"
MARKER = "CACHEDIR.TAG"
"""Marks a folder as a cache, as specified at https://bford.info/cachedir. Backups skip such folders."""
_MARK = b"Signature: 8a477f597d28d172789f06886806bc55\n# Checkpoints of mamba-jax: this folder may be removed.\n"
FOLDER_NAME = re.compile(r"[0-9a-f]{32}")
PART_NAME = re.compile(rf"[0-9a-f]{{{2 * SIZE}}}{re.escape(ENDING)}")
UNFINISHED_NAME = re.compile(rf".+-\d+-\d+{re.escape(UNFINISHED)}")
_MOST_HEADER = 1 << 24


class DamagedFile(RuntimeError):
    """The content of a file is damaged. The file has been removed."""


class Folder:
    """The parts of one model and layout, at a path that is made if it is not there.

    Raises:
        OSError: it cannot be made, or read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._count = 0
        self._make()

    def _make(self) -> None:
        make_private(self.path)
        marker = self.path / MARKER
        if not os.path.lexists(marker):
            marker.write_bytes(_MARK)

    def room(self) -> int:
        """Returns the bytes that parts can take here: those of the present ones, and what the disk has free.

        Raises:
            OSError: the folder cannot be read.
        """
        held = 0
        with os.scandir(self.path) as entries:
            for entry in entries:
                if PART_NAME.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # another server has removed it
                        held += entry.stat(follow_symlinks=False).st_size
        return held + shutil.disk_usage(self.path).free

    def try_out(self) -> None:
        """Raise OSError if nothing can be written here."""
        file = self.path / f"{socket.gethostname()}-{os.getpid()}-0{UNFINISHED}"
        self._put(file, b"")
        file.unlink()

    def write(self, name: Name, arrays: Arrays, unit: Unit | None = None) -> int:
        """Writes a part: a block's keys and values or, with the unit, its own part. Returns the file's bytes. Raises
        OSError if it could not be written; nothing of it is left."""
        note = {"name": name.hex()}
        if unit is not None:
            note |= {"links": ",".join(link.hex() for link in unit.links), "tail": str(unit.tail)}
            note |= {"kind": str(int(unit.kind))} | ({} if unit.client is None else {"client": unit.client})
        plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        note |= {f"dtype {key}": str(array.dtype) for key, array in plain.items()}
        raw = {key: _raw(array) for key, array in plain.items()}
        note["header checksum"] = str(_checksum(note, {}))
        note["checksum"] = str(_checksum(note, raw))
        data = save(raw, note)
        self._count += 1
        unfinished = self.path / f"{socket.gethostname()}-{os.getpid()}-{self._count}{UNFINISHED}"
        try:
            if not self.path.is_dir():  # another server has removed it to make room
                self._make()
            self._put(unfinished, data)
            unfinished.replace(self.file(name))
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return len(data)

    def _put(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def read(self, name: Name, specs: Mapping[str, Any]) -> Arrays:
        """Returns a part's arrays, exactly as they were written. `specs`: shape and dtype that each must have, by name.

        Raises:
            OSError, DamagedFile: it cannot be read; it is not what was written, or not what is expected.
        """
        path = self.file(name)
        with open_at_once(path, os.O_NOFOLLOW) as file:
            data = file.read()
        try:
            note = read_header(path, io.BytesIO(data), len(data), _MOST_HEADER)[1]
            found = load(data)
            whole = note.pop("checksum") == str(_checksum(note, found)) and note["name"] == name.hex()
            typed = {key: array.view(np.dtype(specs[key].dtype)) for key, array in found.items()}
            whole = whole and typed.keys() == specs.keys()
            for key, spec in specs.items():
                whole = whole and typed[key].shape == tuple(spec.shape) and note[f"dtype {key}"] == str(spec.dtype)
        except (SafetensorError, ValueError, LookupError, TypeError, OverflowError, MemoryError):
            whole = False
        if not whole:
            self.remove([name])
            raise DamagedFile(f"{path} is damaged: removed")
        return typed

    def used(self, name: Name) -> None:
        """Marks a part as used now. A later process drops the least recently used parts first."""
        with contextlib.suppress(OSError):
            os.utime(self.file(name))

    def remove(self, names: Iterable[Name]) -> None:
        """Removes parts in this order. Missing parts and those that cannot be removed are skipped."""
        for name in names:
            with contextlib.suppress(OSError):
                self.file(name).unlink()

    def has(self, name: Name) -> bool:
        """Returns whether a file of this name exists."""
        return is_regular(self.file(name))

    def file(self, name: Name) -> Path:
        """Returns the path of a part."""
        return self.path / (name.hex() + ENDING)


def is_marked(path: Path) -> bool:
    """Returns whether `Folder` created a folder. Only such folders may be removed to make room."""
    try:
        with open_at_once(path / MARKER, os.O_NOFOLLOW) as file:
            return FOLDER_NAME.fullmatch(path.name) is not None and not path.is_symlink() and file.read(4096) == _MARK
    except OSError:
        return False


def is_regular(path: Path) -> bool:
    """Returns whether the path is a regular file and not a link."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


def _raw(array: np.ndarray) -> np.ndarray:
    """Returns a view with a dtype that numpy has: it has no bfloat16, for example."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _checksum(note: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> int:
    """Of what the header notes, without checksums of as much or more, and of arrays. The header has one of its own:
    routers are told of a file by its header alone, before its arrays are read."""
    found = zlib.crc32(json.dumps(sorted(note.items())).encode())
    for key in sorted(arrays):
        array = arrays[key]
        found = zlib.crc32(f"{key}{array.shape}{array.dtype}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return found


def unit_of(path: Path, name: Name, block: int) -> Unit | None:
    """Reads a file's header; None for a block. Raises ValueError if the header is invalid or the file is truncated."""
    with open_at_once(path, os.O_NOFOLLOW) as file:
        size = os.fstat(file.fileno()).st_size
        entries, note = read_header(path, file, size, _MOST_HEADER)
    try:
        if size != max(entry.end for entry in entries.values()) or note["name"] != name.hex():
            raise ValueError("cut short, or another part's")
        note.pop("checksum", None)
        if note.pop("header checksum") != str(_checksum(note, {})):
            raise ValueError("the header is not what was written")
        if "links" not in note:
            return None
        links = tuple(bytes.fromhex(link) for link in note["links"].split(","))
        tail = int(note["tail"])
        if not 0 <= tail < block:
            raise ValueError("a tail of another block size")
        position, kind = (len(links) - 1) * block + tail, CheckpointKind(int(note["kind"]))
        return Unit(name, links, tail, position, kind, note.get("client"))
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"no header of a part: {error}") from None
