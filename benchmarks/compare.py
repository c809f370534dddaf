"""Compare configurations of the engine in alternating turns.

    python -m benchmarks.compare MODEL --vary mamba_cache_mode=none,align,all
    python -m benchmarks.compare MODEL --vary quantization=null,int8 --vary dtype=float32,bfloat16 --prompts 1

Each combination of the values is an engine of its own, with the weights in memory once per engine and an equal part of
`memory_utilization`. In each turn all engines answer the same prompts (random token ids, greedy, no end of text), and
each turn starts with another engine. The first turn is a warm-up. Values are written as in YAML; quote a value that
contains a comma.

For each configuration: output tokens per second, and the medians over the requests of the time to the first token
(`ttft_ms`) and of the time per further token (`tpot_ms`). `v` is the median over the turns. `ratio` is the median of
each turn's ratio to the first configuration, `least` and `most` its range. `equal_outputs` is the number of outputs
that are the same as those of the first configuration.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import yaml

from benchmarks.turns import in_turns, ratio
from serving import LLM, ConfigError, EngineConfig
from serving.bench.report import emit, environment, spread
from serving.bench.throughput import Run, engine_flags, offline_parser, parse_offline, run
from serving.vllm.flags import engine_flags as own_flags


def main(arguments: Sequence[str] | None = None) -> int:
    parser = offline_parser(__doc__)
    parser.add_argument(
        "--vary", action="append", required=True, metavar="FLAG=A,B", help="a flag and its values; repeatable"
    )
    parser.add_argument("--turns", type=int, default=5)
    options = parse_offline(parser, arguments)
    if options.turns < 1:
        parser.error(f"--turns {options.turns}: expected at least 1")
    combined = combinations(options.vary)
    configs = configurations(options.model, combined, engine_flags(options.engine))
    sizes = {name: getattr(options, name) for name in ("prompts", "prompt_tokens", "output_tokens", "shared", "turns")}
    emit(**environment(options.model), **sizes, engine=options.engine)
    for line in measure(combined, configs, options):
        emit(**line)
    return 0


def combinations(given: Sequence[str]) -> list[dict[str, Any]]:
    """All combinations of the values of `dtype=float32,bfloat16` and the like.

    Raises:
        ConfigError: a text without a value, a value that is not YAML, a flag given twice, or a single combination.
    """
    varied: dict[str, list[Any]] = {}
    for text in given:
        name, equals, values = text.partition("=")
        if not equals:
            raise ConfigError(f"--vary {text}: expected FLAG=VALUE")
        name = name.strip().replace("-", "_")
        if name in varied:
            raise ConfigError(f"--vary {name}: given twice; write all values after one --vary")
        try:
            varied[name] = yaml.safe_load(f"[{values}]")
        except yaml.YAMLError as error:
            raise ConfigError(f"--vary {text}: not values in YAML separated by commas: {error}") from None
    found = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    if len(found) < 2:
        raise ConfigError(
            f"--vary {' '.join(given)}: at least two values are needed, as in --vary dtype=float32,bfloat16"
        )
    return found


def configurations(model: str, combined: Sequence[dict[str, Any]], common: dict[str, Any]) -> list[dict[str, Any]]:
    """The flags of each engine.

    Raises:
        ConfigError: a flag is bad, or both varied and common.
    """
    if both := sorted(combined[0].keys() & common.keys()):
        raise ConfigError(f"--vary {both[0]}: also given as --engine {both[0]}")
    found = []
    for number, varied in enumerate(combined, start=1):
        flags, _ = own_flags({"model": model} | common | varied)
        # An engine takes this fraction of the memory, minus what the engines before it have taken.
        utilization = EngineConfig.create(**flags).memory_utilization * number / len(combined)
        found.append(flags | {"memory_utilization": utilization})
    return found


def measure(
    combined: Sequence[dict[str, Any]], configs: Sequence[dict[str, Any]], options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Returns one line for each configuration and figure, and one with the counters of the configuration's engine."""
    with ExitStack() as stack:
        engines = [stack.enter_context(LLM(**flags)) for flags in configs]
        compiled: dict[int, int] = {}

        def form(number: int, turn: int) -> Run:
            if not turn:
                compiled[number] = engines[number].compilations
            return run(engines[number], options, turn)

        forms = {number: partial(form, number) for number in range(len(engines))}
        runs = in_turns(forms, options.turns)
        for name in figures(runs[0][0]):
            baseline = [figures(one)[name] for one in runs[0]]
            for number, varied in enumerate(combined):
                values = [figures(one)[name] for one in runs[number]]
                line = {"metric": name, "configuration": varied, "v": round(statistics.median(values), 3)}
                yield line | {"spread": spread(values)} | (ratio(values, baseline) if number else {})
        for number, varied in enumerate(combined):
            pairs = zip(runs[number], runs[0], strict=True)
            yield {
                "metric": "run",
                "configuration": varied,
                "cached_tokens": sum(one.cached_tokens for one in runs[number]),
                "compiled_while_measuring": engines[number].compilations - compiled[number],
                "equal_outputs": sum(
                    a == b for one, other in pairs for a, b in zip(tokens(one), tokens(other), strict=True)
                ),
                "outputs": options.prompts * options.turns,
            }


def tokens(run: Run) -> list[list[int]]:
    """The output of each prompt."""
    return [output.outputs[0].token_ids for output in run.outputs]


def figures(run: Run) -> dict[str, float]:
    """Output tokens per second, and medians over the requests: times to and between tokens, in milliseconds."""
    of_request = [output.metrics for output in run.outputs]
    found = {
        "output_tokens_per_s": sum(map(len, tokens(run))) / run.seconds,
        "ttft_ms": 1e3 * statistics.median(each.time_to_first_token for each in of_request),
    }
    if (between := len(tokens(run)[0]) - 1) > 0:
        times = [(each.finished_time - each.first_token_time) / between for each in of_request]
        found["tpot_ms"] = 1e3 * statistics.median(times)
    return found


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ConfigError as error:
        sys.exit(f"compare: {error}")
