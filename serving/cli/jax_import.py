"""Imports JAX for a command: sets the GPU memory that JAX may use, and removes noise from stderr.

A GPU plugin writes lines to stderr on a machine that has no NVIDIA driver.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
import tempfile
from pathlib import Path

from serving.config import EngineConfig
from serving.engine.assembly.gpu_memory import reserve_gpu_memory

_NOISE = ("absl::InitializeLog() is called", "cudart_stub.cc")
_DRIVER_FILES = ("/dev/nvidia0", "/dev/nvidiactl", "/dev/dxg")


def import_jax(memory_utilization: float | None = None) -> None:
    """Imports JAX with this fraction of each GPU's memory (None: the engine's default).

    The libraries of a GPU plugin write their lines to file descriptor 2 when they are loaded, before any log level
    applies.
    """
    reserve_gpu_memory(memory_utilization or EngineConfig.model_fields["memory_utilization"].default)
    spec = importlib.util.find_spec("jax_plugins")  # the shared libraries of the installed CUDA plugins for JAX
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    libraries = sorted(library for folder in folders for library in Path(folder).glob("xla_cuda*/*.so"))
    if "jax" in sys.modules or not libraries or any(map(os.path.exists, _DRIVER_FILES)):
        return
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as file:
        try:
            os.dup2(file.fileno(), 2)
            import jax  # noqa: F401

            # JAX loads these when it searches for devices. Loading them again writes nothing.
            for library in libraries:
                ctypes.CDLL(str(library))
        except OSError:
            pass  # JAX reports a library that cannot be loaded
        finally:
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            file.seek(0)
            for line in file.read().decode(errors="replace").splitlines(keepends=True):
                if not any(noise in line for noise in _NOISE):
                    sys.stderr.write(line)
