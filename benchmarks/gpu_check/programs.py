"""Step programs of a whole model with random weights, their minimum of bytes, and the cost of a dispatch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.sizes import BF16, F32, Sizes
from benchmarks.gpu_check.timing import seconds
from checkpoints import load_model
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from mamba_jax.programs import StepPrograms
from mamba_jax.rows import init_rows
from mamba_jax.store import StoreShape, init_store
from serving.bench.report import emit

ROOM = 0.8
"""Of the memory that JAX has: weights and a store beyond it are not tried."""
MIXED_ROWS = 64
"""Decode rows of a mixed step, at most."""


def time_dispatch(sizes: Sizes) -> bool:
    """A program that does nothing, of few arrays and of as many as a model has."""
    for arrays in (1, 400):
        nothing = jax.jit(lambda store: ([v + 1 for v in store], 0), donate_argnums=0)
        timed = seconds(nothing, [jnp.zeros(8) for _ in range(arrays)], calls=sizes.calls)
        emit(metric="dispatch", arrays=arrays, us=round(timed * 1e6, 1))
    return True


class ModelPrograms:
    """One model, loaded once, and its step programs.

    Page tables have one width, that of the longest sequence, so that all contexts share a program.
    """

    def __init__(self, sizes: Sizes, name: str, copy: float) -> None:
        """`copy` is the bandwidth that steps are compared with, in bytes per second."""
        self.sizes, self.name, self.copy = sizes, name, copy
        self.dtype = F32 if sizes.interpret else BF16
        begin = time.perf_counter()
        self.model = load_model(name, dtype=self.dtype, load_format="dummy", progress=False)
        self.weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.model)))
        emit(metric="load", model=name, gb=round(self.weights / 1e9, 3), s=round(time.perf_counter() - begin, 1))
        self._programs = StepPrograms(self.model, tile_size=sizes.tile_size)
        shape = StoreShape.of(self.model.config)
        self._slot_bytes = shape.bytes_per_slot(self.dtype)
        self._key_bytes = shape.bytes_per_page(1, self.dtype)
        self._width = self._pages(max(max(sizes.contexts) + max(sizes.steps), sizes.prompt))

    def time_decode(self, steps: int, deadline: Deadline) -> bool:
        """Contexts x rows, all rows at one position; `steps` - 1 drafts are fed, and none is right."""
        for context, rows in deadline.each("decode step", itertools.product(self.sizes.contexts, self.sizes.rows)):
            about = {"model": self.name, "rows": rows, "drafts": steps - 1, "context": context}
            if not self._fits(rows, steps, context):
                emit(metric="decode step", skipped="it does not fit", **about)
                continue
            most = max(each for each in self.sizes.contexts if self._fits(rows, steps, each))
            step = self._step(self._decode_batch(rows, steps, context))
            slots, pages = rows * (1 + steps), rows * self._pages(most + steps)
            timed = self._timed(step, slots=slots, pages=pages, rows=rows, steps=steps)
            emit(metric="decode step", ms=round(timed * 1e3, 3), **self._bound(rows, steps, context, timed), **about)
        emit(metric="kernels", model=self.name, by=self._programs.kernels.report())
        return True

    def time_prefill(self, deadline: Deadline) -> bool:
        """One prompt, and the same number of tokens of four."""
        tokens = self.sizes.prompt
        for rows in deadline.each("prefill", (1, 4)):
            batch = self._prefill_batch(rows)
            pages = rows * self._pages(tokens // rows)
            timed = self._timed(self._step(batch), slots=rows, pages=pages, rows=rows, steps=1)
            emit(
                metric="prefill", model=self.name, rows=rows, tokens=tokens, ms=round(timed * 1e3, 3),
                tokens_per_s=round(tokens / timed, 1),
            )  # fmt: skip
        return True

    def time_mixed(self, deadline: Deadline) -> bool:
        """Decode rows and one prompt in one program (`--mixed-steps`), and in two, one after the other."""
        sizes, context = self.sizes, min(self.sizes.contexts)
        rows = max(count for count in sizes.rows if count <= max(MIXED_ROWS, min(sizes.rows)))
        slots, pages = 2 * rows, rows * self._pages(context + 1)
        decode = self._decode_batch(rows, 1, context)
        prefill = self._prefill_batch(1, seats=rows, slots=slots, pages=pages)
        steps = {"one": self._step(MixedBatch(decode, prefill)), "two": self._step(decode, prefill)}
        for programs in deadline.each("mixed step", steps):
            timed = self._timed(
                steps[programs], slots=slots + 1, pages=pages + self._pages(sizes.prompt), rows=rows + 1, steps=1
            )
            emit(
                metric="mixed step", model=self.name, programs=programs, rows=rows, context=context,
                tokens=sizes.prompt, ms=round(timed * 1e3, 3),
            )  # fmt: skip
        return True

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.sizes.page_size)

    def _decode_batch(self, rows: int, steps: int, context: int) -> DecodeBatch:
        """Rows with seats 1.., each with slots and pages of its own."""
        batch = DecodeBatch.empty(rows=rows, num_speculative_tokens=steps - 1, pages_per_row=self._width)
        own = 1 + np.arange(rows * (1 + steps)).reshape(rows, 1 + steps)
        batch.row_id[:], batch.read_slot[:], batch.write_slot[:] = 1 + np.arange(rows), own[:, 0], own[:, 1:]
        batch.length[:], batch.num_tokens[:], batch.num_drafts[:] = context - 1, steps, steps - 1
        batch.tokens[:, 1:], batch.sample[:] = -1, True
        self._fill(batch.page_table, self._pages(context - 1 + steps), 0)
        return batch

    def _prefill_batch(self, rows: int, *, seats: int = 0, slots: int = 0, pages: int = 0) -> PrefillBatch:
        """Prompts of equal length, after as many seats, slots and pages of other rows."""
        tokens, size = self.sizes.prompt, self.sizes.tile_size
        tiles = tokens // size
        batch = PrefillBatch.empty(tokens=tokens, rows=rows, tiles=tiles, pages_per_row=self._width, tile_size=size)
        batch.row_id[:], batch.num_tokens[:], batch.sample[:] = seats + 1 + np.arange(rows), tokens // rows, True
        batch.tile_write_slot[tiles // rows - 1 :: tiles // rows] = slots + 1 + np.arange(rows)
        self._fill(batch.page_table, self._pages(tokens // rows), pages)
        return batch

    def _fill(self, table: Any, used: int, before: int) -> None:
        """Give each row as many pages, after those of other rows."""
        table[:, :used] = before + 1 + np.arange(len(table) * used).reshape(len(table), used)

    def _step(self, *batches: Any) -> Callable[[Any], tuple[Any, Any]]:
        def run(state: Any) -> tuple[Any, Any]:
            out: Any = None
            store, seats = state
            for batch in batches:
                store, seats, out = self._programs.step(store, seats, batch)
            return (store, seats), out

        return run

    def _timed(self, run: Callable[[Any], Any], *, slots: int, pages: int, rows: int, steps: int) -> float:
        config, sizes = self.model.config, self.sizes
        store = init_store(
            config, num_slots=slots + 1, num_pages=pages + 1, page_size=sizes.page_size, dtype=self.dtype
        )  # fmt: skip
        seats = init_rows(config, max_num_seqs=rows, num_speculative_tokens=steps - 1)
        return seconds(run, (store, seats), calls=max(1, sizes.calls // 3))

    def _bound(self, rows: int, steps: int, context: int, timed: float) -> dict[str, float]:
        """The least that a decode step moves, and its share of the time at the copy's bandwidth."""
        states, keys = rows * (1 + steps) * self._slot_bytes, rows * context * self._key_bytes
        return {
            "weights_gb": round(self.weights / 1e9, 3),
            "states_gb": round(states / 1e9, 3),
            "keys_gb": round(keys / 1e9, 3),
            "of_bound": round((self.weights + states + keys) / self.copy / timed, 3),
        }

    def _fits(self, rows: int, steps: int, context: int) -> bool:
        keys = rows * self._pages(context + steps) * self.sizes.page_size * self._key_bytes
        needed = self.weights + rows * (1 + steps) * self._slot_bytes + keys
        stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
        return stats is None or needed < ROOM * stats["bytes_limit"]
