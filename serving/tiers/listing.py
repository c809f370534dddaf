"""The units that a folder holds, and what other processes have changed there since the last look.

Several servers may share a folder without coordination: names follow from content, a rename makes each file appear as
a whole, and readers check what they read. Each server lists what the others have added and removed, and counts all of
it against its own limit. Each server holds a shared lock on a file in the folder, which the system releases when the
process dies. So a server can tell whether it is alone; if it is, unfinished files have no owner and can be removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path

from serving.core.cache.content import Name
from serving.core.tiers.tier import Unit
from serving.tiers.folder import (
    ENDING,
    MARKER,
    PART_NAME,
    UNFINISHED,
    UNFINISHED_NAME,
    Folder,
    is_marked,
    is_regular,
    unit_of,
)

_LOCK = "in-use"
_ABANDONED = 3600.0
"""Seconds after which another machine's unfinished file, or a block that no unit needs, counts as abandoned."""
_ALL = 60.0  # seconds after which all files are looked at again, if only to see which were used


@dataclass
class Changes:
    """Changes since the last call. A path in both was removed and written again."""

    gone: set[Name] = field(default_factory=set)  # units' own parts, and blocks
    new: dict[Name, Unit] = field(default_factory=dict)
    """Complete, judged by their sizes; the least recently used first."""
    used: list[Name] = field(default_factory=list)  # units

    def __bool__(self) -> bool:
        return bool(self.gone or self.new or self.used)

    def add(self, later: Changes) -> None:
        """Merges later changes. The size is bounded by the paths known before and those present now."""
        for name in later.gone:
            if self.new.pop(name, None) is None:
                self.gone.add(name)
        self.new |= later.new
        self.used = [*dict.fromkeys([*self.used, *later.used])]


class Listing:
    """One process's view of a folder, for one thread at a time. `block`: B; `with_blocks`: a unit needs its blocks'
    files."""

    def __init__(self, folder: Folder, block: int, *, with_blocks: bool) -> None:
        self._folder, self.path, self._block, self._with_blocks = folder, folder.path, block, with_blocks
        self._began = time.time()
        self._seen: dict[Name, int] = {}  # blocks, and units that are whole: when they were last used, in nanoseconds
        self._units: set[Name] = set()
        self._broken: set[Name] = set()  # own parts without all of their blocks, at the last look
        self._folder_time = 0
        self._all_at = self._swept_at = -math.inf
        self.alone = False  # whether this process was the only one that used the folder when it started
        self._lock = _locked(self.path)
        with contextlib.suppress(OSError):
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self.alone = True
        with contextlib.suppress(OSError):
            if self._lock is not None:
                fcntl.flock(self._lock, fcntl.LOCK_SH | (0 if self.alone else fcntl.LOCK_NB))

    def close(self) -> None:
        """Use the folder no longer."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def look(self) -> Changes:
        """Return what has changed, and remove damaged and abandoned files.

        Raises:
            OSError: the folder cannot be read.
        """
        changed = self.path.stat().st_mtime_ns
        everything = time.monotonic() - self._all_at > _ALL
        if changed == self._folder_time and not everything:
            return Changes()
        # Within the clock's grain more may change; then it is looked at once more.
        self._folder_time = changed if time.time_ns() - changed > 2_000_000_000 else 0
        if everything:
            self._all_at = time.monotonic()
        return self._compare(everything)

    def _compare(self, everything: bool) -> Changes:
        changes, there, found = Changes(), set[Name](), list[tuple[int, Unit]]()
        used: list[tuple[int, Name]] = []
        with os.scandir(self.path) as entries:
            for entry in entries:
                path = Path(entry.path)
                try:
                    if not entry.is_file(follow_symlinks=False):
                        continue
                    if UNFINISHED_NAME.fullmatch(path.name):
                        self._remove_abandoned(path)
                    elif PART_NAME.fullmatch(path.name):
                        name = bytes.fromhex(path.name.removesuffix(ENDING))
                        there.add(name)
                        if name not in self._seen:
                            unit, at = unit_of(path, name, self._block), entry.stat().st_mtime_ns
                            if unit is None:
                                self._seen[name] = at
                            else:
                                found.append((at, unit))
                        elif everything and name in self._units:
                            at = entry.stat().st_mtime_ns
                            if at != self._seen[name]:
                                self._seen[name] = at
                                used.append((at, name))
                except ValueError:
                    with contextlib.suppress(OSError):
                        path.unlink()
                except OSError:
                    continue  # it has been removed in the meantime
        changes.gone = self._seen.keys() - there
        for name in changes.gone:
            del self._seen[name]
        self._units -= changes.gone
        changes.used = [name for _, name in sorted(used)]
        self._take_in(found, changes)
        if self._with_blocks and time.monotonic() - self._swept_at > _ABANDONED:
            self._swept_at = time.monotonic()
            self._remove_orphaned_blocks(there - self._units - self._broken)
        return changes

    def _take_in(self, found: list[tuple[int, Unit]], changes: Changes) -> None:
        broken, self._broken = self._broken, set()
        for at, unit in sorted(found, key=lambda each: each[0]):
            if not self._with_blocks or all(name in self._seen or self._folder.has(name) for name in unit.blocks):
                self._seen[unit.name] = at
                self._units.add(unit.name)
                changes.new[unit.name] = unit
            elif unit.name in broken:
                # Blocks come before it and go after it: the first time, the look itself may have been too early.
                self._folder.remove([unit.name])
            else:
                self._broken.add(unit.name)
                self._folder_time = 0

    def _remove_orphaned_blocks(self, loose: set[Name]) -> None:
        """Removes those of these blocks that no unit refers to: their writer was killed before it wrote the unit."""
        for name in self._units | self._broken if loose else ():
            with contextlib.suppress(OSError, ValueError):
                unit = unit_of(self._folder.file(name), name, self._block)
                loose.difference_update(unit.blocks if unit is not None else ())
        late = self._began if self.alone else time.time() - _ABANDONED
        for name in loose:
            with contextlib.suppress(OSError):
                if self._folder.file(name).stat().st_mtime < late:
                    self._folder.remove([name])

    def _remove_abandoned(self, path: Path) -> None:
        host, process, _ = path.name.removesuffix(UNFINISHED).rsplit("-", 2)
        own = host == socket.gethostname() and process == str(os.getpid())
        late = time.time() - path.stat().st_mtime > _ABANDONED
        if late or (not own and (_is_dead(host, process) or (self.alone and path.stat().st_mtime < self._began))):
            path.unlink()


def make_room(root: Path, own: Path, most: int) -> None:
    """Empty other models' folders under `root` that no process uses, the longest unused first, until all together hold
    `most` bytes.

    Only folders with our marker count, and only files with our names are removed: a folder that holds anything else
    stays, with that in it.
    """
    found = []
    for path in root.iterdir():
        with contextlib.suppress(OSError):
            if is_marked(path):
                sizes = [file.lstat() for file in path.iterdir() if _is_ours(file)]
                found.append((max((each.st_mtime for each in sizes), default=0.0), sum(s.st_size for s in sizes), path))
    total = sum(size for _, size, _ in found)
    for _, size, path in sorted(found, key=lambda each: each[0]):
        if total <= most:
            return
        if path != own and not _in_use(path):
            _remove(path)
            total -= size


def _is_ours(file: Path) -> bool:
    known = PART_NAME.fullmatch(file.name) or UNFINISHED_NAME.fullmatch(file.name)
    return known is not None and is_regular(file)


def _remove(path: Path) -> None:
    """The marker goes last, so that a removal that was cut short is taken up again."""
    with contextlib.suppress(OSError):
        files = list(path.iterdir())
        ours = [file for file in files if _is_ours(file)]
        for file in ours:
            file.unlink(missing_ok=True)
        if {file.name for file in files} - {file.name for file in ours} <= {_LOCK, MARKER}:
            for name in (_LOCK, MARKER):
                (path / name).unlink(missing_ok=True)
            path.rmdir()


def _locked(path: Path) -> int | None:
    """A file descriptor to lock; None if the folder does not allow one."""
    try:
        return os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError:
        return None


def _in_use(path: Path) -> bool:
    try:
        lock = os.open(path / _LOCK, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return False
    except OSError:
        return True
    finally:
        os.close(lock)


def _is_dead(host: str, process: str) -> bool:
    if host != socket.gethostname() or not process.isdigit():
        return False
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass
    return False
