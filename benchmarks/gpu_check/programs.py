"""Step programs of whole models with random weights, their minimum of bytes, and the cost of a dispatch."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.gpu_check.sizes import BF16, F32, Sizes
from benchmarks.gpu_timing import seconds
from checkpoints import load_model
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.programs import StepPrograms
from mamba_jax.rows import init_rows
from mamba_jax.store import StoreShape, init_store
from serving.bench.report import emit

ROOM = 0.8
"""Of the memory that JAX has: weights and a store beyond it are not tried."""


def time_dispatch(sizes: Sizes) -> bool:
    """A program that does nothing, of few arrays and of as many as a model has."""
    for arrays in (1, 400):
        nothing = jax.jit(lambda store: ([v + 1 for v in store], 0), donate_argnums=0)
        timed = seconds(nothing, [jnp.zeros(8) for _ in range(arrays)], calls=sizes.calls)
        emit(metric="dispatch", arrays=arrays, us=round(timed * 1e6, 1))
    return True


def time_decode(sizes: Sizes, copy: float) -> bool:
    """Rows x contexts x drafts, all rows at one position; drafts are fed, and none is right."""
    for name in sizes.models:
        model, programs, dtype, weights = _load(sizes, name)
        shape = StoreShape.of(model.config)
        for context, rows, steps in itertools.product(sizes.contexts, sizes.rows, sizes.steps):
            pages = -(-(context + steps) // sizes.page_size)
            slot, page = shape.bytes_per_slot(dtype), shape.bytes_per_page(sizes.page_size, dtype)
            about = {"model": name, "rows": rows, "drafts": steps - 1, "context": context}
            if not _fits(weights + rows * (1 + steps) * slot + rows * pages * page):
                emit(metric="decode step", skipped="it does not fit", **about)
                continue
            batch = DecodeBatch.empty(rows=rows, num_speculative_tokens=steps - 1, pages_per_row=pages)
            own = 1 + np.arange(rows * (1 + steps)).reshape(rows, 1 + steps)
            batch.row_id[:], batch.read_slot[:], batch.write_slot[:] = 1 + np.arange(rows), own[:, 0], own[:, 1:]
            batch.length[:], batch.num_tokens[:], batch.num_drafts[:] = context - 1, steps, steps - 1
            batch.tokens[:, 1:], batch.sample[:] = -1, True
            batch.page_table[:] = 1 + np.arange(rows * pages).reshape(rows, pages)
            timed = _timed(sizes, programs, model, dtype, batch, slots=rows * (1 + steps), pages=rows * pages)
            states, keys = rows * (1 + steps) * slot, rows * context * shape.bytes_per_page(1, dtype)
            emit(
                metric="decode step", ms=round(timed * 1e3, 3), weights_gb=round(weights / 1e9, 3),
                states_gb=round(states / 1e9, 3), keys_gb=round(keys / 1e9, 3),
                of_bound=round((weights + states + keys) / copy / timed, 3), **about,
            )  # fmt: skip
        emit(metric="kernels", model=name, by=programs.kernels.report())
        del model, programs
    return True


def time_prefill(sizes: Sizes) -> bool:
    """One prompt, and the same number of tokens of four."""
    for name, rows in itertools.product(sizes.models, (1, 4)):
        model, programs, dtype, _ = _load(sizes, name)
        each = sizes.prompt // rows
        tiles, pages = sizes.prompt // sizes.tile_size, -(-each // sizes.page_size)
        size = sizes.tile_size
        batch = PrefillBatch.empty(tokens=sizes.prompt, rows=rows, tiles=tiles, pages_per_row=pages, tile_size=size)
        batch.row_id[:], batch.num_tokens[:], batch.sample[:] = 1 + np.arange(rows), each, True
        batch.page_table[:] = 1 + np.arange(rows * pages).reshape(rows, pages)
        batch.tile_write_slot[tiles // rows - 1 :: tiles // rows] = 1 + np.arange(rows)
        timed = _timed(sizes, programs, model, dtype, batch, slots=rows, pages=rows * pages)
        rate = round(sizes.prompt / timed, 1)
        emit(metric="prefill", model=name, rows=rows, tokens=sizes.prompt, ms=round(timed * 1e3, 3), tokens_per_s=rate)
        del model, programs
    return True


def _load(sizes: Sizes, name: str) -> tuple[Any, StepPrograms, Any, int]:
    dtype = F32 if sizes.interpret else BF16
    model = load_model(name, dtype=dtype, load_format="dummy", progress=False)
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    return model, StepPrograms(model, tile_size=sizes.tile_size), dtype, weights


def _timed(sizes: Sizes, programs: Any, model: Any, dtype: Any, batch: Any, *, slots: int, pages: int) -> float:
    store = init_store(
        model.config, num_slots=slots + 1, num_pages=pages + 1, page_size=sizes.page_size, dtype=dtype
    )  # fmt: skip
    drafts = batch.tokens.shape[1] - 1 if isinstance(batch, DecodeBatch) else 0
    rows = init_rows(model.config, max_num_seqs=len(batch.row_id), num_speculative_tokens=drafts)

    def run(state: Any) -> tuple[Any, Any]:
        store, rows, out = (programs.decode if isinstance(batch, DecodeBatch) else programs.prefill)(*state, batch)
        return (store, rows), out.tokens

    return seconds(run, (store, rows), calls=max(1, sizes.calls // 3))


def _fits(needed: int) -> bool:
    stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
    return stats is None or needed < ROOM * stats["bytes_limit"]
