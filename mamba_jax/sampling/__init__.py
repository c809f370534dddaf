"""Choosing the next tokens: greedy and random sampling, penalties, verification of drafts, log-probabilities."""

from mamba_jax.sampling.choose import Emission, choose, report_logprobs
from mamba_jax.sampling.largest import largest
from mamba_jax.sampling.logits import SamplingInputs, count_tokens, has_penalties
from mamba_jax.sampling.table import SamplingTable, init_sampling_table, sampling_row
