"""The state update and the scan, beside XLA and the `mamba-ssm` package."""

from __future__ import annotations

import importlib.util
import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.sizes import BF16, F32, ROUNDED, Sizes, compare
from benchmarks.gpu_timing import fastest, seconds
from kernels_pallas.ssd_scan import pallas_gpu as scan_kernel
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import pallas_gpu as update_kernel
from kernels_pallas.state_update import state_update
from serving.bench.report import emit


def update(store: Any, inputs: Any, read: Any, write: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
    y, store = state_update(*inputs, store, read_slot=read, write_slot=write, **how)
    return store, y


def scan(store: Any, inputs: Any, first: Any, read: Any, write: Any, **how: Any) -> tuple[jax.Array, jax.Array]:
    y, store = ssd_scan(*inputs, store, tile_first=first, read_slot=read, write_slot=write, **how)
    return store, y


def check_update(sizes: Sizes, copy: float, *, sweep: bool) -> bool:
    """Rows that read and write slots of their own."""
    ok = True
    for rows, steps, dtype in itertools.product(sizes.rows, sizes.steps, (F32, BF16)):
        slots = (np.random.default_rng(0).permutation(rows * (steps + 1)) + 1).astype(np.int32)
        args = (sizes.layer(rows, steps), slots[:rows], slots[rows:].reshape(rows, steps))
        ok &= compare(
            "state_update", sizes, update, ["xla_all_rows"], partial(sizes.store, len(slots) + 1, dtype), args,
            rows=rows, steps=steps, store=jnp.dtype(dtype).name, moved=rows * (1 + steps) * sizes.slot_bytes(dtype),
            copy=copy,
        )  # fmt: skip
    if sweep:
        rows = max(n for n in sizes.rows if n <= 64)
        own = np.arange(1, rows + 1, dtype=np.int32)
        inputs = sizes.layer(rows, 1)

        def of(**blocks: int) -> float:
            def run(store: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
                y, store = update_kernel.state_update(
                    *inputs, store, read_slot=own, write_slot=own[:, None], interpret=sizes.interpret, **blocks
                )
                return store, y

            return seconds(jax.jit(run, donate_argnums=0), sizes.store(rows + 1, F32), inputs, calls=sizes.calls)

        fastest(f"state_update of {rows} rows", of, {"channels": (8, 16, 32, 64), "warps": (1, 2, 4, 8)})
    return ok


def check_scan(sizes: Sizes, *, sweep: bool) -> bool:
    """Prompts of one and of several rows, each from a state and to a state at every other tile."""
    ok, places = True, {}
    for tiles, rows in itertools.product(sizes.tiles, (1, 4)):
        number = np.arange(tiles)
        first = number % max(1, tiles // rows) == 0
        places = {
            "first": first,
            "read": np.where(first, 1 + number, 0).astype(np.int32),
            "write": np.where(number % 2, 1 + tiles + number, 0).astype(np.int32),
        }
        inputs = sizes.layer(tiles, sizes.tile_size)
        ok &= compare(
            "ssd_scan", sizes, scan, ["xla"], partial(sizes.store, 2 * tiles + 1, F32), (inputs, *places.values()),
            tokens=tiles * sizes.tile_size, rows=int(first.sum()), rounded=ROUNDED,
        )  # fmt: skip
    if sweep:

        def of(**blocks: int) -> float:
            def run(store: jax.Array, inputs: Any) -> tuple[jax.Array, jax.Array]:
                y, store = scan_kernel.ssd_scan(
                    *inputs, store, tile_first=jnp.asarray(number == 0), read_slot=jnp.asarray(places["read"]),
                    write_slot=jnp.asarray(places["write"]), interpret=sizes.interpret, **blocks,
                )  # fmt: skip
                return store, y

            return seconds(jax.jit(run, donate_argnums=0), sizes.store(2 * tiles + 1, F32), inputs, calls=sizes.calls)

        axes = {"tokens": (32, 64, 128), "channels": (16, 32, 64), "warps": (4, 8), "stages": (1, 2, 3)}
        if sizes.interpret:
            axes = {"tokens": (16, 32), "channels": (16,)}
        fastest(f"ssd_scan of {tiles * sizes.tile_size} tokens", of, axes)
    time_mamba_ssm(sizes, tiles)
    return ok


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
