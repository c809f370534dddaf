"""The engine: tokens per second, and whether greedy tokens are equal to those of another machine."""

from __future__ import annotations

import time
from typing import Any

import jax

from benchmarks.gpu_check.deadline import Deadline
from benchmarks.gpu_check.programs import ModelPrograms
from serving import LLM, EngineConfig, SamplingParams
from serving.bench.report import emit
from serving.engine.assembly.build import assemble

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
        with LLM(GOLDEN_MODEL, dtype="float32", max_num_seqs=4, max_model_len=512, warmup=False) as llm:
            return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        jax.config.update("jax_default_matmul_precision", before)


def check_greedy(golden: list[list[int]]) -> bool:
    """Whether greedy tokens are equal to those of another machine."""
    same = [found == wanted for found, wanted in zip(greedy_tokens(), golden, strict=True)]
    emit(metric="greedy tokens equal to the golden ones", prompts=len(same), equal=sum(same))
    return all(same)


def time_generation(programs: ModelPrograms, deadline: Deadline) -> bool:
    """The engine with as many requests at once, each a short prompt and 128 tokens, of a model that is loaded."""
    sizes = programs.sizes
    tokens = 8 if sizes.interpret else 128
    config = EngineConfig.create(max_num_seqs=max(sizes.requests), max_model_len=1024, warmup=False)
    engine = assemble(config, programs.model).engine
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    try:
        for requests in deadline.each("generate", sizes.requests):
            for round_ in range(2):  # the first compiles; no prompt of the second is cached
                begin = time.perf_counter()
                for row in range(requests):
                    prompt = [2 + row, 2 + round_, *range(3, 66)]
                    engine.add_request(f"{requests}-{round_}-{row}", {"prompt_token_ids": prompt}, params)
                while engine.busy:
                    engine.step()
            taken = time.perf_counter() - begin
            rate = round(requests * tokens / taken, 1)
            emit(metric="generate", model=programs.name, rows=requests, tokens_per_s=rate)
    finally:
        engine.close()
    return True
