"""The updates and scans of Mamba2 and of the gated delta rule, compared with XLA and the `mamba-ssm` package."""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.sizes import BF16, F32, ROUNDED, Sizes, compare
from benchmarks.gpu_check.timing import fastest, seconds
from kernels_pallas.places import Rows, Tiles
from kernels_pallas.recurrence import Entry, recurrence_scan, recurrence_update
from kernels_pallas.recurrence.scan import pallas_gpu as scan_kernel
from kernels_pallas.recurrence.update import pallas_gpu as update_kernel
from serving.bench.report import emit


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """A recurrence, and the block sizes that its kernels are tried with."""

    name: str
    layer: Callable[..., Entry]
    """The entry of tokens [*lead], from (sizes, *lead)."""
    options: Mapping[str, Any]
    scan_blocks: Mapping[str, tuple[int, ...]]


MAMBA2 = Recurrence(
    "mamba2", Sizes.layer, {"erase": False, "skip": None},
    {"tokens": (32, 64, 128), "channels": (16, 32, 64), "warps": (4, 8), "stages": (1, 2, 3)},
)  # fmt: skip
DELTA = Recurrence(
    "delta", Sizes.delta_layer, {"erase": True, "skip": None},
    {"tokens": (32, 64), "channels": (16, 32, 64), "warps": (2, 4, 8)},
)  # fmt: skip


def check_update(recurrence: Recurrence, sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """Rows that read and write slots of their own."""
    ok, name = True, f"update of {recurrence.name}"

    def update(store: Any, entry: Any, rows: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
        y, store = recurrence_update(entry, store, rows, **recurrence.options, **how)
        return store, y

    for steps, dtype, rows in deadline.each(name, itertools.product(sizes.steps, (F32, BF16), sizes.rows)):
        slots = (np.random.default_rng(0).permutation(rows * (steps + 1)) + 1).astype(np.int32)
        args = (recurrence.layer(sizes, rows, steps), Rows(slots[:rows], slots[rows:].reshape(rows, steps)))
        ok &= compare(
            name, sizes, update, ["xla"], partial(sizes.store, len(slots) + 1, dtype), args,
            rows=rows, steps=steps, store=jnp.dtype(dtype).name, moved=rows * (1 + steps) * sizes.slot_bytes(dtype),
            copy=copy,
        )  # fmt: skip
    return ok


def sweep_update(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Block sizes of the update, for 64 rows at most."""
    rows = max(n for n in sizes.rows if n <= 64)
    own = np.arange(1, rows + 1, dtype=np.int32)
    entry, places = recurrence.layer(sizes, rows, 1), Rows(own, own[:, None])

    def of(**blocks: int) -> float:
        def run(store: jax.Array, entry: Any) -> tuple[jax.Array, jax.Array]:
            options = {**recurrence.options, "interpret": sizes.interpret, **blocks}
            y, store = update_kernel.update(entry, store, places, **options)
            return store, y

        return seconds(jax.jit(run, donate_argnums=0), sizes.store(rows + 1, F32), entry, calls=sizes.calls)

    axes = {"channels": (8, 16, 32, 64), "warps": (1, 2, 4, 8)}
    fastest(f"update of {recurrence.name}, {rows} rows", of, axes, deadline)
    return True


def check_scan(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Prompts of one and of several rows, each from a state and to a state at every other tile."""
    ok, name = True, f"scan of {recurrence.name}"

    def scan(store: Any, entry: Any, tiles: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
        y, store = recurrence_scan(entry, store, tiles, **recurrence.options, **how)
        return store, y

    for tiles, rows in deadline.each(name, itertools.product(sizes.tiles, (1, 4))):
        places, entry = _places(tiles, rows), recurrence.layer(sizes, tiles, sizes.tile_size)
        ok &= compare(
            name, sizes, scan, ["xla"], partial(sizes.store, 2 * tiles + 1, F32), (entry, places),
            tokens=tiles * sizes.tile_size, rows=int(places.first.sum()), rounded=ROUNDED,
        )  # fmt: skip
    if recurrence is MAMBA2:
        time_mamba_ssm(sizes, max(sizes.tiles))
    return ok


def sweep_scan(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Block sizes of the scan, for one long prompt."""
    tiles = max(sizes.tiles)
    places = jax.tree.map(jnp.asarray, _places(tiles, 1))
    entry = recurrence.layer(sizes, tiles, sizes.tile_size)

    def of(**blocks: int) -> float:
        def run(store: jax.Array, entry: Any) -> tuple[jax.Array, jax.Array]:
            options = {**recurrence.options, "interpret": sizes.interpret, **blocks}
            y, store = scan_kernel.scan(entry, store, places, **options)
            return store, y

        return seconds(jax.jit(run, donate_argnums=0), sizes.store(2 * tiles + 1, F32), entry, calls=sizes.calls)

    axes = {"tokens": (16, 32), "channels": (16,)} if sizes.interpret else dict(recurrence.scan_blocks)
    fastest(f"scan of {recurrence.name}, {tiles * sizes.tile_size} tokens", of, axes, deadline)
    return True


def _places(tiles: int, rows: int) -> Tiles:
    """The tiles that begin a row, the slots that these read, and those that every other tile writes."""
    number = np.arange(tiles)
    first = number % max(1, tiles // rows) == 0
    read = np.where(first, 1 + number, 0).astype(np.int32)
    return Tiles(first, read, np.where(number % 2, 1 + tiles + number, 0).astype(np.int32))


def time_mamba_ssm(sizes: Sizes, tiles: int) -> None:
    """The Triton kernels of the `mamba-ssm` package, for the same work."""
    if importlib.util.find_spec("mamba_ssm") is None:
        emit(metric="scan of mamba2", by="mamba-ssm", skipped="the package is not installed")
        return
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def tensor(v: jax.Array) -> Any:
        return torch.from_numpy(np.array(v.astype(F32))).cuda().to(torch.bfloat16 if v.dtype == BF16 else torch.float32)

    c, b, x, _, dt = (tensor(v) for v in sizes.layer(1, tiles * sizes.tile_size))
    a, d = (tensor(sign * jnp.ones(sizes.heads, F32)) for sign in (-1, 1))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for timed in (False, True):
        begin.record()
        for _ in range(sizes.calls):
            mamba_chunk_scan_combined(x, dt, a, b, c, sizes.tile_size, D=d, return_final_states=True)
        end.record()
        torch.cuda.synchronize()
        if timed:
            us = round(begin.elapsed_time(end) * 1e3 / sizes.calls, 1)
            emit(metric="scan of mamba2", by="mamba-ssm", tokens=tiles * sizes.tile_size, us=us)
