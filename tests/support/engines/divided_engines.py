"""Engines over several devices, for checkpoints that divide, and what they say to some prompts."""

from pathlib import Path
from typing import Any

from serving import LLM, RequestOutput, SamplingParams
from tests.support.engines.engine_harness import SMALL
from tests.support.models.divisible_checkpoints import Case
from tests.support.models.golden_case import shared_block

FLAGS = SMALL | {
    "max_num_batched_tokens": 32, "debug_state": True, "mamba_cache_mode": "all", "num_speculative_tokens": 2,
    "replay_interval": 1,
}  # fmt: skip
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)


def divided_llm(directory: Path, case: Case, shards: int, **flags: Any) -> LLM:
    """The model over `shards` devices of each member (`context_parallel_size`)."""
    return LLM(directory, tensor_parallel_size=shards, speculative_method=case.drafts, **(FLAGS | flags))


def answers(llm: LLM) -> list[RequestOutput]:
    """Prompts in turn: a fresh one of two chunks, one that shares a block with it, and the first one again; one page;
    three chunks, and a prompt that leaves these after the second block."""
    first, second, _ = prompts = shared_block()
    long = [*reversed(second), *first][:85]
    prompts += [first[-FLAGS["page_size"] :], long, [*long[:70], 7]]
    outputs = [llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0] for ids in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, len(first), 0, 0, 64]
    llm.engine.loop.scheduler.check(idle=True)
    return outputs
