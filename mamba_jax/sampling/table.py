"""Sampling parameters as the device keeps them: one entry for each seat, written once when a request is admitted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt

MAX_LOGIT_BIAS = 300
"""Entries of `logit_bias` that one request may have, as in OpenAI's API."""
MAX_STOP_IDS = 64
"""Ids that `min_tokens` can hold back for one request (end-of-sequence and stop ids together)."""
MAX_LOGPROBS = 1024
"""Alternatives that programs can report for each token at most."""
DEFAULT_LOGPROBS = 20
"""Alternatives that they report unless they are made for more."""
MAX_PROMPT_LOGPROB_IDS = 128
"""Token ids whose log-probabilities are reported at each prompt position at most."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SamplingTable:
    """Sampling parameters of many rows, or (without the leading axis) of one. `sampling_row` makes the latter."""

    temperature: Float[Array, " rows"]
    """0 is greedy."""
    top_k: Int[Array, " rows"]
    """0 keeps all."""
    top_p: Float[Array, " rows"]
    """1 keeps all."""
    min_p: Float[Array, " rows"]
    """0 keeps all."""
    presence_penalty: Float[Array, " rows"]
    frequency_penalty: Float[Array, " rows"]
    repetition_penalty: Float[Array, " rows"]
    """1 is none."""
    key: UInt[Array, "rows 2"]
    """Random key of (seed, choice)."""
    prompt_length: Int[Array, " rows"]
    """Tokens before the first output token."""
    min_tokens: Int[Array, " rows"]
    """Output tokens before which no id of `stop_ids` may come."""
    stop_ids: Int[Array, "rows stops"]
    """Padded with -1."""
    bias_ids: Int[Array, "rows biases"]
    """Padded with -1."""
    bias_values: Float[Array, "rows biases"]
    logprobs: Int[Array, " rows"]
    """Number of alternatives to report in addition to the emitted token's log-probability; -1 reports nothing."""
    prompt_logprobs: Int[Array, " rows"]
    """The same for the tokens of the prompt."""
    prompt_logprob_ids: Int[Array, "rows ids"]
    """Token ids whose log-probabilities are reported at each position of the prompt. Padded with -1."""
    sampling_mask: Bool[Array, " rows"]
    """Whether to report which tokens each output token was drawn from."""

    @property
    def is_greedy(self) -> bool:
        """Of one row on the host: whether it chooses the largest of the model's logits."""
        neutral = self.presence_penalty == 0 and self.frequency_penalty == 0 and self.repetition_penalty == 1
        return bool(self.temperature <= 0 and neutral and self.min_tokens <= 0 and self.bias_ids[0] < 0)

    def take(self, row_id: Int[Array, " n"]) -> SamplingTable:
        """Returns the entries of some seats."""
        return jax.tree.map(lambda column: column[row_id], self)


def init_sampling_table(seats: int) -> SamplingTable:
    """Returns a table in which all rows are greedy."""
    return jax.tree.map(lambda value: jnp.tile(value, (seats,) + (1,) * np.ndim(value)), sampling_row())


def sampling_row(
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    choice: int = 0,
    prompt_length: int = 0,
    min_tokens: int = 0,
    stop_ids: Sequence[int] = (),
    logit_bias: Mapping[int, float] | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    prompt_logprob_ids: Sequence[int] = (),
    sampling_mask: bool = False,
) -> SamplingTable:
    """One row's sampling parameters, as numpy values.

    `top_k` below 1 keeps all tokens; `seed` is any integer (its low 64 bits count); `choice` tells which of a request's
    `n` outputs this is; `stop_ids` are what `min_tokens` holds back, so they may be left out where `min_tokens` is 0;
    `prompt_logprob_ids` count only where `prompt_logprobs` is not None.

    Raises:
        ValueError: more stop ids, biases, log-probabilities or their ids than a row has room for, or a negative id.
    """
    stop_ids = sorted(set(stop_ids)) if min_tokens > 0 else []
    bias = dict(logit_bias or {})
    for what, have, most in (
        ("ids that min_tokens must hold back", len(stop_ids), MAX_STOP_IDS),
        ("entries of logit_bias", len(bias), MAX_LOGIT_BIAS),
        ("logprobs", logprobs or 0, MAX_LOGPROBS),
        ("prompt_logprobs", prompt_logprobs or 0, MAX_LOGPROBS),
        ("ids of prompt_logprob_token_ids", len(prompt_logprob_ids), MAX_PROMPT_LOGPROB_IDS),
    ):
        if have > most:
            raise ValueError(f"{have} {what}: at most {most} are allowed")
    if (least := min([*stop_ids, *bias, *prompt_logprob_ids], default=0)) < 0:
        raise ValueError(f"token id {least}: ids from 0 on are expected")
    floats = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "presence_penalty": presence_penalty}
    floats |= {"frequency_penalty": frequency_penalty, "repetition_penalty": repetition_penalty}
    counts = {"top_k": max(top_k, 0), "prompt_length": prompt_length, "min_tokens": min_tokens}
    reported = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
    counts |= {name: -1 if count is None else count for name, count in reported.items()}
    values: dict[str, Any] = {name: np.float32(value) for name, value in floats.items()}
    values |= {name: np.int32(value) for name, value in counts.items()}
    values |= {
        "stop_ids": _padded(stop_ids, MAX_STOP_IDS, np.int32(-1)),
        "bias_ids": _padded(bias, MAX_LOGIT_BIAS, np.int32(-1)),
        "bias_values": _padded(bias.values(), MAX_LOGIT_BIAS, np.float32(0)),
        "prompt_logprob_ids": _padded(prompt_logprob_ids, MAX_PROMPT_LOGPROB_IDS, np.int32(-1)),
    }
    return SamplingTable(**values | {"key": _key(seed, choice), "sampling_mask": np.bool_(sampling_mask)})


def _padded(values: Iterable[Any], size: int, fill: Any) -> np.ndarray:
    found = np.full(size, fill)
    given = list(values)
    found[: len(given)] = given
    return found


def _key(seed: int, choice: int) -> Any:
    """A 64-bit key, as two words, in which every bit of seed and choice shows (SplitMix64; Steele et al., 2014)."""
    mask = (1 << 64) - 1
    key = seed & mask
    for part in (0, choice):
        key = (key ^ (part & mask)) + 0x9E3779B97F4A7C15 & mask
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & mask
        key = (key ^ key >> 27) * 0x94D049BB133111EB & mask
        key ^= key >> 31
    return np.array([key >> 32, key & 0xFFFFFFFF], np.uint32)
