"""Tokens per second of prefill and decode, host time per step; alternating with another program where one is given.

    python -m benchmarks.decode_prefill MODEL --dtype float32 --batches 1,8,32 --prefill 512,2048
    python -m benchmarks.decode_prefill MODEL --rounds 3 --peer "python peer_bench.py MODEL"

prefill = one prompt of L random ids and one new token; decode = B prompts of 64 ids, B * 64 tokens over the time of 65
new tokens less the time of one. Medians; a warm-up run first. A peer prints JSON lines with `metric` and `v` (perhaps
after a word, as in `BENCH {...}`); both programs then run in turns, and ratios are of the medians over the rounds.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import jax

from mamba_jax.batch import DecodeBatch
from serving.bench.report import emit, environment, spread


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", default="1,8,32", help="decode: sequences at once")
    parser.add_argument("--prefill", default="512,2048", help="prefill: prompt lengths")
    parser.add_argument("--crowd", default="32x64", help="prefill: prompts x length in one step; empty = none")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=1, help="turns, where there is a peer")
    parser.add_argument("--trace", help="a folder for a profiler trace of a decode run")
    parser.add_argument("--peer", help="a command that prints JSON lines with the same metrics")
    options = parser.parse_args(arguments)
    if options.peer:
        return compare(options)
    emit(**environment(options.model))
    for line in measure(options):
        emit(**line)
    return 0


def measure(options: argparse.Namespace) -> Any:
    """Runs every measurement once; yields one dictionary each."""
    from serving import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(
        options.model,
        dtype=options.dtype,
        max_model_len=4096,
        max_num_seqs=32,
        max_num_batched_tokens=4096,
        enable_prefix_caching=False,
        warmup=False,
    )
    yield {"metric": "load_s", "v": round(time.perf_counter() - begin, 2)}
    rng = random.Random(0)
    vocab = llm.engine.vocab_size

    def prompts(count: int, length: int) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": [rng.randrange(4, vocab) for _ in range(length)]} for _ in range(count)]

    def run(count: int, length: int, new: int) -> float:
        batch = prompts(count, length)
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        return time.perf_counter() - start

    def prefill(name: str, count: int, length: int) -> dict[str, Any]:
        run(count, length, 1)
        times = [run(count, length, 1) for _ in range(options.reps)]
        speed = round(count * length / median(times), 1)
        return {"metric": name, "v": speed, "seconds": round(median(times), 4), "spread": spread(times)}

    for length in _numbers(options.prefill):
        yield prefill(f"prefill{length}_tok_s", 1, length)
    if options.crowd:
        count, length = (int(part) for part in options.crowd.split("x"))
        yield prefill(f"prefill{count}x{length}_tok_s", count, length)
    for batch in _numbers(options.batches):
        run(batch, 64, 4)
        pairs = [(run(batch, 64, 1), run(batch, 64, 65)) for _ in range(options.reps)]
        seconds = median([long for _, long in pairs]) - median([short for short, _ in pairs])
        yield {
            "metric": f"decode_b{batch}_tok_s",
            "v": round(batch * 64 / seconds, 1),
            "step_ms": round(seconds / 64 * 1e3, 3),
        }
        yield {"metric": f"host_b{batch}_us_per_step", **host_time(llm, batch, run)}
        yield {"metric": f"host_b{batch}_us_per_step_alone", **host_time_alone(llm, batch, run)}
        bare = program_time(llm, batch, run)
        yield {
            "metric": f"program_b{batch}_step_ms",
            "v": round(bare * 1e3, 3),
            "engine_over_program": round(seconds / 64 / bare, 3),
        }
    if options.trace:
        with jax.profiler.trace(options.trace):
            run(_numbers(options.batches)[-1], 64, 33)
    yield {"metric": "programs_compiled", "v": llm.compilations}


def host_time(llm: Any, batch: int, run: Any) -> dict[str, Any]:
    """Schedule, batch building and settling per step, without the calls of compiled programs and without waiting.

    Wall time while the device computes: where the device is the same cores, it competes for them.
    """
    from serving.engine.stats import LoopStats

    loop = llm.engine.loop
    loop.stats = LoopStats()
    run(batch, 64, 65)
    stats = loop.stats
    per_step = {
        name: round(getattr(stats, f"{name}_seconds") / stats.steps * 1e6, 1)
        for name in ("plan", "settle", "dispatch", "wait")
    }
    return {"v": round((stats.plan_seconds + stats.settle_seconds) / max(stats.steps, 1) * 1e6, 1), **per_step}


@contextmanager
def _replaced_step(programs: Any, step: Callable[..., Any]) -> Iterator[None]:
    """Has the engine call `step` in place of the programs' own method."""
    programs.step = step
    try:
        yield
    finally:
        del programs.step


def host_time_alone(llm: Any, batch: int, run: Any) -> dict[str, Any]:
    """`host_time` with a decode program that returns at once (always the same tokens), so that nothing else runs."""
    loop = llm.engine.loop
    step = loop.programs.step
    outputs: list[Any] = []

    def once(store: Any, rows: Any, batch: Any) -> Any:
        if not isinstance(batch, DecodeBatch):
            return step(store, rows, batch)
        if not outputs or outputs[0].tokens.shape[0] != batch.tokens.shape[0]:
            store, rows, output = step(store, rows, batch)
            outputs[:] = [jax.block_until_ready(output)]
        return store, rows, outputs[0]

    with _replaced_step(loop.programs, once):
        return host_time(llm, batch, run)


def program_time(llm: Any, batch: int, run: Any) -> float:
    """Seconds of a decode step when its program is called over and over with nothing in between.

    What the engine's step takes beyond it is time in which the device waits for the host.
    """
    loop = llm.engine.loop
    step, seen = loop.programs.step, []

    def watch(store: Any, rows: Any, batch: Any) -> Any:
        if isinstance(batch, DecodeBatch):
            seen.append(batch)
        return step(store, rows, batch)

    with _replaced_step(loop.programs, watch):
        run(batch, 64, 65)
    last = max(seen, key=lambda one: int(one.continues.sum()))
    store, rows = loop.store, loop._rows
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        for _ in range(20):
            store, rows, output = step(store, rows, last)
        output.tokens.block_until_ready()
        times.append((time.perf_counter() - begin) / 20)
    loop._store, loop._rows = store, rows
    return median(times)


def compare(options: argparse.Namespace) -> int:
    """Runs this program and the peer in turns; prints each figure's median and their ratio."""
    own = [sys.executable, "-m", "benchmarks.decode_prefill", options.model, "--dtype", options.dtype]
    own += ["--batches", options.batches, "--prefill", options.prefill, "--crowd", options.crowd]
    own += ["--reps", str(options.reps)]
    figures: dict[str, dict[str, list[float]]] = {"ours": {}, "peer": {}}
    emit(**environment(options.model), peer=options.peer, rounds=options.rounds)
    for _ in range(options.rounds):
        for who, command in (("ours", own), ("peer", shlex.split(options.peer))):
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                print(f"{who} ended with exit code {done.returncode}: {shlex.join(command)}", file=sys.stderr)
                return 1
            for metric, value in _figures(done.stdout):
                figures[who].setdefault(metric, []).append(value)
    for metric, values in figures["ours"].items():
        peer = figures["peer"].get(metric)
        own_median = median(values)
        line: dict[str, Any] = {"metric": metric, "ours": own_median, "ours_spread": spread(values)}
        if peer:
            line |= {"peer": median(peer), "peer_spread": spread(peer), "ratio": round(own_median / median(peer), 3)}
        emit(**line)
    return 0


def _figures(text: str) -> list[tuple[str, float]]:
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line[line.index("{") :])
            found.append((str(value["metric"]), float(value["v"])))
        except (ValueError, KeyError, TypeError):
            continue  # other output of the program
    return found


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    sys.exit(main())
