"""Stores compiled programs on disk, so that the next start does not trace, lower or compile them.

JAX's compilation cache saves compile time, but its key is the lowered program. A lookup must trace and lower the
program, which takes most of a small model's start-up time. This module's key consists of the inputs of tracing: the
source text of the packages that define the program, the versions of JAX and its dependencies, the model's structure,
the device, JAX's settings, and the shapes and dtypes of the arguments. Without an exact match the program is compiled.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pickle
import platform
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

from checkpoints.user_cache import make_private
from mamba_jax.program_cache import look_of
from mamba_jax.programs import StepPrograms
from serving.engine.programs.compile_cache import machine, use_compilation_cache
from serving.points.sources import PROGRAM_PACKAGES, source_digest

log = logging.getLogger(__name__)

_TRACED_WITH = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")
_ENVIRONMENT = ("JAX_", "XLA_", "LIBTPU_", "TPU_", "CUDA_", "NVIDIA_")
_UNUSED_FOR = 30 * 24 * 3600.0
_ENDING = ".program"


class KeptPrograms:
    """The programs of one `StepPrograms` in a folder, one file per program.

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
        self._description = "\n".join([programs.description, *_surroundings(self._devices)])
        self.loaded = 0
        """Number of programs loaded from disk."""
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > _UNUSED_FOR:
                path.unlink(missing_ok=True)

    def load(self, arguments: tuple[Any, ...]) -> tuple[jax.stages.Compiled, dict[str, dict[str, str]]] | None:
        """Returns the program for these arguments' shapes, and the kernels it uses; None if it must be compiled."""
        path = self._path(arguments)
        try:
            saved = pickle.loads(zlib.decompress(path.read_bytes()))
            compiled = serialize_executable.deserialize_and_load(
                saved["program"], saved["takes"], saved["gives"], self._devices[0].client, self._devices
            )
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # a damaged file can raise any error
            log.warning("a saved program cannot be used and is compiled again: %s: %s", path, _line(error))
            return None
        self.loaded += 1
        return compiled, saved["kernels"]

    def save(
        self, arguments: tuple[Any, ...], compiled: jax.stages.Compiled, kernels: dict[str, dict[str, str]]
    ) -> None:
        """Stores a compiled program. If that fails, the next start compiles it again."""
        path = self._path(arguments)
        try:
            program, takes, gives = serialize_executable.serialize(compiled)
            saved = pickle.dumps({"program": program, "takes": takes, "gives": gives, "kernels": kernels})
            # Write the file under another name first, so that no process reads a partial file.
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(zlib.compress(saved, level=1))
            os.replace(file.name, path)
        except Exception as error:  # some backends cannot serialize programs
            log.warning("a compiled program is not saved: %s", _line(error))

    def compiling(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context that disables JAX's own cache, so that compiled programs can be serialized."""
        return _jax_cache.off()

    def _path(self, arguments: tuple[Any, ...]) -> Path:
        whole = "\n".join([self._description, *map(str, look_of(arguments))])
        return self._folder / (hashlib.sha256(whole.encode()).hexdigest() + _ENDING)


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
        log.warning("compiled programs are not saved: %s", _line(error))
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
    """Yields descriptions of everything a program depends on besides the model and the arguments."""
    yield f"{platform.python_implementation()} {sys.version}"
    yield from (f"{name} {version(name)}" for name in _TRACED_WITH)
    yield source_digest(PROGRAM_PACKAGES)
    yield f"{machine()} {devices[0].client.platform_version}"
    yield from (f"{device.id} {device.platform} {device.device_kind}" for device in devices)
    # The location of caches does not change their contents.
    settings: dict[str, Any] = {
        **jax.config.values,
        **{k: v for k, v in os.environ.items() if k.startswith(_ENVIRONMENT)},
    }
    yield from (f"{name}={value}" for name, value in sorted(settings.items()) if "cache" not in name.lower())


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
