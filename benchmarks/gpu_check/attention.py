"""Attention over pages: decode at long contexts, rows of very different lengths, tiles of prompts."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.sizes import BF16, CLOSE, F32, I32, Sizes
from benchmarks.gpu_check.timing import difference, fastest, seconds
from kernels_pallas.paged_attention import paged_attention, pallas_gpu
from serving.bench.report import emit

MOST = 40e9
"""Bytes of a cache that are measured."""


def check_attention(sizes: Sizes, copy: float, deadline: Deadline) -> bool:
    """Check each against plain XLA; report times with the bytes of the keys and values read."""
    ok = True
    per_key = 2 * sizes.kv_heads * sizes.key_dim * 2
    tiles = sizes.prompt // sizes.tile_size
    positions = np.arange(sizes.prompt).reshape(tiles, sizes.tile_size)
    ok &= _compare(sizes, copy, positions, np.zeros(tiles, int), 0, {"tokens of a prompt": sizes.prompt})
    cases = itertools.product(sizes.steps, sizes.contexts, sizes.rows)
    for steps, context, rows in deadline.each("attention", cases):
        lengths = {"equal": np.full(rows, context), "one long": np.maximum(context // 64, 16) + np.zeros(rows, int)}
        lengths["one long"][0] = context
        for what, each in lengths.items():
            if (moved := int(each.sum()) * per_key) > MOST:
                emit(metric="attention", skipped="the cache is too large", rows=rows, context=context)
                continue
            positions = each[:, None] - steps + np.arange(steps)
            about = {"rows": rows, "queries": steps, "context": context, "lengths": what}
            ok &= _compare(sizes, copy, positions, np.arange(rows), moved, about)
    return ok


def sweep_attention(sizes: Sizes, deadline: Deadline) -> bool:
    """Block sizes of decode, for 64 rows at most."""
    rows, context = max(n for n in sizes.rows if n <= 64), sizes.contexts[0]
    q, kv, places = _inputs(sizes, np.full((rows, 1), context - 1), np.arange(rows), BF16)

    def of(**blocks: int) -> float:
        run = partial(pallas_gpu.paged_attention, scale=0.1, interpret=sizes.interpret, **blocks)
        decode = jax.jit(lambda kv, q: (kv, run(q, kv, **places)), donate_argnums=0)
        return seconds(decode, kv + 0, q, calls=sizes.calls)

    fastest(f"attention of {rows} rows", of, {"warps": (2, 4, 8), "stages": (1, 2, 3)}, deadline)
    return True


def _compare(sizes: Sizes, copy: float, positions: Any, block_row: Any, moved: int, about: dict[str, Any]) -> bool:
    found = {}
    for dtype in (F32, BF16) if moved < MOST / 20 else (BF16,):
        for name in (sizes.kernel, "xla"):
            q, kv, places = _inputs(sizes, positions, block_row, dtype)

            def run(kv: Any, q: Any, places: Any = places, name: str = name) -> Any:
                return kv, paged_attention(q, kv, **places, scale=0.1, implementation=name)

            compiled = jax.jit(run, donate_argnums=0)
            found[name] = compiled(kv, q)[1]
            if dtype == BF16:
                timed = seconds(compiled, _inputs(sizes, positions, block_row, dtype)[1], q, calls=sizes.calls)
                rate = {"of_copy": round(moved / timed / copy, 3)} if moved else {}
                emit(metric="attention", by=name, us=round(timed * 1e6, 1), **about, **rate)
        error = difference(found[sizes.kernel], found["xla"])
        ok = error < CLOSE[jnp.dtype(dtype).name]
        emit(metric="attention against xla", ok=ok, error=error, dtype=jnp.dtype(dtype).name, **about)
        if not ok:
            return False
    return True


def _inputs(sizes: Sizes, positions: Any, block_row: Any, dtype: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Queries, a cache, and places: pages of rows apart from each other, in a random order."""
    rows = int(block_row.max()) + 1
    counts = [int(positions[block_row == row].max()) // sizes.page_size + 1 for row in range(rows)]
    pages = np.random.default_rng(0).permutation(sum(counts)) + 1
    table = np.zeros((rows, max(counts)), np.int32)
    for row, end in enumerate(np.cumsum(counts)):
        table[row, : counts[row]] = pages[end - counts[row] : end]
    keys = jax.random.split(jax.random.key(0), 2)
    q = jax.random.normal(keys[0], (*positions.shape, sizes.q_heads, sizes.key_dim), dtype)
    kv = jax.random.normal(keys[1], (len(pages) + 1, sizes.page_size, 2 * sizes.kv_heads, sizes.key_dim), dtype)
    places = {"positions": positions, "page_table": table, "block_row": block_row}
    return q, kv, {name: jnp.asarray(place, I32) for name, place in places.items()}
