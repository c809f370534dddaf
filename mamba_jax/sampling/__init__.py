"""Choosing the next tokens: greedy and random sampling, penalties, verification of drafts, log-probabilities."""

from mamba_jax.sampling.choose import Emission, choose, report_logprobs
from mamba_jax.sampling.inputs import SamplingInputs, count_tokens
from mamba_jax.sampling.largest import largest
from mamba_jax.sampling.logits import has_penalties
from mamba_jax.sampling.table import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PROMPT_LOGPROB_IDS,
    MAX_STOP_IDS,
    SamplingTable,
    init_sampling_table,
    sampling_row,
)

__all__ = [
    "MAX_LOGIT_BIAS",
    "MAX_LOGPROBS",
    "MAX_PROMPT_LOGPROB_IDS",
    "MAX_STOP_IDS",
    "Emission",
    "SamplingInputs",
    "SamplingTable",
    "choose",
    "count_tokens",
    "has_penalties",
    "init_sampling_table",
    "largest",
    "report_logprobs",
    "sampling_row",
]
