"""The device's record of each running row, by seat.

The host dispatches a step before it has seen the previous step's result. The values that the next step needs (number of
kept drafts, the current slot, the sampled token) therefore stay on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Int

from mamba_jax.sampling.masks import Masks, init_masks
from mamba_jax.sampling.table import SamplingTable, init_sampling_table
from mamba_jax.sharding.axis import TENSOR, replicated

if TYPE_CHECKING:
    from mamba_jax.config import HybridConfig
    from mamba_jax.drafts import DraftSource


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rows:
    """One entry for each seat; seat 0 is for padding. Donated to every step."""

    length: Int[Array, " seats"]
    """Tokens committed, that is, absorbed by `slot` (and, under replay, the tail)."""
    last_token: Int[Array, " seats"]
    """The token sampled last: emitted, not yet fed to the model."""
    slot: Int[Array, " seats"]
    """The slot of the state after `length` tokens, or of the row's anchor."""
    drafts: Int[Array, "seats drafts"]
    """Draft tokens after `last_token`; -1 = none."""
    sampling: SamplingTable
    output_counts: Int[Array, "seats vocab"]
    """How often each token was emitted; kept for rows with penalties only.

    On several devices, this array and `prompt_seen` are divided by the vocabulary, as logits are.
    """
    prompt_seen: Bool[Array, "seats vocab"]
    """Which tokens the prompt has; kept for rows with penalties only."""
    source: Any = None
    """The draft source's state of each seat; see `DraftSource`."""
    anchor: Int[Array, " seats"] | None = None
    """Under replay: number of tokens that `slot` has absorbed. The inputs of later tokens are in the seat's tail."""
    page_table: Int[Array, "seats pages"] | None = None
    """The pages of each seat's row, 0 after the last; None where batches have them."""
    adapter: Int[Array, " seats"] | None = None
    """Entry of each seat's adapter (see `mamba_jax.adapters`), 0 = none; None for a model without adapters."""
    masks: Masks | None = None
    """Which tokens each seat may choose; None where structured outputs are off."""


def init_rows(
    config: HybridConfig | int,
    *,
    max_num_seqs: int,
    num_speculative_tokens: int = 0,
    source: DraftSource | None = None,
    max_len: int = 0,
    masks: bool = False,
    replay: bool = False,
    pages_per_row: int = 0,
    adapters: bool = False,
) -> Rows:
    """Makes empty seats 0..max_num_seqs. `config` is the model's config or its vocabulary size.

    `source` makes the drafts, for sequences of up to `max_len` tokens; without one, the caller sets drafts.
    `masks` allocates masks of allowed tokens. With `replay`, rows have anchors and the store has tails.
    `pages_per_row`: width of the seats' page tables; 0 if batches have the tables, or there are no pages.
    `adapters`: the programs have adapters, one for each seat.
    """
    vocab_size = config if isinstance(config, int) else config.vocab_size
    seats = max_num_seqs + 1
    return Rows(
        length=jnp.zeros(seats, jnp.int32), last_token=jnp.zeros(seats, jnp.int32), slot=jnp.zeros(seats, jnp.int32),
        drafts=jnp.full((seats, num_speculative_tokens), -1, jnp.int32), sampling=init_sampling_table(seats),
        output_counts=jnp.zeros((seats, vocab_size), jnp.int32), prompt_seen=jnp.zeros((seats, vocab_size), bool),
        source=None if source is None else source.init(seats=seats, max_len=max_len),
        anchor=jnp.zeros(seats, jnp.int32) if replay else None,
        page_table=jnp.zeros((seats, pages_per_row), jnp.int32) if pages_per_row else None,
        adapter=jnp.zeros(seats, jnp.int32) if adapters else None,
        masks=init_masks(seats, 1 + num_speculative_tokens, vocab_size) if masks else None,
    )  # fmt: skip


def rows_shardings(rows: Rows, mesh: Mesh) -> Rows:
    """Where each array of the seats belongs, in their structure: tables of the vocabulary are divided as logits are."""
    whole = replicated(mesh)
    divides = rows.output_counts.shape[1] % mesh.shape[TENSOR] == 0
    tables = NamedSharding(mesh, P(None, TENSOR)) if divides else whole
    return replace(jax.tree.map(lambda _: whole, rows), output_counts=tables, prompt_seen=tables)
