"""The engine: tokens per second of `LLM.generate`, and whether a model says on this machine what it says on a CPU."""

from __future__ import annotations

import time
from typing import Any

import jax

from benchmarks.gpu_check.sizes import Sizes
from serving import LLM, SamplingParams
from serving.bench.report import emit

GOLDEN_MODEL, GOLDEN_TOKENS = "demo", 48
GOLDEN_PROMPTS = ([1, 2, 3, 4, 5], list(range(10, 90)), [7] * 300)


def greedy_tokens() -> list[list[int]]:
    """What the demo model, which comes with the package, says in float32 after some prompts."""
    params = SamplingParams(temperature=0, max_tokens=GOLDEN_TOKENS, ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": list(ids)} for ids in GOLDEN_PROMPTS]
    # By itself a GPU multiplies float32 as TF32, whose ten bits could turn a close decision. A context would not do: it
    # is this thread's alone, and the engine traces in others.
    before = jax.config.jax_default_matmul_precision
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        with LLM(GOLDEN_MODEL, dtype="float32", max_num_seqs=4, max_model_len=512) as llm:
            return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def check_generation(sizes: Sizes, golden: list[list[int]] | None) -> bool:
    """Rows at once of each number, each a short prompt and 128 tokens, with dummy weights."""
    ok = True
    if golden is not None:
        same = [found == wanted for found, wanted in zip(greedy_tokens(), golden, strict=True)]
        emit(metric="greedy tokens equal to the golden ones", prompts=len(same), equal=sum(same))
        ok = all(same)
    tokens = 8 if sizes.interpret else 128
    for model in sizes.models:
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        with LLM(model, load_format="dummy", max_num_seqs=max(sizes.rows), max_model_len=1024) as llm:
            for rows in sizes.rows:
                prompts: Any = [{"prompt_token_ids": [2 + row, *range(3, 66)]} for row in range(rows)]
                llm.generate(prompts, params, use_tqdm=False)  # compiles
                begin = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                taken = time.perf_counter() - begin
                emit(metric="generate", model=model, rows=rows, tokens_per_s=round(rows * tokens / taken, 1))
        del llm  # the next one wants the memory
    return ok
