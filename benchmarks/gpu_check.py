"""Every GPU kernel checked against XLA and timed beside it, and a whole decode step, in one call. Prints JSON lines.

    python -m benchmarks.gpu_check                # all, some minutes on one GPU
    python -m benchmarks.gpu_check --only update  # or scan, step
    python -m benchmarks.gpu_check --tiny         # does the script itself work? on any machine, kernels interpreted

Bandwidths are given beside that of a copy on the same machine (read + write). Lines on block sizes say which were the
fastest: a kernel's defaults should be those. The scan of `mamba-ssm` is timed as well where that is installed.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_timing import copy_bandwidth, difference, fastest, seconds
from kernels_pallas.ssd_scan import pallas_gpu as scan_kernel
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import pallas_gpu as update_kernel
from kernels_pallas.state_update import state_update
from serving.bench.report import emit, environment

BF16, F32, I32 = jnp.bfloat16, jnp.float32, jnp.int32
CLOSE = 2e-2  # of the largest value: operands of products are rounded to 16 bits


@dataclasses.dataclass(frozen=True)
class Sizes:
    """One Mamba layer, and how much of everything is measured."""

    heads: int = 128
    head_dim: int = 64
    groups: int = 8
    state: int = 128
    tile_size: int = 128
    rows: tuple[int, ...] = (1, 8, 64, 256)
    steps: tuple[int, ...] = (1, 4)
    tiles: tuple[int, ...] = (16, 64)
    copied: int = 1 << 30
    calls: int = 30
    model: str = "nemotron-h-8b"
    interpret: bool = False

    @property
    def kernel(self) -> str:
        """The name of the kernels' implementation."""
        return "pallas_gpu_interpreted" if self.interpret else "pallas_gpu"

    def slot_bytes(self, dtype: Any) -> int:
        """Of one state."""
        return self.heads * self.head_dim * self.state * jnp.dtype(dtype).itemsize

    def store(self, slots: int, dtype: Any) -> jax.Array:
        """States; NaN in the null slot."""
        shape = (slots, self.heads, self.head_dim, self.state)
        return jax.random.normal(jax.random.key(1), shape, dtype).at[0].set(jnp.nan)

    def layer(self, *lead: int) -> tuple[jax.Array, ...]:
        """x, dt, a, b, c, d for tokens [*lead]."""
        keys = iter(jax.random.split(jax.random.key(0), 5))
        inner = (*lead, self.groups, self.state)
        return (
            jax.random.normal(next(keys), (*lead, self.heads, self.head_dim), BF16),
            jax.random.uniform(next(keys), (*lead, self.heads), F32, 0.001, 0.1),
            -jax.random.uniform(next(keys), (self.heads,), F32, 1, 16),
            jax.random.normal(next(keys), inner, BF16),
            jax.random.normal(next(keys), inner, BF16),
            jnp.ones(self.heads, F32),
        )


TINY = Sizes(4, 16, 2, 16, 32, (4,), (2,), (2,), copied=1 << 16, calls=1, model="demo", interpret=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["update", "scan", "step"])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-sweep", action="store_true", help="the kernels' own block sizes only")
    options = parser.parse_args()
    sizes = TINY if options.tiny else Sizes()
    emit(**environment(sizes.model))
    copy = copy_bandwidth(sizes.copied, calls=sizes.calls)
    emit(metric="copy", gb_per_s=round(copy / 1e9, 1))
    jobs: dict[str, Callable[[], bool]] = {
        "update": lambda: check_update(sizes, copy, sweep=not options.no_sweep),
        "scan": lambda: check_scan(sizes, sweep=not options.no_sweep),
        "step": lambda: time_step(sizes, copy),
    }
    failed = 0
    for name, job in jobs.items():
        if options.only in (None, name):
            try:
                failed += not job()
            except Exception as error:  # the other measurements are still wanted
                failed += 1
                emit(metric=name, error=f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
    return failed


def compare(
    metric: str,
    sizes: Sizes,
    run: Callable[..., Any],
    others: list[str],
    states: Callable[[], jax.Array],
    args: Any,
    **about: Any,
) -> bool:
    """Times `run(store, *args, implementation=)` by the kernel and by others; whether it gives what the first one does.

    `about` says what was run; `moved` bytes of it, if there, are turned into a bandwidth.
    """
    moved, copy = about.pop("moved", 0), about.pop("copy", 1)
    results = []
    for name in (sizes.kernel, *others):
        compiled = jax.jit(partial(run, implementation=name), donate_argnums=0)
        timed = seconds(compiled, states(), *args, calls=sizes.calls)
        rate = {"gb_per_s": round(moved / timed / 1e9, 1), "of_copy": round(moved / timed / copy, 3)} if moved else {}
        emit(metric=metric, by=name, us=round(timed * 1e6, 1), **about, **rate)
        results.append(compiled(states(), *args))
    (after, y), (want, want_y) = results[:2]
    errors = {"y": difference(y, want_y), "states": difference(after[1:], want[1:])}
    ok = max(errors.values()) < CLOSE
    emit(metric=f"{metric} against {others[0]}", ok=ok, **errors, **about)
    return ok


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
            tokens=tiles * sizes.tile_size, rows=int(first.sum()),
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


def time_step(sizes: Sizes, copy: float) -> bool:
    """Decode steps of a whole model with random weights, all rows at one position, beside the least bytes they move."""
    from flax import nnx

    from checkpoints import load_model
    from mamba_jax.batch import DecodeBatch
    from mamba_jax.programs import StepPrograms
    from mamba_jax.rows import init_rows
    from mamba_jax.store import StoreShape, init_store, store_bytes

    rows, position, page = max(n for n in sizes.rows if n <= 64), 128, 64
    dtype = F32 if sizes.interpret else BF16
    model = load_model(sizes.model, dtype=dtype, load_format="dummy", progress=False)
    pages = position // page + 1
    store = init_store(model.config, num_slots=rows + 1, num_pages=rows * pages + 1, page_size=page, dtype=dtype)
    whole, shape = store_bytes(store), StoreShape.of(model.config)
    device_rows = init_rows(model.config, max_num_seqs=rows)
    batch, own = DecodeBatch.empty(rows=rows, num_speculative_tokens=0, pages_per_row=pages), np.arange(1, rows + 1)
    batch.row_id[:], batch.read_slot[:], batch.write_slot[:, 0] = own, own, own
    batch.length[:], batch.num_tokens[:], batch.sample[:] = position, 1, True
    batch.page_table[:] = 1 + np.arange(rows * pages).reshape(rows, pages)
    programs = StepPrograms(model)

    def run(state: Any) -> tuple[Any, Any]:
        store, device_rows, out = programs.decode(*state, batch)
        return (store, device_rows), out.tokens

    timed = seconds(run, (store, device_rows), calls=max(1, sizes.calls // 3))
    weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    states = 2 * rows * shape.bytes_per_slot(dtype)
    keys = rows * position * shape.bytes_per_page(1, dtype)
    least = weights + states + keys
    emit(
        metric="decode step", model=sizes.model, rows=rows, ms=round(timed * 1e3, 3),
        weights_gb=round(weights / 1e9, 3), states_gb=round(states / 1e9, 3), keys_gb=round(keys / 1e9, 3),
        store_gb=round(whole / 1e9, 3), of_bound=round(least / copy / timed, 3), tokens_per_s=round(rows / timed, 1),
        by=programs.kernels.report(),
    )  # fmt: skip
    return True


if __name__ == "__main__":
    raise SystemExit(main())
