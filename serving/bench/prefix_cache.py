"""What prefix caching gains where prompts share a beginning, and the step time at a short and at a long context.

    mamba-jax bench prefix MODEL [--shared 2048] [--new 32] [--reps 5] [--parts warm,context]

* `warm`: time to the first token of a prompt of `shared` cached and `new` fresh tokens, over that of such a prompt of
  which nothing is cached; and the prompt tokens that a repeated prompt computes (none).
* `context`: step time of 8 decoding rows at a short and at a long context. Equal for a model without attention.

`mamba-jax bench compare MODEL --vary mamba_cache_mode=none,align,all` measures what caching costs prompts that share
nothing.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from checkpoints.load import load_model
from mamba_jax.programs import StepPrograms
from serving import EngineConfig, SamplingParams
from serving.bench.report import emit, environment, median, spread
from serving.bench.turns import in_turns
from serving.engine.assembly.build import assemble
from serving.engine.engine import Engine


class Bench:
    """Engines over one model and one set of compiled programs."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.model = load_model(options.model, dtype=options.dtype, progress=False)
        self.programs = StepPrograms(self.model)
        self.rng = random.Random(0)
        self._names = 0

    def engine(self, mode: str, **flags: Any) -> Engine:
        """Equal sizes in every mode, so that they share programs."""
        config = EngineConfig.create(
            mamba_cache_mode=mode,
            enable_prefix_caching=mode != "none",
            max_model_len=self.options.max_model_len,
            num_slots=self.options.num_slots,
            warmup=False,
            **({"max_num_seqs": 8} | flags),
        )
        return assemble(config, self.model, programs=self.programs).engine

    def prompt(self, length: int) -> list[int]:
        """Random ids."""
        return [self.rng.randrange(4, self.model.config.vocab_size) for _ in range(length)]

    def run(self, engine: Engine, prompts: list[list[int]], new: int) -> list[Any]:
        """All prompts at once, to the end."""
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, detokenize=False)
        outputs = []
        for prompt in prompts:
            self._names += 1
            outputs.append(engine.add_request(str(self._names), {"prompt_token_ids": prompt}, params))
        while engine.loop.busy:
            engine.step()
        return outputs


def warm(bench: Bench) -> Iterator[dict[str, Any]]:
    """Time to first token with and without the shared part in the cache."""
    shared, new = bench.options.shared, bench.options.new
    for mode in ("align", "all"):
        engine = bench.engine(mode)
        cold: list[float] = []
        hot: list[float] = []
        cached = 0
        for rep in range(bench.options.reps + 1):
            prefix = bench.prompt(shared)
            first, second = (bench.run(engine, [prefix + bench.prompt(new)], 1)[0] for _ in range(2))
            assert first.num_cached_tokens == 0
            cached = second.num_cached_tokens
            if rep:  # the first one compiles
                cold.append(first.metrics.time_to_first_token)
                hot.append(second.metrics.time_to_first_token)
        before = engine.loop.stats.prefill_tokens
        prompt = prefix + bench.prompt(new)
        bench.run(engine, [prompt], 1)
        bench.run(engine, [prompt], 1)
        computed = engine.loop.stats.prefill_tokens
        again = bench.run(engine, [prompt], 1)[0]
        yield {
            "metric": f"ttft_{mode}",
            "cold_ms": round(median(cold) * 1e3, 2),
            "warm_ms": round(median(hot) * 1e3, 2),
            "ratio": round(median(hot) / median(cold), 4),
            "spread": [spread(cold), spread(hot)],
            "shared": shared,
            "new": new,
            "cached": cached,
            "computed_by_a_new_prompt": computed - before,
            "computed_by_its_repeat": engine.loop.stats.prefill_tokens - computed,
            "repeat_ms": round(again.metrics.time_to_first_token * 1e3, 2),
        }


def context(bench: Bench) -> Iterator[dict[str, Any]]:
    """Step time of 8 rows that decode at a short and at a long context, in turns."""
    engine = bench.engine("all")
    prompts = {length: bench.prompt(length) for length in bench.options.contexts}
    for prompt in prompts.values():
        bench.run(engine, [prompt], 1)  # all rows then read the state at its end
        bench.run(engine, [prompt] * 8, 8)

    def step_seconds(length: int, turn: int) -> float:
        outputs = bench.run(engine, [prompts[length]] * 8, 65)
        assert all(output.num_cached_tokens == length for output in outputs)
        first = max(output.metrics.first_token_time for output in outputs)
        return (max(output.metrics.finished_time for output in outputs) - first) / 64

    times = in_turns({length: partial(step_seconds, length) for length in prompts}, bench.options.reps, warmup=0)
    for length, each in times.items():
        yield {
            "metric": f"decode_b8_step_ms_at_{length}",
            "v": round(median(each) * 1e3, 3),
            "ratio": round(median(each) / median(times[min(times)]), 4),
            "spread": spread(each),
        }


PARTS = {"warm": warm, "context": context}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--parts", default="warm")
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 32768])
    parser.add_argument("--max-model-len", type=int, default=None)
    parser.add_argument("--num-slots", type=int, default=64)
    parser.add_argument("--reps", type=int, default=5)
    options = parser.parse_args(arguments)
    emit(**environment(options.model))
    bench = Bench(options)
    for part in options.parts.split(","):
        for line in PARTS[part](bench):
            emit(**line)
    return 0
