"""Offline throughput: a set of prompts as fast as the engine can answer them.

    mamba-jax bench throughput MODEL --prompts 64 --prompt-tokens 512 --output-tokens 128
    mamba-jax bench throughput MODEL --engine max_num_seqs=32 --engine mamba_cache_mode=align

Random token ids, greedy, no end of text. `--shared` of each prompt's tokens are the same for all. One warm-up run comes
first, with other prompts, so that compiling is not counted; figures are medians over `--reps`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import yaml

from serving.bench.report import emit, environment, median, spread


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--shared", type=int, default=0, help="tokens at the beginning that all prompts have in common")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--engine", action="append", default=[], metavar="FLAG=VALUE", help="a flag; repeatable")
    parser.add_argument("--plot", help="a PNG or SVG file to draw (needs matplotlib)")
    options = parser.parse_args(arguments)
    if not 0 <= options.shared <= options.prompt_tokens:
        parser.error(f"--shared {options.shared}: expected 0 to {options.prompt_tokens}, the prompts' length")
    emit(**environment(options.model))
    lines = list(measure(options))
    for line in lines:
        emit(**line)
    if options.plot:
        from serving.bench.plot import bars

        named = {line["metric"]: line["each"] for line in lines if "each" in line}
        bars(named, options.plot, title=f"{options.prompts} x {options.prompt_tokens} + {options.output_tokens} tokens")
    return 0


def engine_flags(given: Sequence[str]) -> dict[str, Any]:
    """`max_num_seqs=8` and the like, values as in YAML. Raises `ConfigError` for one without a value."""
    from serving import ConfigError

    flags = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            raise ConfigError(f"--engine {text}: expected FLAG=VALUE")
        flags[name.strip().replace("-", "_")] = yaml.safe_load(value)
    return flags


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One line for requests, output and all tokens a second, and one that says what the cache did."""
    from serving import LLM, SamplingParams

    llm = LLM(options.model, **engine_flags(options.engine))
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True, detokenize=False)

    def ids(count: int) -> list[int]:
        return [rng.randrange(4, llm.engine.vocab_size) for _ in range(count)]

    def run() -> tuple[float, int]:
        shared = ids(options.shared)
        own = options.prompt_tokens - options.shared
        prompts = [{"prompt_token_ids": shared + ids(own)} for _ in range(options.prompts)]
        begin = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begin, sum(output.num_cached_tokens for output in outputs)

    run()
    compiled = llm.compilations
    runs = [run() for _ in range(options.reps)]
    counts = {
        "requests_per_s": options.prompts,
        "output_tokens_per_s": options.prompts * options.output_tokens,
        "tokens_per_s": options.prompts * (options.prompt_tokens + options.output_tokens),
    }
    for name, count in counts.items():
        each = [round(count / seconds, 2) for seconds, _ in runs]
        yield {"metric": name, "v": median(each), "each": each, "spread": spread(each)}
    yield {
        "metric": "run",
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "shared": options.shared,
        "cached_tokens": [cached for _, cached in runs],
        "compiled_while_measuring": llm.compilations - compiled,
        "engine": options.engine,
    }


if __name__ == "__main__":
    sys.exit(main())
