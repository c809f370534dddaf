"""A folder of parts, one file each: written whole under another name and then renamed, checked whenever they are read.

A part is a safetensors file named after its content; its header notes what it is, and a CRC-32 of that and of all its
arrays. Nothing is flushed to the disk by force: what a machine that loses its power leaves half-written is found by
size or checksum, and dropped. A unit's own part is written after its blocks and removed before them, so where it is,
they are, unless something has gone wrong; and that is found, too.

Files are as trustworthy as the folder: whoever can write there decides what the model says.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import time
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from serving.core import CheckpointKind
from serving.core.tiers.content import Name
from serving.core.tiers.tier import Unit

Arrays = dict[str, np.ndarray]

_ENDING, _UNFINISHED = ".safetensors", ".unfinished"
_ABANDONED = 3600.0
"""Seconds after which another machine's unfinished file is nobody's."""
_MOST_HEADER = 1 << 24


class Damaged(RuntimeError):
    """A file does not hold what it was written with. It has been removed."""


class Folder:
    """The parts of one model and layout.

    Args:
        path: made if it is not there.

    Raises:
        OSError: it cannot be made, or read.
    """

    def __init__(self, path: Path) -> None:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = path
        self._count = 0

    def try_out(self) -> None:
        """Raise OSError if nothing can be written here."""
        file = self.path / f"{socket.gethostname()}-{os.getpid()}-0{_UNFINISHED}"
        self._put(file, b"")
        file.unlink()

    def write(self, name: Name, arrays: Arrays, unit: Unit | None = None) -> int:
        """Write a part: a block's keys and values or, with the unit, its own part. Returns the file's bytes.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        note = {"name": name.hex()}
        if unit is not None:
            note |= {"links": ",".join(link.hex() for link in unit.links), "tail": str(unit.tail)}
            note |= {"kind": str(int(unit.kind))}
        plain = {key: np.ascontiguousarray(array) for key, array in arrays.items()}
        note |= {f"dtype {key}": str(array.dtype) for key, array in plain.items()}
        raw = {key: _raw(array) for key, array in plain.items()}
        note["checksum"] = str(_checksum(note, raw))
        data = save(raw, note)
        self._count += 1
        unfinished = self.path / f"{socket.gethostname()}-{os.getpid()}-{self._count}{_UNFINISHED}"
        try:
            self._put(unfinished, data)
            unfinished.replace(self._file(name))
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return len(data)

    def _put(self, path: Path, data: bytes) -> None:
        path.write_bytes(data)

    def read(self, name: Name, specs: Mapping[str, Any]) -> Arrays:
        """A part's arrays, exactly as they were written. `specs`: shape and dtype that each must have, by name.

        Raises:
            OSError: it is not there, or cannot be read.
            Damaged: it is not what was written, or not what is expected.
        """
        path = self._file(name)
        data = path.read_bytes()
        try:
            note = _note(data)
            found = load(data)
            whole = note.pop("checksum") == str(_checksum(note, found)) and note["name"] == name.hex()
            typed = {key: array.view(np.dtype(specs[key].dtype)) for key, array in found.items()}
            whole = whole and typed.keys() == specs.keys()
            for key, spec in specs.items():
                whole = whole and typed[key].shape == tuple(spec.shape) and note[f"dtype {key}"] == str(spec.dtype)
        except (SafetensorError, ValueError, KeyError, TypeError, MemoryError):
            whole = False
        if not whole:
            self.remove([name])
            raise Damaged(f"{path} is damaged: removed")
        return typed

    def used(self, name: Name) -> None:
        """Note that a part was used just now: a later process drops first what was not used for longest."""
        with contextlib.suppress(OSError):
            os.utime(self._file(name))

    def remove(self, names: Iterable[Name]) -> None:
        """Remove parts, in this order; what is not there, or cannot be removed, stays as it is."""
        for name in names:
            with contextlib.suppress(OSError):
                self._file(name).unlink()

    def scan(self, block: int, *, with_blocks: bool) -> list[Unit]:
        """The units that are there whole, as far as sizes tell: the one not used for longest first.

        `block`: B. `with_blocks`: a unit needs its blocks' files.

        Files that are damaged, or that nobody finished, are removed.
        """
        units: list[tuple[float, Unit]] = []
        blocks: set[Name] = set()
        for path in sorted(self.path.iterdir()):
            try:
                if path.name.endswith(_UNFINISHED):
                    if _is_abandoned(path):
                        path.unlink()
                elif path.name.endswith(_ENDING):
                    name = bytes.fromhex(path.name.removesuffix(_ENDING))
                    unit = _unit_of(path, name, block)
                    if unit is None:
                        blocks.add(name)
                    else:
                        units.append((path.stat().st_mtime, unit))
            except ValueError:
                with contextlib.suppress(OSError):
                    path.unlink()
            except OSError:
                continue
        whole = [each for each in units if not with_blocks or blocks.issuperset(each[1].blocks)]
        return [unit for _, unit in sorted(whole, key=lambda each: each[0])]

    def keep_only(self, names: Iterable[Name]) -> None:
        """Remove all finished files but these."""
        kept = {name.hex() + _ENDING for name in names}
        for path in list(self.path.glob("*" + _ENDING)):
            if path.name not in kept:
                with contextlib.suppress(OSError):
                    path.unlink()

    def has(self, name: Name) -> bool:
        """Whether there is a file of this name."""
        return self._file(name).is_file()

    def _file(self, name: Name) -> Path:
        return self.path / (name.hex() + _ENDING)


def make_room(root: Path, own: Path, most: int) -> None:
    """Remove other models' folders under `root`, the longest unused first, until all together hold `most` bytes."""
    found = []
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            sizes = [file.stat() for file in path.iterdir()] if path.is_dir() else []
            found.append((max((each.st_mtime for each in sizes), default=0.0), sum(s.st_size for s in sizes), path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found, key=lambda each: each[0]):
        if total <= most:
            return
        if path != own and path.is_dir() and len(path.name) == len(own.name):
            shutil.rmtree(path, ignore_errors=True)
            total -= size


def _raw(array: np.ndarray) -> np.ndarray:
    """As a type that every reader of safetensors knows: bfloat16, for one, is none of numpy's own."""
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.dtype.itemsize}")


def _checksum(note: Mapping[str, str], arrays: Mapping[str, np.ndarray]) -> int:
    found = zlib.crc32(json.dumps(sorted(note.items())).encode())
    for key in sorted(arrays):
        array = arrays[key]
        found = zlib.crc32(f"{key}{array.shape}{array.dtype}".encode(), found)
        found = zlib.crc32(array.reshape(-1).view(np.uint8).data, found)
    return found


def _note(data: bytes) -> dict[str, str]:
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 + length or length > _MOST_HEADER:
        raise ValueError("cut short")
    return dict(json.loads(data[8 : 8 + length])["__metadata__"])


def _unit_of(path: Path, name: Name, block: int) -> Unit | None:
    """What a file's header says; None for a block. Raises ValueError where that cannot be, or the file is cut short."""
    with path.open("rb") as file:
        head = file.read(8)
        length = int.from_bytes(head, "little")
        if len(head) < 8 or length > _MOST_HEADER:
            raise ValueError("no header")
        text = file.read(length)
    try:
        header = json.loads(text)
        note = header.pop("__metadata__")
        end = max(entry["data_offsets"][1] for entry in header.values())
        if path.stat().st_size != 8 + length + end or note["name"] != name.hex():
            raise ValueError("cut short, or another part's")
        if "links" not in note:
            return None
        links = tuple(bytes.fromhex(link) for link in note["links"].split(","))
        tail = int(note["tail"])
        if not 0 <= tail < block:
            raise ValueError("a tail of another block size")
        return Unit(name, links, tail, (len(links) - 1) * block + tail, CheckpointKind(int(note["kind"])))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"no header of a part: {error}") from None


def _is_abandoned(path: Path) -> bool:
    host, process, _ = path.name.removesuffix(_UNFINISHED).rsplit("-", 2)
    if host == socket.gethostname() and process.isdigit() and int(process) != os.getpid():
        try:
            os.kill(int(process), 0)
        except ProcessLookupError:
            return True
        except OSError:
            pass
    return time.time() - path.stat().st_mtime > _ABANDONED
