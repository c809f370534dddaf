"""The operations alone: `state_update` with one token, and `state_replay` with one and with 1 + K, in turns.

    python -m benchmarks.replay_operation mamba2-130m --rows 8,32 --drafts 3

One program runs a model's recurrent layers one after the other, each on states of its own, so that these come from
memory as in a decode step; products, convolutions and everything else of a step are left out. Rows stand at all places
between two multiples of R and move on by a token from step to step. Medians over the turns, and the ratios of 1 + K
tokens by replay to one token by either operation, by medians and by the fastest turns.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from checkpoints.load import load_config
from kernels_pallas.state_replay import Tail, state_replay
from kernels_pallas.state_update import state_update
from mamba_jax.store import StoreShape
from mamba_jax.tails import Replay
from serving.bench.report import emit, environment, median, spread
from serving.bench.turns import in_turns, timed


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="float32", help="of inputs and tails; states are float32")
    parser.add_argument("--rows", default="8,32")
    parser.add_argument("--drafts", default="3", help="K")
    parser.add_argument("--interval", type=int, default=16, help="R")
    parser.add_argument("--turns", type=int, default=32)
    options = parser.parse_args(arguments)
    emit(**environment(options.model))
    shape, dtype = StoreShape.of(load_config(options.model)), jnp.dtype(options.dtype)
    for rows in map(int, options.rows.split(",")):
        for drafts in map(int, options.drafts.split(",")):
            forms = {
                "update of 1": stepper(shape, dtype, rows, 1, None),
                "replay of 1": stepper(shape, dtype, rows, 1, Replay(options.interval, 0)),
                f"replay of {1 + drafts}": stepper(shape, dtype, rows, 1 + drafts, Replay(options.interval, drafts)),
            }
            times = in_turns({name: timed(step) for name, step in forms.items()}, options.turns, warmup=2)
            update, single, several = times.values()
            emit(
                metric="operation",
                rows=rows,
                drafts=drafts,
                ms={name: round(1e3 * median(seconds), 3) for name, seconds in times.items()},
                spread={name: spread(seconds) for name, seconds in times.items()},
                times_update_of_1=ratios(several, update),
                times_replay_of_1=ratios(several, single),
            )
            del forms


def ratios(several: list[float], one: list[float]) -> list[float]:
    """By medians, and by the fastest turns."""
    return [round(median(several) / median(one), 3), round(min(several) / min(one), 3)]


def stepper(shape: StoreShape, dtype: Any, rows: int, steps: int, replay: Replay | None) -> Callable[[], None]:
    """Runs the operation for all layers, to its end, each time it is called; compiled by then."""
    layers = sum(any(array.name == "ssm" for array in arrays) for arrays in shape.slots)
    heads, head_dim, state = shape.arrays_and_tails["ssm"].shape
    groups = shape.arrays_and_tails["ssm_b"].shape[0] // state
    rng = np.random.default_rng(0)

    def draw(*size: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(size, np.float32), dtype)

    inputs = {
        "x": draw(rows, steps, heads, head_dim),
        "dt": jnp.asarray(rng.uniform(0.01, 0.2, (rows, steps, heads)), jnp.float32),
        "b": draw(rows, steps, groups, state),
        "c": draw(rows, steps, groups, state),
    }
    a, d = -jnp.linspace(1.0, 16.0, heads), jnp.ones(heads)
    row, places = np.arange(rows, dtype=np.int32), itertools.count()
    slots = 1 + row, 1 + rows + row

    def states() -> jax.Array:
        return jnp.zeros((1 + 2 * rows, heads, head_dim, state), jnp.float32)

    def tail(entries: int) -> Tail:
        ring = 1 + rows, entries
        return Tail(draw(*ring, heads * head_dim), draw(*ring, groups * state), jnp.full((*ring, heads), 0.1))

    def where() -> dict[str, np.ndarray]:
        if replay is None:
            return {"read_slot": slots[0], "write_slot": np.tile(slots[1][:, None], steps)}
        since = (row * replay.interval // rows + next(places)) % replay.interval
        anchor = np.full(rows, replay.interval, np.int32)
        return {
            "anchor_slot": slots[0],
            "tail_id": 1 + row,
            "anchor_length": anchor,
            "length": anchor + since.astype(np.int32),
            "num_tokens": np.full(rows, steps, np.int32),
            "write_slot": slots[1],
        }

    def layer(x: jax.Array, store: Any, at: dict[str, Any]) -> tuple[jax.Array, Any]:
        of_tokens = x, inputs["dt"], a, inputs["b"], inputs["c"], d
        if replay is None:
            return state_update(*of_tokens, store, **at)
        y, *new = state_replay(*store, *of_tokens, **at, interval=replay.interval)
        return y, tuple(new)

    def all_layers(stores: list[Any], at: dict[str, Any]) -> tuple[list[Any], jax.Array]:
        x, new = inputs["x"], []
        for store in stores:
            y, store = layer(x, store, at)
            x = jnp.tanh(y)  # a layer begins when the one before has ended
            new.append(store)
        return new, x

    run = jax.jit(all_layers, donate_argnums=0)
    made = [states() if replay is None else (states(), tail(replay.longest)) for _ in range(layers)]

    def step() -> None:
        nonlocal made
        made, y = run(made, where())
        jax.block_until_ready((made, y))

    step()
    return step


if __name__ == "__main__":
    main()
