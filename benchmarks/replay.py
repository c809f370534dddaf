"""A decode step by snapshots and by replay, in turns: `replay_interval` 1 and R.

    python -m benchmarks.replay mamba2-130m --rows 1,8,32 --drafts 0,3

Random weights; each form's compiled decode program alone, its rows at all places between two multiples of R. Also
prints the bytes of states and tails that a step transfers on average: every row's state read, and those that are due
written; the tail's tokens read, and the step's own written. Medians over the turns, and the ratio of the fastest
turns, which is steadier on a busy machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

import jax.numpy as jnp

from checkpoints.load import load_model
from kernels_pallas import native
from mamba_jax.store import StoreShape
from mamba_jax.tails import Replay
from serving.bench.drafts import stepper
from serving.bench.report import emit, environment, median, spread


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--drafts", default="0,3")
    parser.add_argument("--interval", type=int, default=16, help="R")
    parser.add_argument("--turns", type=int, default=16)
    options = parser.parse_args(arguments)
    model = load_model(options.model, dtype=options.dtype, load_format="dummy", progress=False)
    shape = StoreShape.of(model.config)
    missing = {name: why for name in ("state_update", "state_replay") if (why := native.why_missing(name))}
    emit(**environment(options.model), not_native=missing)
    for rows in map(int, options.rows.split(",")):
        for drafts in map(int, options.drafts.split(",")):
            intervals = (1, options.interval)
            steps = {each: stepper(model, rows, drafts, None, interval=each) for each in intervals}
            times: dict[int, list[float]] = {each: [] for each in intervals}
            for turn in range(options.turns + 2):
                for interval, step in steps.items():
                    begin = time.perf_counter()
                    step()
                    if turn > 1:
                        times[interval].append(time.perf_counter() - begin)
            for interval, seconds in times.items():
                emit(
                    metric="replay" if interval > 1 else "snapshots",
                    rows=rows,
                    drafts=drafts,
                    ms=round(1e3 * median(seconds), 2),
                    spread=spread(seconds),
                    times_snapshots=[
                        round(median(seconds) / median(times[1]), 3),
                        round(min(seconds) / min(times[1]), 3),
                    ],
                    tokens_per_second_if_no_draft_stays=round(rows / median(seconds), 1),
                    state_mb=round(state_bytes(shape, model.dtype, rows, drafts, interval) / 1e6, 1),
                )
            del steps


def state_bytes(shape: StoreShape, dtype: jnp.dtype, rows: int, drafts: int, interval: int) -> float:
    """Of states and tails, in an average step."""
    width, slot = 1 + drafts, shape.bytes_per_slot(dtype)
    if interval == 1:
        return rows * slot * (1 + width)
    replay = Replay(interval, drafts)
    token = shape.bytes_per_tail(dtype, jnp.float32, replay) / replay.longest
    return rows * (slot * (1 + width / interval) + token * (interval / 2 + width))


if __name__ == "__main__":
    main()
