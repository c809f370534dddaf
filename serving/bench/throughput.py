"""Offline throughput: a set of prompts as fast as the engine can answer them.

    mamba-jax bench throughput MODEL --prompts 64 --prompt-tokens 512 --output-tokens 128
    mamba-jax bench throughput MODEL --engine max_num_seqs=32 --engine mamba_cache_mode=align

Random token ids, greedy, no end of text. `--shared` of each prompt's tokens are the same for all. One warm-up run comes
first, with other prompts, so that compiling is not counted; figures are medians over `--reps`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from serving import LLM, SamplingParams
from serving.bench.report import bars, check_plot, emit, environment, spread
from serving.settings import yaml_assignment


def main(arguments: Sequence[str] | None = None) -> int:
    parser = offline_parser(__doc__)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--plot", help="a PNG or SVG file to draw (needs matplotlib)")
    options = parse_offline(parser, arguments)
    check_plot(options.plot)
    emit(**environment(options.model))
    lines = list(measure(options))
    for line in lines:
        emit(**line)
    if options.plot:
        named = {line["metric"]: line["each"] for line in lines if "each" in line}
        bars(named, options.plot, title=f"{options.prompts} x {options.prompt_tokens} + {options.output_tokens} tokens")
    return 0


def offline_parser(text: str | None) -> argparse.ArgumentParser:
    """Options of a model and of the prompts that it answers."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--shared", type=int, default=0, help="tokens at the beginning that all prompts have in common")
    parser.add_argument("--engine", action="append", default=[], metavar="FLAG=VALUE", help="a flag; repeatable")
    return parser


def parse_offline(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options, checked. Ends the program with a message if one has a bad value."""
    options = parser.parse_args(arguments)
    for name in ("prompts", "prompt_tokens", "output_tokens"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(options, name)}: expected at least 1")
    if not 0 <= options.shared <= options.prompt_tokens:
        parser.error(f"--shared {options.shared}: expected 0 to {options.prompt_tokens}, the prompts' length")
    return options


def engine_flags(given: Sequence[str]) -> dict[str, Any]:
    """`max_num_seqs=8` and the like, values as in YAML. Raises `ConfigError` for one without a value."""
    assignments = (yaml_assignment("--engine", text, "FLAG=VALUE") for text in given)
    return {name.replace("-", "_"): value for name, value in assignments}


@dataclass(frozen=True)
class Run:
    """One run of all prompts."""

    seconds: float
    outputs: list[Any]

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were not computed."""
        return sum(output.num_cached_tokens for output in self.outputs)


def run(llm: LLM, options: argparse.Namespace, turn: int) -> Run:
    """Answers the prompts of a turn, which differ from those of other turns."""
    rng = random.Random(str(turn))  # integers with the same absolute value would give the same prompts
    params = SamplingParams(temperature=0.0, max_tokens=options.output_tokens, ignore_eos=True, detokenize=False)

    def ids(count: int) -> list[int]:
        return [rng.randrange(4, llm.engine.vocab_size) for _ in range(count)]

    shared = ids(options.shared)
    own = options.prompt_tokens - options.shared
    prompts = [{"prompt_token_ids": shared + ids(own)} for _ in range(options.prompts)]
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return Run(time.perf_counter() - begin, outputs)


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Returns one line with requests, output tokens and all tokens per second, and one with the counters of the
    cache."""
    llm = LLM(options.model, **engine_flags(options.engine))
    run(llm, options, -1)
    compiled = llm.compilations
    runs = [run(llm, options, turn) for turn in range(options.reps)]
    counts = {
        "requests_per_s": options.prompts,
        "output_tokens_per_s": options.prompts * options.output_tokens,
        "tokens_per_s": options.prompts * (options.prompt_tokens + options.output_tokens),
    }
    for name, count in counts.items():
        each = [round(count / one.seconds, 2) for one in runs]
        yield {"metric": name, "v": statistics.median(each), "each": each, "spread": spread(each)}
    yield {
        "metric": "run",
        "prompts": options.prompts,
        "prompt_tokens": options.prompt_tokens,
        "output_tokens": options.output_tokens,
        "shared": options.shared,
        "cached_tokens": [one.cached_tokens for one in runs],
        "compiled_while_measuring": llm.compilations - compiled,
        "engine": options.engine,
    }
