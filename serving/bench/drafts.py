"""The cost of drafts: steps that verify K drafts, or also propose the next ones, compared with a single-token step.

    mamba-jax bench drafts MODEL --dtype float32 --batches 1,8 --drafts 3

Compiled decode programs alone, all rows behind prompts of 64 tokens, the forms in turns within one run. `verify` feeds
1 + K tokens a row and makes no drafts; `ngram` and `mtp` (where the model has such a layer) make the next ones as well.
A ratio says how many tokens a step must give on average before drafts pay. It reports medians over the turns,
and the ratio of the fastest turns, which varies less on a busy machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from serving.bench.report import emit, environment, median, spread
from serving.bench.turns import in_turns, timed

PROMPT, PAGE, TILE, MAX_LEN = 64, 32, 64, 512


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1", help="rows of a step")
    parser.add_argument("--drafts", type=int, default=3, help="K")
    parser.add_argument("--turns", type=int, default=40)
    options = parser.parse_args(arguments)
    if options.drafts < 1:
        parser.error(f"--drafts {options.drafts}: at least 1")
    emit(**environment(options.model))
    for line in measure(options):
        emit(**line)
    return 0


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One dictionary for each batch size and form."""
    from checkpoints.load import load_model
    from mamba_jax.drafts import MTPDrafts, NGramDrafts

    model = load_model(options.model, dtype=options.dtype, progress=False)
    sources: dict[str, Any] = {"verify": None, "ngram": NGramDrafts(2, 4)}
    if model.config.mtp_pattern:
        sources["mtp"] = MTPDrafts()
    for rows in map(int, options.batches.split(",")):
        steps = {"plain": stepper(model, rows, 0, None)}
        steps |= {name: stepper(model, rows, options.drafts, source) for name, source in sources.items()}
        times = in_turns({name: timed(step) for name, step in steps.items()}, options.turns, warmup=2)
        plain = times.pop("plain")
        yield {"metric": "plain_ms", "rows": rows, "v": round(1e3 * median(plain), 2), "spread": spread(plain)}
        for name, seconds in times.items():
            yield {
                "metric": f"{name}_ratio",
                "rows": rows,
                "drafts": options.drafts,
                "v": round(median(seconds) / median(plain), 3),
                "of_the_fastest": round(min(seconds) / min(plain), 3),
                "ms": round(1e3 * median(seconds), 2),
                "spread": spread(seconds),
            }


def stepper(model: Any, rows: int, drafts: int, source: Any) -> Callable[[], None]:
    """Runs one decode step, to its end, each time it is called. All its programs are compiled by then."""
    import numpy as np

    from mamba_jax.batch import DecodeBatch, PrefillBatch
    from mamba_jax.programs import StepPrograms
    from mamba_jax.rows import init_rows
    from mamba_jax.store import init_store

    width, pages = 1 + drafts, MAX_LEN // PAGE
    programs = StepPrograms(model, tile_size=TILE, source=source)
    dtype = model.dtype
    config = model.config
    store = init_store(
        config,
        num_slots=1 + rows * (1 + width),
        num_pages=1 + rows * pages,
        page_size=PAGE,
        dtype=dtype,
    )
    seats = init_rows(
        config,
        max_num_seqs=rows,
        num_speculative_tokens=drafts,
        source=source,
        max_len=MAX_LEN if source else 0,
    )
    per_row = pages if store.kv else 0
    table = 1 + np.arange(rows * per_row, dtype=np.int32).reshape(rows, per_row)
    rng = np.random.default_rng(0)
    prompt = PrefillBatch.empty(tokens=rows * PROMPT, rows=rows, tiles=rows, pages_per_row=per_row, tile_size=TILE)
    prompt.tokens[:] = rng.integers(4, config.vocab_size, rows * PROMPT)
    prompt.row_id[:] = prompt.tile_write_slot[:] = 1 + np.arange(rows)
    prompt.num_tokens[:] = PROMPT
    batch = DecodeBatch.empty(rows=rows, num_speculative_tokens=drafts, pages_per_row=per_row)
    batch.tokens[:] = rng.integers(4, config.vocab_size, (rows, width))
    batch.row_id[:] = batch.read_slot[:] = 1 + np.arange(rows)
    batch.length[:], batch.num_tokens[:], batch.num_drafts[:] = PROMPT, width, drafts
    batch.write_slot[:] = 1 + rows + np.arange(rows * width).reshape(rows, width)
    batch.sample[:] = True
    for tables in (prompt.page_table, batch.page_table):
        assert tables is not None
        tables[:] = table
    store, seats, _ = programs.prefill(store, seats, prompt)

    def step() -> None:
        nonlocal store, seats
        store, seats, output = programs.decode(store, seats, batch)
        jax.block_until_ready((store, seats, output))

    step()
    return step
