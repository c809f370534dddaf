"""The cost of a constrained row for other rows: 31 plain rows with and without one constrained row.

    python -m benchmarks.structured_rows --model demo --rows 31 --tokens 128 --turns 9

Both run on one engine, in turns. The constrained row has a longer output than the others, so it is always present.
Prints tokens per second of the plain rows (without and with it) and of the constrained one, the number of steps that
waited for the previous one, and the median of the turns' ratios.

With `--drafts K` all rows draft, always K tokens: by n-grams, or by `--method mtp`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

from serving.bench.report import emit, environment, spread
from serving.bench.turns import in_turns, ratio

_FORM = {"regex": "[a-z0-9 ]{9000}"}


class Turn(NamedTuple):
    """Tokens per second of the plain rows and of the structured one; steps, and those that waited for the last one."""

    plain: float
    structured: float
    steps: int
    waited: int


def rates_of(engine: Any, prompts: list[list[int]], tokens: int, structured: bool) -> tuple[float, float]:
    """Tokens per second of plain rows, and of the structured one, until the last plain one has ended."""
    from serving import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    waiting = {f"plain-{i}" for i in range(len(prompts))}
    for name, ids in zip(sorted(waiting), prompts, strict=True):
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    if structured:
        longer = SamplingParams(
            max_tokens=2 * tokens, temperature=1.0, seed=0, ignore_eos=True, structured_outputs=_FORM
        )
        engine.add_request("structured", {"prompt_token_ids": prompts[0]}, longer)
    begin = time.perf_counter()
    while waiting:
        waiting -= {output.request_id for output in engine.step() if output.finished}
    seconds = time.perf_counter() - begin
    said = 0
    if structured:
        output = engine.abort("structured")
        assert output is not None, "the structured row has ended before the others"
        said = len(output.outputs[0].token_ids)
    while engine.loop.busy:
        engine.step()
    return len(prompts) * tokens / seconds, said / seconds


def main(arguments: list[str] | None = None) -> int:
    """Measures and prints; 0."""
    from serving.config import EngineConfig
    from serving.engine.assembly.build import build_engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--rows", type=int, default=31, help="plain rows")
    parser.add_argument("--tokens", type=int, default=128, help="that each of them says")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--drafts", type=int, default=0, help="K; the number of drafts does not adapt")
    parser.add_argument("--method", default="ngram", choices=("ngram", "mtp"), help="of drafts")
    options = parser.parse_args(arguments)
    drafting = {
        "num_speculative_tokens": options.drafts, "speculative_method": options.method, "adaptive_drafts": False,
    } if options.drafts else {}  # fmt: skip
    config = EngineConfig.create(
        model=options.model, max_num_seqs=options.rows + 1, max_model_len=options.prompt + 2 * options.tokens + 1,
        mamba_cache_mode="none", enable_structured_outputs=True, warmup=True,
        **drafting,
    )  # fmt: skip
    built = build_engine(config, progress=False)
    engine, rng = built.engine, random.Random(0)
    vocab = built.model.config.vocab_size
    prompts = [[rng.randrange(10, vocab) for _ in range(options.prompt)] for _ in range(options.rows)]
    emit(**environment(options.model))
    stats = engine.loop.stats

    def form(structured: bool, turn: int) -> Turn:
        before = stats.steps, stats.lockstep_steps
        rates = rates_of(engine, prompts, options.tokens, structured)
        return Turn(*rates, stats.steps - before[0], stats.lockstep_steps - before[1])

    turns = in_turns({structured: partial(form, structured) for structured in (False, True)}, options.turns)
    rates = {
        "tokens_per_second_alone": [one.plain for one in turns[False]],
        "tokens_per_second_with_a_structured_row": [one.plain for one in turns[True]],
        "tokens_per_second_of_the_structured_row": [one.structured for one in turns[True]],
    }
    for name, values in rates.items():
        emit(metric=name, rows=options.rows, v=round(statistics.median(values), 1), spread=spread(values))
    emit(metric="steps_that_waited", v=sum(one.waited for one in turns[True]), of=sum(one.steps for one in turns[True]))
    alone, together, _ = rates.values()
    emit(metric="ratio", **ratio(together, alone))
    return 0


if __name__ == "__main__":
    sys.exit(main())
