"""A digest of every byte of a checkpoint's weights, computed while the files are read and remembered between runs.

Each tensor is hashed separately, so tensors divided over other files have the same digest. The hash is SHA-256:
OpenSSL computes it with the processor's SHA instructions (1.7 GB/s per thread measured; BLAKE2b 0.9) and releases
Python's lock meanwhile, so several threads keep up with a disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from checkpoints.errors import CheckpointError
from checkpoints.json_file import reading
from checkpoints.user_cache import cache_home, make_private

log = logging.getLogger(__name__)

_THREADS = min(4, os.cpu_count() or 1)
_CHUNK = 4 << 20
_SETTLED = 2.0
"""Seconds after a file's last change from which on its times show whether it has changed again."""

Range = tuple[int, int]
"""First byte, and the one after the last."""


class FileHasher(contextlib.AbstractContextManager["FileHasher"]):
    """Hashes ranges of files in a few threads. A context manager: leaving it ends the threads.

    Args:
        folder: where digests are remembered; by default in the user's cache directory. A remembered digest is used
            while the file's inode, size and times of change are the same.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or cache_home() / "mamba-jax" / "weights"
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="weights-digest")
        self._files: dict[Path, _File] = {}
        self.hashed_bytes = 0
        """Bytes hashed by this object; bytes of files with a remembered digest are not."""

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, path: Path, ranges: Mapping[str, Range], status: os.stat_result) -> None:
        """Adds a file.

        Args:
            path: the file.
            ranges: every range to hash, by a label that is part of the digest.
            status: of the file as its reader opened it.
        """
        file = _File(path, dict(ranges), _identity(status))
        file.known = self._remembered(file)
        self._files[path] = file

    def start(self, path: Path, label: str) -> None:
        """Starts to hash a range. Call it right after the range was read, while the system still caches its pages."""
        file = self._files[path]
        if not file.known and label not in file.jobs:
            start, end = file.ranges[label]
            self.hashed_bytes += end - start
            file.jobs[label] = self._threads.submit(_hash_range, path, start, end, file.identity)

    def digest(self) -> str:
        """Returns the digest of all ranges of all files, in the order of their labels. Waits for those not hashed yet.

        Raises:
            CheckpointError: a file cannot be read, or has changed since it was opened.
        """
        for path, file in self._files.items():
            for label in file.ranges:
                self.start(path, label)
        found: list[tuple[str, str]] = []
        for file in self._files.values():
            if not file.known:
                file.known = {label: job.result() for label, job in file.jobs.items()}
                self._remember(file)
            found += file.known.items()
        return hashlib.sha256(json.dumps(sorted(found)).encode()).hexdigest()

    def _remembered(self, file: _File) -> dict[str, str]:
        try:
            kept = json.loads(self._kept_in(file).read_bytes())
            if kept["file"] == file.identity and kept["digests"].keys() == file.ranges.keys():
                return {str(label): str(digest) for label, digest in kept["digests"].items()}
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            pass  # absent or damaged: the file is hashed again
        return {}

    def _remember(self, file: _File) -> None:
        if time.time() - max(file.identity[-2:]) / 1e9 < _SETTLED:
            return
        target = self._kept_in(file)
        try:
            make_private(target.parent)
            with tempfile.NamedTemporaryFile("w", dir=target.parent, delete=False) as unfinished:
                json.dump({"path": str(file.path), "file": file.identity, "digests": file.known}, unfinished)
            try:
                os.replace(unfinished.name, target)
            except OSError:
                with contextlib.suppress(OSError):  # the first error is the one to report
                    os.unlink(unfinished.name)
                raise
        except OSError as error:
            log.info("the digest of %s is not saved: %s", file.path, error.strerror or error)

    def _kept_in(self, file: _File) -> Path:
        return self._folder / (hashlib.sha256(os.fsencode(file.path.resolve())).hexdigest()[:32] + ".json")


@dataclass
class _File:
    """One file that is hashed."""

    path: Path
    ranges: dict[str, Range]
    identity: list[int]
    known: dict[str, str] = field(default_factory=dict)
    """Digests by label, once all are known."""
    jobs: dict[str, Future[str]] = field(default_factory=dict)


def _identity(status: os.stat_result) -> list[int]:
    # The time of the inode's change, too: unlike that of the content's, programs cannot set it back.
    return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


def _hash_range(path: Path, start: int, end: int, identity: list[int]) -> str:
    found = hashlib.sha256()
    buffer = memoryview(bytearray(min(_CHUNK, max(1, end - start))))
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        left = end - start
        while left:
            count: Any = file.readinto(buffer[: min(left, len(buffer))])
            if not count:
                break
            found.update(buffer[:count])
            left -= count
        same = not left and _identity(os.fstat(file.fileno())) == identity
    if not same:
        raise CheckpointError(f"{path}: was changed while it was loaded; start again")
    return found.hexdigest()
