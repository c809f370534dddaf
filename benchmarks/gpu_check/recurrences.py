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
from kernels_pallas.delta_scan import delta_scan
from kernels_pallas.delta_scan import pallas_gpu as delta_scan_kernel
from kernels_pallas.delta_update import delta_update
from kernels_pallas.delta_update import pallas_gpu as delta_update_kernel
from kernels_pallas.ssd_scan import pallas_gpu as scan_kernel
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import pallas_gpu as update_kernel
from kernels_pallas.state_update import state_update
from serving.bench.report import emit


@dataclasses.dataclass(frozen=True)
class Recurrence:
    """The two operations of a recurrence, their kernels, and the block sizes that these are tried with."""

    layer: Callable[..., tuple[jax.Array, ...]]
    """The inputs of tokens [*lead], from (sizes, *lead)."""
    update: Callable[..., Any]
    scan: Callable[..., Any]
    update_kernel: Callable[..., Any]
    scan_kernel: Callable[..., Any]
    scan_blocks: Mapping[str, tuple[int, ...]]


MAMBA2 = Recurrence(
    Sizes.layer, state_update, ssd_scan, update_kernel.state_update, scan_kernel.ssd_scan,
    {"tokens": (32, 64, 128), "channels": (16, 32, 64), "warps": (4, 8), "stages": (1, 2, 3)},
)  # fmt: skip
DELTA = Recurrence(
    Sizes.delta_layer, delta_update, delta_scan, delta_update_kernel.delta_update, delta_scan_kernel.delta_scan,
    {"tokens": (32, 64), "channels": (16, 32, 64), "warps": (2, 4, 8)},
)  # fmt: skip


def check_update(recurrence: Recurrence, sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """Rows that read and write slots of their own."""
    ok, name = True, recurrence.update.__name__

    def update(store: Any, inputs: Any, read: Any, write: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
        y, store = recurrence.update(*inputs, store, read_slot=read, write_slot=write, **how)
        return store, y

    for steps, dtype, rows in deadline.each(name, itertools.product(sizes.steps, (F32, BF16), sizes.rows)):
        slots = (np.random.default_rng(0).permutation(rows * (steps + 1)) + 1).astype(np.int32)
        args = (recurrence.layer(sizes, rows, steps), slots[:rows], slots[rows:].reshape(rows, steps))
        ok &= compare(
            name, sizes, update, ["xla_all_rows"], partial(sizes.store, len(slots) + 1, dtype), args,
            rows=rows, steps=steps, store=jnp.dtype(dtype).name, moved=rows * (1 + steps) * sizes.slot_bytes(dtype),
            copy=copy,
        )  # fmt: skip
    return ok


def sweep_update(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Block sizes of the update, for 64 rows at most."""
    rows = max(n for n in sizes.rows if n <= 64)
    own = np.arange(1, rows + 1, dtype=np.int32)
    inputs = recurrence.layer(sizes, rows, 1)

    def of(**blocks: int) -> float:
        def run(store: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            y, store = recurrence.update_kernel(
                *inputs, store, read_slot=own, write_slot=own[:, None], interpret=sizes.interpret, **blocks
            )
            return store, y

        return seconds(jax.jit(run, donate_argnums=0), sizes.store(rows + 1, F32), inputs, calls=sizes.calls)

    axes = {"channels": (8, 16, 32, 64), "warps": (1, 2, 4, 8)}
    fastest(f"{recurrence.update.__name__} of {rows} rows", of, axes, deadline)
    return True


def check_scan(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Prompts of one and of several rows, each from a state and to a state at every other tile."""
    ok, name = True, recurrence.scan.__name__

    def scan(store: Any, inputs: Any, first: Any, read: Any, write: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
        y, store = recurrence.scan(*inputs, store, tile_first=first, read_slot=read, write_slot=write, **how)
        return store, y

    for tiles, rows in deadline.each(name, itertools.product(sizes.tiles, (1, 4))):
        first, read, write = _places(tiles, rows)
        inputs = recurrence.layer(sizes, tiles, sizes.tile_size)
        ok &= compare(
            name, sizes, scan, ["xla"], partial(sizes.store, 2 * tiles + 1, F32), (inputs, first, read, write),
            tokens=tiles * sizes.tile_size, rows=int(first.sum()), rounded=ROUNDED,
        )  # fmt: skip
    if recurrence is MAMBA2:
        time_mamba_ssm(sizes, max(sizes.tiles))
    return ok


def sweep_scan(recurrence: Recurrence, sizes: Sizes, deadline: Deadline) -> bool:
    """Block sizes of the scan, for one long prompt."""
    tiles = max(sizes.tiles)
    first, read, write = map(jnp.asarray, _places(tiles, 1))
    inputs = recurrence.layer(sizes, tiles, sizes.tile_size)

    def of(**blocks: int) -> float:
        def run(store: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
            y, store = recurrence.scan_kernel(
                *inputs, store, tile_first=first, read_slot=read, write_slot=write, interpret=sizes.interpret, **blocks
            )
            return store, y

        return seconds(jax.jit(run, donate_argnums=0), sizes.store(2 * tiles + 1, F32), inputs, calls=sizes.calls)

    axes = {"tokens": (16, 32), "channels": (16,)} if sizes.interpret else dict(recurrence.scan_blocks)
    fastest(f"{recurrence.scan.__name__} of {tiles * sizes.tile_size} tokens", of, axes, deadline)
    return True


def _places(tiles: int, rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The tiles that begin a row, the slots that these read, and those that every other tile writes."""
    number = np.arange(tiles)
    first = number % max(1, tiles // rows) == 0
    read = np.where(first, 1 + number, 0).astype(np.int32)
    return first, read, np.where(number % 2, 1 + tiles + number, 0).astype(np.int32)


def time_mamba_ssm(sizes: Sizes, tiles: int) -> None:
    """The Triton kernels of the `mamba-ssm` package, for the same work."""
    if importlib.util.find_spec("mamba_ssm") is None:
        emit(metric="ssd_scan", by="mamba-ssm", skipped="the package is not installed")
        return
    import torch
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

    def tensor(v: jax.Array) -> Any:
        return torch.from_numpy(np.array(v.astype(F32))).cuda().to(torch.bfloat16 if v.dtype == BF16 else torch.float32)

    x, dt, a, b, c, d = (tensor(v) for v in sizes.layer(1, tiles * sizes.tile_size))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for timed in (False, True):
        begin.record()
        for _ in range(sizes.calls):
            mamba_chunk_scan_combined(x, dt, a, b, c, sizes.tile_size, D=d, return_final_states=True)
        end.record()
        torch.cuda.synchronize()
        if timed:
            us = round(begin.elapsed_time(end) * 1e3 / sizes.calls, 1)
            emit(metric="ssd_scan", by="mamba-ssm", tokens=tiles * sizes.tile_size, us=us)
