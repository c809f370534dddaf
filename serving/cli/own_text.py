"""Text that a model itself writes: what its drafts have to predict when it is served."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from mamba_jax.train.data import TokenStream
from serving.engine.llm import LLM
from serving.engine.sampling_params import SamplingParams

LEAST_PROMPT, MOST_PROMPT, CONTINUATION = 16, 128, 128
"""Tokens of text that is continued, and of its continuation."""


def own_text(
    model: Path, streams: Mapping[str, TokenStream], shares: Mapping[str, float], *, tokens: int, seed: int
) -> TokenStream:
    """Pieces of text, each with the model's own greedy continuation.

    Args:
        model: a directory.
        streams: text by source.
        shares: of the pieces, by source; they need not sum to 1.
        tokens: how many the continuations have together, at least.
        seed: of which pieces are taken.
    """
    rng, names = np.random.default_rng(seed), sorted(shares)
    chances = np.array([shares[name] for name in names]) / sum(shares.values())
    llm = LLM(
        str(model), max_num_seqs=32, max_model_len=MOST_PROMPT + CONTINUATION, mamba_cache_mode="none", warmup=False
    )
    params = SamplingParams(max_tokens=CONTINUATION, temperature=0.0)
    said: list[list[int]] = []
    made = 0
    while made < tokens:
        prompts = []
        for _ in range(min(256, -(-(tokens - made) // CONTINUATION))):
            text = streams[names[rng.choice(len(names), p=chances)]].tokens
            end = int(rng.integers(LEAST_PROMPT, min(MOST_PROMPT, len(text)) + 1))
            start = int(rng.integers(len(text) - end + 1))
            prompts.append({"prompt_token_ids": text[start : start + end].tolist()})
        outputs = llm.generate(prompts, params)
        said += [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]
        made += sum(len(output.outputs[0].token_ids) for output in outputs)
    return TokenStream.of(said)
