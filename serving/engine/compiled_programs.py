"""Compiled programs, stored on disk for the next start."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import pickle
import platform
import re
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, NamedTuple

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from checkpoints.errors import one_line
from checkpoints.user_cache import cache_home, make_private
from mamba_jax.program_cache import look_of
from mamba_jax.programs import KernelChoice, StepPrograms
from serving.state_transfer.identity import PROGRAM_PACKAGES, source_digest

log = logging.getLogger(__name__)

_TRACED_WITH = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_ENVIRONMENT = {"tpu": ("LIBTPU_", "TPU_"), "gpu": ("CUDA_", "NVIDIA_")}
"""Beginnings of the variables that the programs of a platform depend on, next to those of JAX and XLA."""
_UNREAD = re.compile("cache|client_(mem|preallocate|allocator)", re.IGNORECASE)
"""Names of settings that no program depends on: the location of caches, and how JAX allocates memory."""
_UNUSED_FOR, _SWEPT_EVERY = 30 * 24 * 3600.0, 24 * 3600.0
_LONGEST_WAIT = 900.0
"""Seconds that a process waits for the program that another one compiles."""
PLACE, PROGRAM = ".place", ".program"
"""Endings of files that are named by the first key, and hold a `_Found` as JSON; and by the second."""


class _Found(NamedTuple):
    """What the first key leads to."""

    program: str
    """Name of the program's file."""
    kernels: dict[str, dict[str, str]]
    """Those that the program uses, as the sources of the first key name them: sources with other names may lower to
    the same text."""

    @classmethod
    def of(cls, text: str) -> _Found | None:
        """None if the text is empty or damaged."""
        with contextlib.suppress(ValueError, TypeError):
            return cls(*json.loads(text))
        return None


def use_compilation_cache() -> Path | None:
    """Sets JAX's persistent compilation cache to the user's cache directory, unless one is already configured.

    JAX has one cache for the whole process. Returns the directory in use; None if it cannot be created.
    """
    elsewhere = getattr(jax.config, "jax_compilation_cache_dir", None)
    if elsewhere:
        return Path(elsewhere)
    directory = cache_home() / "mamba-jax" / f"xla-{machine()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("compiled programs are not saved: %s: %s", directory, error.strerror)
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # A tiny model's programs compile in less than JAX's default threshold, but there are many of them.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)
    return directory


def machine() -> str:
    """Returns a digest of the kind of CPU: machines may share a home directory, but not code compiled for a CPU."""
    try:
        flags = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags"))
    except (OSError, StopIteration):
        flags = platform.processor()
    return hashlib.sha256(f"{platform.machine()} {flags}".encode()).hexdigest()[:12]


class KeptPrograms:
    """The programs of one `StepPrograms` in a folder, so that the next start does not trace, lower or compile them.

    JAX's own cache has the lowered program as its key, and tracing and lowering take most of a small model's start-up
    time. Here the inputs of tracing (source text of the packages that define the program, versions, the model's
    structure, the device, settings, shapes and dtypes of the arguments) lead to the key of the lowered program, so that
    after an edit of the sources only programs that the edit changes are compiled. Processes that need the same program
    at the same time compile it once.

    The files are pickles, so the folder must belong to this user, and no other user may have write access.
    """

    def __init__(self, folder: Path, programs: StepPrograms) -> None:
        """Creates the folder, and deletes programs that were not used for a month.

        Raises:
            OSError: the folder cannot be created, or other users can write to it.
        """
        make_private(folder)
        status = folder.stat()
        if status.st_uid != os.getuid() or status.st_mode & 0o022:
            raise PermissionError(f"{folder} can be written by others")
        self._folder = folder
        self._devices = programs.devices
        self._surroundings = "\n".join(_surroundings(self._devices))
        self._description = "\n".join([programs.description, source_digest(PROGRAM_PACKAGES), self._surroundings])
        self.loaded = 0
        """Number of programs loaded from disk."""
        swept = folder / "swept"
        if not swept.exists() or time.time() - swept.stat().st_mtime > _SWEPT_EVERY:
            swept.touch()
            for path in folder.iterdir():
                with contextlib.suppress(FileNotFoundError):  # another process renames or deletes files, too
                    if time.time() - path.stat().st_mtime > _UNUSED_FOR:
                        path.unlink()

    def find(
        self,
        arguments: tuple[Any, ...],
        lower: Callable[[], jax.stages.Lowered],
        compiler_options: Mapping[str, Any],
        kernels: KernelChoice,
    ) -> jax.stages.Compiled:
        """Returns the program for these arguments' shapes, from disk or compiled now. `kernels` get those it uses."""
        place = self._place(arguments)
        with _locked(place) as file:
            found = _Found.of(file.read())
            compiled = self._read(self._folder / found.program) if found else None
            if found and compiled is not None:
                os.utime(place)
                for operation, by in found.kernels.items():
                    kernels.chosen.setdefault(operation, {}).update(by)
                return compiled
            lowered = lower()
            form = _looks(arguments), repr(lowered.out_info), repr(compiler_options)
            path = self._path(PROGRAM, self._surroundings, *form, lowered.as_text())
            compiled = self._read(path)
            if compiled is None:
                with _jax_cache.off():
                    compiled = lowered.compile(dict(compiler_options))
                self._write(path, compiled)
            file.truncate(0)
            chosen = {name: dict(by) for name, by in list(kernels.chosen.items())}
            file.write(json.dumps(_Found(path.name, chosen)))
            return compiled

    def _read(self, path: Path) -> jax.stages.Compiled | None:
        try:
            saved = pickle.loads(zlib.decompress(path.read_bytes()))
            compiled: jax.stages.Compiled = serialize_executable.deserialize_and_load(
                saved["program"], saved["takes"], saved["gives"], self._devices[0].client, self._devices
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise any error
            log.warning("a saved program cannot be used and is compiled again: %s: %s", path, one_line(error))
            return None
        self.loaded += 1
        return compiled

    def _write(self, path: Path, compiled: jax.stages.Compiled) -> None:
        try:
            program, takes, gives = serialize_executable.serialize(compiled)
            saved = pickle.dumps({"program": program, "takes": takes, "gives": gives})
            # Write the file under another name first, so that no process reads a partial file.
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(zlib.compress(saved, level=1))
            os.replace(file.name, path)
        except Exception as error:  # some backends cannot serialize programs
            log.warning("a compiled program is not saved: %s", one_line(error))

    def _place(self, arguments: tuple[Any, ...]) -> Path:
        return self._path(PLACE, self._description, _looks(arguments))

    def _path(self, ending: str, *parts: str) -> Path:
        return self._folder / (hashlib.sha256("\n".join(parts).encode()).hexdigest() + ending)


def _looks(arguments: tuple[Any, ...]) -> str:
    return "\n".join(map(str, look_of(arguments)))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[IO[str]]:
    """Opens a file that only one process or thread has open at a time; one that is lost where that is impossible, or
    where the other has it for `_LONGEST_WAIT` seconds: it may have been stopped."""
    with contextlib.ExitStack() as stack:
        try:
            file = stack.enter_context(path.open("a+"))
            _lock(file, time.monotonic() + _LONGEST_WAIT)
            # For all that have it open: a forked process may have it open for longer than this one.
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)
            stack.callback(file.flush)
            file.seek(0)
        except OSError as error:
            if isinstance(error, BlockingIOError):
                log.warning("another process has had %s for %.0f s; its program is compiled here", path, _LONGEST_WAIT)
            file = stack.enter_context(tempfile.TemporaryFile("w+"))
        yield file


def _lock(file: IO[str], end: float) -> None:
    """Raises `BlockingIOError` if another process or thread has the file locked until `end`, of `time.monotonic`."""
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        time.sleep(0.05)


def keep_programs(programs: StepPrograms) -> KeptPrograms | None:
    """Has `programs` load and store compiled programs in a folder next to JAX's compilation cache.

    Returns None if there is no such folder, or if several processes share the devices: they must all compile.
    """
    directory = use_compilation_cache()
    if directory is None or not directory.is_dir() or jax.process_count() != 1:
        return None
    try:
        programs.kept = kept = KeptPrograms(directory / "mamba-jax-programs", programs)
    except OSError as error:
        log.warning("compiled programs are not saved: %s", one_line(error))
        return None
    return kept


class _JaxCache:
    """Disables JAX's own compilation cache, which is shared by the whole process, while programs are compiled."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = threading.Lock(), 0, True

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disables JAX's cache within the context. On a CPU, a program that JAX read from its cache cannot be
        serialized again, because functions are missing."""
        with self._lock:
            if not self._users:
                self._before = jax.config.values["jax_enable_compilation_cache"]
                self._switch(False)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if not self._users:
                    self._switch(self._before)

    def _switch(self, on: bool) -> None:
        jax.config.update("jax_enable_compilation_cache", on)
        compilation_cache.reset_cache()  # otherwise JAX keeps the setting of the first compilation


_jax_cache = _JaxCache()


def _surroundings(devices: list[jax.Device]) -> Iterator[str]:
    """Yields descriptions of everything a program depends on besides the sources, the model and the arguments."""
    yield f"{platform.python_implementation()} {sys.version}"
    yield from (f"{name} {version(name)}" for name in _TRACED_WITH)
    yield f"{machine()} {devices[0].client.platform_version}"
    yield from (f"{device.id} {device.platform} {device.device_kind}" for device in devices)
    beginnings = ("JAX_", "XLA_", *_ENVIRONMENT.get(devices[0].platform, ()))
    settings: dict[str, Any] = {
        **jax.config.values,
        **{k: v for k, v in os.environ.items() if k.startswith(beginnings)},
    }
    yield from (f"{name}={value}" for name, value in sorted(settings.items()) if not _UNREAD.search(name))
