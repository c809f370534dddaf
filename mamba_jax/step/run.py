"""The order of a step, for decode rows, prefill rows or both."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from kernels_pallas.paged_attention import copy_pages
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch, StepOutput
from mamba_jax.drafts import DraftSource
from mamba_jax.layout import DecodeLayout, MixedLayout, PrefillLayout
from mamba_jax.layout.member import Member
from mamba_jax.model import HybridModel
from mamba_jax.rows import Rows
from mamba_jax.sampling.table import DEFAULT_LOGPROBS
from mamba_jax.sharding.across import on_members
from mamba_jax.sharding.axis import keep_whole
from mamba_jax.step.decode import DecodeRows
from mamba_jax.step.heads import emit, propose
from mamba_jax.step.prefill import PrefillRows
from mamba_jax.step.seats import commit, next_drafts, update_page_tables
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
        emission, emitted = emit(
            logits, rows, part.sampled, processed_logprobs=processed_logprobs, sampling_masks=sampling_masks,
            greedy=greedy, max_logprobs=max_logprobs,
        )  # fmt: skip
        kept = part.kept(emission)
        slot, anchor = part.resume_after(kept)
        before, rows = rows, commit(rows, part.row_id, part.length + kept, slot, emission, anchor)
        if source is not None:
            store, rows = propose(source, model, store, rows, emission, part, done, kept)
        output = StepOutput(
            **emitted, kept=kept, tag_error=done.wrong.any(), proposed=next_drafts(rows, part.row_id),
            **part.report(model, before, done, max_logprobs),
        )  # fmt: skip
        outputs.append(output)
    return store, rows, (outputs[0], outputs[1]) if isinstance(batch, MixedBatch) else outputs[0]


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
