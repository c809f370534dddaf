"""The order of a step, for decode rows, prefill rows or both: from hidden states to tokens and drafts."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels_pallas.paged_attention import copy_pages
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch, StepOutput
from mamba_jax.drafts import DraftSource, StepFacts
from mamba_jax.layout import DecodeLayout, MixedLayout, PrefillLayout
from mamba_jax.layout.member import Member
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling import Emission, SamplingInputs, choose, report_logprobs
from mamba_jax.sampling.table import DEFAULT_LOGPROBS
from mamba_jax.sharding.across import on_members
from mamba_jax.sharding.axis import as_first_member, keep_whole
from mamba_jax.step.decode import DecodeRows
from mamba_jax.step.prefill import PrefillRows
from mamba_jax.step.seats import commit, newest, update_page_tables
from mamba_jax.step.slots import SampledRows, StepHidden
from mamba_jax.store import Store


def step(
    model: HybridModel,
    store: Store,
    rows: Rows,
    batch: DecodeBatch | PrefillBatch | MixedBatch,
    source: DraftSource | None = None,
    processed_logprobs: bool = False,
    sampling_masks: bool = False,
    greedy: bool = False,
    max_logprobs: int = DEFAULT_LOGPROBS,
    slow_links: bool = False,
) -> tuple[Store, Rows, Any]:
    """Runs one decode, prefill or mixed step; `DecodeBatch` and `PrefillBatch` describe the input.

    A row that has absorbed no token starts from the state in its slot, which may be a learned one; slot 0 is zeros.
    Padding rows and tokens write nothing.
    A mixed step computes what a decode step and then a prefill step would, but reads the weights once.

    Args:
        source: makes the drafts that `continues` rows verify in their next step; `rows` must have been made for it.
        processed_logprobs: report log-probabilities of output tokens under the distribution that they are drawn from,
            after penalties, temperature and limits; otherwise under the model's.
        sampling_masks: report the tokens that output tokens are drawn from, for rows that ask.
        greedy: emit the most likely tokens, whatever the rows' sampling parameters.
        max_logprobs: maximum number of alternatives in log-probabilities.
        slow_links: members that divide the tokens of a prefill step should exchange little.
    Returns:
        the store, the rows, and a `StepOutput`; of a mixed step, those of its decode rows and of its prefill rows.
    """
    options = processed_logprobs, sampling_masks, greedy, max_logprobs
    parts: list[DecodeRows | PrefillRows] = []
    for each in (batch.decode, batch.prefill) if isinstance(batch, MixedBatch) else (batch,):
        rows, page_table = update_page_tables(rows, each)
        form: Any = DecodeRows if isinstance(each, DecodeBatch) else PrefillRows
        parts.append(form.of(store, rows, each, page_table))
        store = copy_shared_pages(store, each.page_copy)
    hidden, store = model.run(_joined([part.tokens for part in parts]), _layout(parts, rows, slow_links), store)
    hidden = keep_whole(hidden)  # tokens of a long prefill are divided over the devices
    written, heads = [], []
    for part, own in zip(parts, _divided(hidden, [part.tokens.shape[0] for part in parts]), strict=True):
        store, done = part.write(store, own, for_drafts=source is not None)
        written.append(done)
        heads.append(part.heads(done.hidden))
    # The head's weights are also read only once.
    flat = model.divided_logits(
        _joined([each.reshape(-1, each.shape[-1]) for each in heads]), _head_adapters(parts, heads, rows)
    )
    outputs = []
    for part, done, logits in zip(
        parts, written, _divided(flat, [each.shape[0] * each.shape[1] for each in heads]), strict=True
    ):
        emission, emitted = emit(logits, rows, part.sampled, options)
        kept = part.kept(emission)
        slot, anchor = part.resume_after(kept)
        before, rows = rows, commit(rows, part.row_id, part.length + kept, slot, emission, anchor)
        if source is not None:
            store, rows = propose(source, model, store, rows, emission, part, done, kept)
        output = StepOutput(
            **emitted, kept=kept, tag_error=done.wrong.any(),
            proposed=rows.drafts[part.row_id] if rows.masks is not None and rows.drafts.shape[1] else None,
            **part.report(model, before, done, max_logprobs),
        )  # fmt: skip
        outputs.append(output)
    return store, rows, (outputs[0], outputs[1]) if isinstance(batch, MixedBatch) else outputs[0]


def emit(
    flat: Float[Array, "heads vocab"], rows: Rows, sampled: SampledRows, options: tuple[bool, bool, bool, int]
) -> tuple[Emission, dict[str, Any]]:
    """The tokens that the heads emit; their log-probabilities and whether they are finite, as fields of `StepOutput`.

    Logits stay divided between devices, which collect them only for rows that ask for more than the largest. `options`
    are those of `step`: processed_logprobs, sampling_masks, greedy, max_logprobs.
    """
    processed_logprobs, sampling_masks, greedy, max_logprobs = options
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


def copy_shared_pages(store: Store, page_copy: Int[Array, "rows 2"]) -> Store:
    """Copies partly filled pages that several rows share, each within its member, before any row writes to them."""

    def copied(member: Member | None, pages: tuple[Array, ...], page_copy: Array) -> tuple[Array, ...]:
        own = page_copy if member is None else member.own_pages(page_copy, len(pages[0]))
        return tuple(copy_pages(each, source=own[:, 0], target=own[:, 1]) for each in pages)

    pages = store.kv if store.experts is None else (*store.kv, store.experts)
    found: tuple[Array, ...] = on_members(copied, pages, page_copy) if pages else ()
    experts = None if store.experts is None else found[-1]
    return dataclasses.replace(store, kv=found[: len(store.kv)], experts=experts)


def _layout(parts: list[Any], rows: Rows, slow_links: bool) -> DecodeLayout | PrefillLayout | MixedLayout:
    layouts = [part.layout for part in parts]
    if rows.adapter is not None:
        layouts = [part.layout.with_adapters(rows.adapter[part.row_id]) for part in parts]
    if isinstance(layouts[0], PrefillLayout):
        return dataclasses.replace(layouts[0], slow_links=slow_links)
    return layouts[0] if len(parts) == 1 else MixedLayout(*layouts)


def _head_adapters(parts: list[Any], heads: list[Array], rows: Rows) -> Int[Array, " heads"] | None:
    """Returns the entry of each head's adapter."""
    if rows.adapter is None:
        return None
    pairs = zip(parts, heads, strict=True)
    return _joined([jnp.repeat(rows.adapter[part.row_id], each.shape[1]) for part, each in pairs])


def _joined(arrays: list[Array]) -> Array:
    return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays)


def _divided(array: Array, lengths: list[int]) -> list[Array]:
    return [array] if len(lengths) == 1 else jnp.split(array, [lengths[0]])
