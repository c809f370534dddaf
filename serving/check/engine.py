"""The engine: tokens per second, and whether greedy tokens are equal to those of another machine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax

from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.model import HybridModel
from serving.check.report import Report
from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.llm import LLM
from serving.engine.requests.sampling_params import SamplingParams

GREEDY = Path(__file__).with_name("greedy.json")
"""Prompts, and what the demo model says after each in float32 on a CPU."""
PROMPT = 64
"""Tokens of each request of `time_engine`."""


def check_greedy(report: Report) -> bool:
    """Whether the demo model's greedy tokens are equal to the stored ones."""
    stored = json.loads(GREEDY.read_text())
    params = SamplingParams(temperature=0, max_tokens=len(stored["tokens"][0]), ignore_eos=True)
    prompts: Any = [{"prompt_token_ids": ids} for ids in stored["prompts"]]
    # By itself a GPU multiplies float32 as TF32, whose ten bits could turn a close decision. A context would not do: it
    # is this thread's alone, and the engine traces in others.
    before = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    jax.config.update("jax_default_matmul_precision", "float32")
    try:
        with LLM(
            "demo",
            dtype="float32",
            max_num_seqs=4,
            max_model_len=512,
            num_slots=16,
            num_pages=64,
            warmup=False,
            kernel_check="off",
        ) as llm:
            found = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, params, use_tqdm=False)]
    finally:
        jax.config.update("jax_default_matmul_precision", before)
    equal = sum(one == other for one, other in zip(found, stored["tokens"], strict=True))
    report.add("greedy tokens", prompts=len(found), equal=equal)
    if equal < len(found):
        report.add("greedy tokens", found=found)
    return equal == len(found)


def time_engine(
    model: HybridModel, name: str, report: Report, compiler: Compiler, *, requests: int, tokens: int, left: float
) -> None:
    """The engine with as many requests at once, each a short prompt and `tokens` tokens."""
    begin = time.perf_counter()
    length = PROMPT + tokens + 1
    config = EngineConfig.create(
        max_num_seqs=requests, max_model_len=length, warmup=False, num_slots=3 * requests + 8,
        num_pages=requests * (length // 16 + 2) + 8,
    )  # fmt: skip
    engine = assemble(config, model).engine
    try:
        loop = engine.loop
        loop.programs.kept = compiler
        batches = list(loop.batches.warm_up_batches(engine.vocab_size))[: loop.batches.num_essential]
        jobs = [compiler.submit(loop.programs.program, *loop.shapes, batch) for batch in batches]
        compiler.wait(0.8 * left)
        if compiler.busy:
            raise TimeoutError("programs are still being compiled")
        for job in jobs:
            job.result(0)
        loop.batches.use_only(batches)
        report.add("engine programs", count=len(batches), seconds=round(time.perf_counter() - begin, 1))
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        for round_ in range(2):  # no prompt of the second is cached; it is the one that counts
            begin = time.perf_counter()
            for row in range(requests):
                prompt = [2 + row, 2 + round_, *range(3, PROMPT + 1)]
                engine.add_request(f"{round_}-{row}", {"prompt_token_ids": prompt}, params)
            while engine.busy:
                engine.step()
            taken = time.perf_counter() - begin
        rate = round(requests * tokens / taken, 1)
        report.add("generate", model=name, requests=requests, tokens=tokens, **{"tokens/s": rate})
        report.add("engine kernels", chosen=loop.programs.kernels.report())
    finally:
        engine.close()
