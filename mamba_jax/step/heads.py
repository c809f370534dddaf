"""From hidden states to tokens: logits and sampling at each row's heads, and the drafts for its next step."""

import dataclasses
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.drafts import DraftSource, StepFacts
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission, SamplingInputs, choose, report_logprobs
from mamba_jax.sharding.axis import as_first_member
from mamba_jax.step.seats import newest
from mamba_jax.store import Store

Resumption = tuple[Int[Array, " rows"], Int[Array, " rows"] | None]
"""The slot that each row reads next and, under replay, how many tokens the state in it has absorbed."""


@dataclass(frozen=True)
class StepHidden:
    """The result of a part of a step after its slots are complete."""

    hidden: Float[Array, "T hidden"]
    """After the final norm; for rows without tokens, the hidden state in their slot."""
    before: Float[Array, "rows hidden"]
    """The hidden state before each row's first token; zeros without one."""
    wrong: Bool[Array, " rows"]
    """With `debug_state`: rows that read another state than their own."""


@dataclass(frozen=True)
class SampledRows:
    """The sampling inputs of the rows of one batch."""

    row_id: Int[Array, " rows"]
    sample: Bool[Array, " rows"]
    """Whether the row emits tokens."""
    drafts: Int[Array, "rows H-1"]
    num_drafts: Int[Array, " rows"]
    length: Int[Array, " rows"]
    """Tokens before the first that is emitted."""


def emit(
    flat: Float[Array, "heads vocab"],
    rows: Rows,
    sampled: SampledRows,
    *,
    processed_logprobs: bool,
    sampling_masks: bool,
    greedy: bool,
    max_logprobs: int,
) -> tuple[Emission, dict[str, Any]]:
    """The tokens that the heads emit; their log-probabilities and whether they are finite, as fields of `StepOutput`.

    Logits stay divided between devices, which collect them only for rows that ask for more than the largest.
    """
    row_id, (count, width) = sampled.row_id, (sampled.drafts.shape[0], sampled.drafts.shape[1] + 1)
    logits = flat.reshape(count, width, -1)
    inputs = SamplingInputs.of(
        **vars(sampled) | {"sample": sampled.sample & (row_id > 0)}, table=rows.sampling,
        output_counts=rows.output_counts, prompt_seen=rows.prompt_seen, masks=rows.masks,
    )  # fmt: skip
    emission = as_first_member(choose(logits, inputs, supports=sampling_masks, greedy=greedy))
    wanted = jnp.where((emission.tokens >= 0) & (row_id > 0)[:, None], rows.sampling.logprobs[row_id][:, None], -1)
    unused = jnp.arange(width) > emission.accepted[:, None]
    process = inputs.processed if processed_logprobs else lambda flat: flat
    reported = report_logprobs(flat, emission.tokens.reshape(-1), wanted.reshape(-1), process, most=max_logprobs)
    logprobs, top_ids, top_logprobs = (each.reshape(count, width, *each.shape[1:]) for each in reported[:3])
    return emission, {
        "tokens": emission.tokens,
        "num_emitted": emission.count,
        "logprobs": logprobs,
        "top_ids": top_ids,
        "top_logprobs": top_logprobs,
        "sampling_mask": emission.supports,
        "finite": (emission.finite | unused).all(axis=-1),
    }


def propose(
    source: DraftSource,
    model: HybridModel,
    store: Store,
    rows: Rows,
    emission: Emission,
    part: Any,
    written: StepHidden,
    kept: Int[Array, " rows"],
) -> tuple[Store, Rows]:
    """Drafts for the next step of each row that has emitted a token. `part`: its `DecodeRows` or `PrefillRows`."""
    facts = StepFacts(
        layout=part.layout, tokens=part.tokens, hidden=written.hidden, before=written.before, row_id=part.row_id,
        length=part.length, kept=kept, emitted=emission.tokens, emitted_from=part.sampled.length,
        sampled=emission.count > 0, newest=newest(emission), page_table=part.page_table,
    )  # fmt: skip
    count = part.num_proposed(rows.drafts.shape[1])
    drafts, store, state = source.propose(model, store, rows.source, facts, count)
    drafts = jnp.pad(as_first_member(drafts), ((0, 0), (0, rows.drafts.shape[1] - drafts.shape[1])), constant_values=-1)
    seat_of = jnp.where(facts.sampled, facts.row_id, rows.length.shape[0])
    return store, dataclasses.replace(rows, drafts=rows.drafts.at[seat_of].set(drafts, mode="drop"), source=state)
