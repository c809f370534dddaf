"""Step programs of a whole model with random weights: their times, their bounds, and where a GPU spends a step."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints import load_model
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from mamba_jax.kernel_check.calls import state_makers
from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.programs import StepPrograms
from mamba_jax.store import Replay, StoreShape
from mamba_jax.store_layout import places
from serving.check.report import Report
from serving.engine.assembly.replay import state_traffic

ROOM = 0.85
"""Of the memory that JAX has: weights and a store beyond it are not tried."""
STEPS = 10
"""In one measurement, dispatched one after the other."""


@dataclass(frozen=True)
class Step:
    """One kind of step."""

    kind: str
    """decode, prefill or mixed."""
    rows: int
    drafts: int = 0
    interval: int = 1
    """Of replay; 1: a state after each token."""
    graph: bool = True
    """Whether XLA may make a CUDA graph of it."""

    @property
    def about(self) -> dict[str, Any]:
        """What a report says of it."""
        found: dict[str, Any] = {"rows": self.rows}
        found |= {"drafts": self.drafts} if self.drafts else {}
        found |= {"tokens between states": self.interval} if self.interval > 1 else {}
        return found | ({} if self.graph else {"graphs": "no CUDA"})


class ModelPrograms:
    """One model, loaded once, and its step programs. All page tables have the width of the context or the prompt."""

    def __init__(
        self, name: str, report: Report, compiler: Compiler, *, copy: float, context: int, prompt: int, page: int,
        tile: int, dtype: Any,
    ) -> None:  # fmt: skip
        """`copy`: bytes per second that a copy reads and writes."""
        self.name, self.dtype, self.copy, self._report, self._compiler = name, dtype, copy, report, compiler
        self.context, self.prompt, self.page, self.tile = context, prompt, page, tile
        begin = time.perf_counter()
        self.model = load_model(name, dtype=dtype, load_format="dummy", progress=False)
        self.weights = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(self.model)))
        report.add("load", model=name, GB=round(self.weights / 1e9, 3), seconds=round(time.perf_counter() - begin, 1))
        self.shape = StoreShape.of(self.model.config)
        no_graphs = {"xla_gpu_enable_command_buffer": ""} if jax.default_backend() == "gpu" else {}
        self._programs = {
            graph: StepPrograms(self.model, tile_size=tile, compiler_options={} if graph else no_graphs)
            for graph in (True, False)
        }
        for programs in self._programs.values():
            programs.kept = compiler
        self._width = self._pages(max(context + 8, prompt))
        self._compiling: dict[Step, Future[Any]] = {}

    @property
    def kernels(self) -> str:
        """The implementation of each operation."""
        return self._programs[True].kernels.report()

    def compile(self, step: Step) -> None:
        """Begins to compile a step, unless it does not fit, or is being compiled."""
        old = self._compiling.get(step)
        if old is not None and not old.cancelled():
            return
        if not self.fits(step):
            self._report.add(f"{step.kind} step", skipped="it does not fit", **step.about)
            return
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        store, rows = (
            jax.tree.map(lambda v: v.update(sharding=device), jax.eval_shape(make)) for make in self._state(step)
        )
        store = jax.tree.map(lambda v, at: v.update(sharding=at), store, places(self.shape, store))
        self._compiling[step] = self._compiler.submit(
            self._programs[step.graph].program, store, rows, self._batch(step)
        )

    @property
    def left(self) -> list[Step]:
        """Steps that were compiled, or are, and have not been timed."""
        return list(self._compiling)

    def time(self, step: Step, *, seconds: float) -> None:
        """Measures a step, and reports it. Waits so long for its compilation; does nothing if it does not fit.

        Raises:
            TimeoutError: it is not compiled yet.
        """
        if step not in self._compiling:
            return
        self._compiling[step].result(seconds)
        self.forget(step)
        state, _ = self._run(step, self._made(step), 1)
        best = float("inf")
        for _ in range(3):
            state, taken = self._run(step, state, STEPS)
            best = min(best, taken / STEPS)
        found: dict[str, Any] = {"ms": round(best * 1e3, 3)}
        if step.kind == "decode":
            moved = self._moved(step)
            found |= {"of the bound": round(moved / self.copy / best, 3), "GB moved": round(moved / 1e9, 3)}
            found["context"] = self.context
        else:
            tokens = self.prompt + (step.rows if step.kind == "mixed" else 0)
            found |= {"tokens": tokens, "tokens/s": round(tokens / best, 1)}
        self._report.add(f"{step.kind} step", model=self.name, **step.about, **found)

    def forget(self, step: Step) -> None:
        """Measures a step no more."""
        self._compiling.pop(step, None)

    def profile(self, step: Step, *, top: int = 25) -> None:
        """Reports the time of each kernel of a GPU in one step, by the profiler. Needs `time` to have run."""
        state, _ = self._run(step, self._made(step), 1)
        busy: Counter[str] = Counter()
        why, wall = "the profiler saw no kernel of a device", 0.0
        with TemporaryDirectory() as folder:
            try:
                jax.profiler.start_trace(folder)
                wall = self._run(step, state, STEPS)[1] / STEPS
                jax.profiler.stop_trace()
                busy, counts = kernel_times(Path(folder))
            except Exception as error:  # not every machine lets a process profile its device
                why = f"{type(error).__name__}: {str(error)[:200]}"
        if not busy:
            self._report.add("kernels of a step", skipped=why, **step.about)
            return
        each = {name: spent / STEPS / 1e3 for name, spent in busy.most_common()}
        self._report.add(
            "kernels of a step", **step.about, **{
                "ms on the wall": round(wall * 1e3, 3), "ms busy": round(sum(each.values()) / 1e3, 3),
                "kernels": round(sum(counts.values()) / STEPS, 1),
            },
        )  # fmt: skip
        for name, us in list(each.items())[:top]:
            self._report.add("kernel of a step", us=round(us, 1), runs=round(counts[name] / STEPS, 1), name=name[:120])

    def fits(self, step: Step) -> bool:
        """Whether weights and store fit."""
        store = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(jax.eval_shape(self._state(step)[0])))
        stats = jax.devices()[0].memory_stats() if jax.default_backend() != "cpu" else None
        return stats is None or self.weights + store < ROOM * stats["bytes_limit"]

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self.page) if self.shape.pages else 1

    def _run(self, step: Step, state: Any, times: int) -> tuple[Any, float]:
        """Runs a step so many times; returns store and seats after it, and the seconds that it took."""
        batch, programs = self._batch(step), self._programs[step.graph]
        begin = time.perf_counter()
        for _ in range(times):
            store, seats, out = programs.step(state[0], state[1], batch)
            state = store, seats
        jax.block_until_ready((state, out))
        return state, time.perf_counter() - begin

    def _state(self, step: Step) -> tuple[Callable[[], Any], Callable[[], Any]]:
        prompts = {"decode": 0, "prefill": step.rows, "mixed": 1}[step.kind]
        decoding = 0 if step.kind == "prefill" else step.rows
        slots = decoding * max(1 + step.drafts, 2 if step.interval > 1 else 1) + prompts
        pages = decoding * self._pages(self.context + step.drafts)
        pages += prompts * self._pages(self.prompt // max(prompts, 1))
        replay = Replay(step.interval, step.drafts) if step.interval > 1 else None
        return state_makers(
            self.model, rows=decoding + prompts, drafts=step.drafts, replay=replay, num_slots=slots + 1,
            num_pages=pages + 1, page_size=self.page,
        )  # fmt: skip

    def _made(self, step: Step) -> tuple[Any, Any]:
        store, seats = (make() for make in self._state(step))
        return jax.tree.map(jax.device_put, store, places(self.shape, store)), seats

    def _batch(self, step: Step) -> Any:
        if step.kind == "decode":
            return self._decode(step)
        if step.kind == "prefill":
            return self._prefill(step.rows)
        rows = step.rows
        return MixedBatch(self._decode(step), self._prefill(1, before=rows, pages=rows * self._pages(self.context)))

    def _decode(self, step: Step) -> DecodeBatch:
        """Rows with seats, slots and pages of their own, all at one position. The last token's state goes where the
        row's state was; no draft is right."""
        rows, steps = step.rows, 1 + step.drafts
        batch = DecodeBatch.empty(
            rows=rows, num_speculative_tokens=step.drafts, pages_per_row=self._width, replay=step.interval > 1
        )
        batch.row_id[:], batch.length[:] = 1 + np.arange(rows), self.context - 1
        batch.num_tokens[:], batch.num_drafts[:], batch.sample[:] = steps, step.drafts, True
        batch.tokens[:, 1:] = -1
        if batch.anchor is not None:
            batch.length[:] -= batch.length % step.interval - step.interval // 2
            batch.anchor[:] = batch.length - step.interval // 2
            batch.read_slot[:], batch.write_slot[:, 0] = 1 + np.arange(rows), 1 + rows + np.arange(rows)
        else:
            batch.write_slot[:] = 1 + np.arange(rows * steps).reshape(rows, steps)
            batch.read_slot[:] = batch.write_slot[:, -1]
        self._fill(batch.page_table, self._pages(self.context + step.drafts), 0)
        return batch

    def _prefill(self, rows: int, *, before: int = 0, pages: int = 0) -> PrefillBatch:
        """Prompts of equal length, after as many seats, slots and pages of other rows."""
        tiles = self.prompt // self.tile
        batch = PrefillBatch.empty(
            tokens=self.prompt, rows=rows, tiles=tiles, pages_per_row=self._width, tile_size=self.tile
        )
        batch.row_id[:], batch.num_tokens[:], batch.sample[:] = 1 + before + np.arange(rows), self.prompt // rows, True
        batch.tile_write_slot[tiles // rows - 1 :: tiles // rows] = 1 + before + np.arange(rows)
        self._fill(batch.page_table, self._pages(self.prompt // rows), pages)
        return batch

    def _fill(self, table: Any, used: int, before: int) -> None:
        table[:, :used] = before + 1 + np.arange(len(table) * used).reshape(len(table), used)

    def _moved(self, step: Step) -> float:
        """The least bytes of a decode step: weights, states, keys and values."""
        states = state_traffic(
            self.shape, step.interval, step.drafts, dtype=jnp.dtype(self.dtype).name, ssm_dtype="float32"
        )
        return self.weights + step.rows * (states + self.context * self.shape.bytes_per_page(1, self.dtype))


def kernel_times(folder: Path) -> tuple[Counter[str], Counter[str]]:
    """Nanoseconds, and how often it ran, of each kernel on a GPU in the profiles of a folder."""
    spent: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for path in folder.rglob("*.xplane.pb"):
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            for line in plane.lines if "GPU" in plane.name else ():
                if line.name.startswith("Stream"):
                    for event in line.events:
                        spent[event.name] += event.duration_ns
                        counts[event.name] += 1
    return spent, counts
