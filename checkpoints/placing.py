"""Places parameters on devices, one at a time."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Sharding
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn, TransferSpeedColumn

from mamba_jax.config import HybridConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import bits_of

log = logging.getLogger(__name__)

LINE_EVERY = 10.0
"""Seconds between two lines of progress without a terminal."""

Shardings = Sharding | Callable[[str], Sharding | None] | None
"""Where parameters go: one sharding for all, a function of the parameter's dotted path, or the default device."""
Index = tuple[slice, ...]


Reader = Callable[[Index], np.ndarray]
"""Returns the piece `parameter[index]` of one parameter, in any dtype; may be a view of a file."""
Advance = Callable[[int], None]
"""Advances the progress bar by a number of bytes."""


def sharding_of(shardings: Shardings, path: str) -> Sharding | None:
    """Returns the sharding of one parameter; None is the default device."""
    return shardings(path) if callable(shardings) else shardings


def abstract_parameters(config: HybridConfig, dtype: Any) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of a model's parameters by dotted path; no memory is taken."""
    found = parameters(HybridModel.abstract(config, dtype=dtype))
    return {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in found.items()}


def place(target: jax.ShapeDtypeStruct, read: Reader, sharding: Sharding | None) -> jax.Array:
    """Reads one parameter and places it; with a sharding, each device's piece by itself.

    What `read` returns is copied, never aliased: the model must not change when its file does.
    """

    everything, dtype = (slice(None),) * len(target.shape), held_dtype(target.dtype, sharding)

    def piece(index: Index | None) -> np.ndarray:
        return _aligned_copy(read(everything if index is None else index), dtype)

    if sharding is None:
        return jax.block_until_ready(jax.device_put(piece(everything)))
    return jax.block_until_ready(jax.make_array_from_callback(target.shape, sharding, piece))


def held_dtype(dtype: Any, sharding: Sharding | None) -> np.dtype:
    """Returns a parameter's dtype on its devices: 4-bit numbers take 8 bits on a CPU that simulates several devices.

    JAX (0.10) treats such arrays as unpacked there, and refuses to run compiled programs with them.
    """
    devices: Any = [] if sharding is None else list(sharding.device_set)
    if len(devices) < 2 or devices[0].platform != "cpu":
        return np.dtype(dtype)
    return {"int4": np.dtype(np.int8), "float4_e2m1fn": np.dtype(ml_dtypes.float8_e4m3fn)}.get(
        np.dtype(dtype).name, np.dtype(dtype)
    )


def _aligned_copy(values: np.ndarray, dtype: Any) -> np.ndarray:
    """Returns an aligned copy, which JAX uses on a CPU without copying it again."""
    alignment = 64
    size = values.size * np.dtype(dtype).itemsize
    memory = np.empty(size + alignment, np.uint8)
    start = -memory.ctypes.data % alignment
    copy = memory[start : start + size].view(dtype).reshape(values.shape)
    copy[...] = values
    return copy


def nbytes(target: jax.ShapeDtypeStruct) -> int:
    """Size of one parameter."""
    return math.prod(target.shape) * bits_of(target.dtype) // 8


@contextmanager
def progress_bar(what: str, total: int, shown: bool) -> Iterator[Advance]:
    """A bar on stderr that counts bytes; where that is no terminal, a line of the log now and then."""
    if shown and not sys.stderr.isatty():
        yield _logged(what, total)
        return
    sizes = DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn()
    columns = TextColumn("{task.description}"), BarColumn(), *sizes
    with Progress(*columns, console=Console(stderr=True), disable=not shown) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def _logged(what: str, total: int) -> Advance:
    done, last = 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last > LINE_EVERY:
            last = time.monotonic()
            log.info("%s: %.1f of %.1f GB", what, done / 1e9, total / 1e9)

    return advance
