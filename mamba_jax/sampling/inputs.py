"""The options of a step's rows, what they change in logits, and the counts of emitted tokens for penalties."""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, Shaped

from mamba_jax.sampling.logits import add_bias, has_bias, has_penalties, once_if, penalize, truncate, weights_of
from mamba_jax.sampling.masks import Masks, apply_masks
from mamba_jax.sampling.table import SamplingTable
from mamba_jax.sharding.axis import TENSOR, axis_index, axis_mesh, keep_whole


@dataclass(frozen=True)
class SamplingInputs:
    """The options of a step's rows for their logits. `SamplingInputs.of` makes them."""

    drafts: Int[Array, "rows drafts"]
    """-1 where there is none: always rejected."""
    length: Int[Array, " rows"]
    """Tokens (prompt and output) before each row's first draft; determines the positions of the draws."""
    sample: Bool[Array, " rows"]
    """Rows that emit; others accept and emit nothing."""
    row_id: Int[Array, " rows"]
    """The rows' seats in the tables."""
    table: SamplingTable
    output_counts: Int[Array, "seats vocab"]
    prompt_seen: Bool[Array, "seats vocab"]
    masks: Masks | None
    """Tokens that rows may choose at each head; a draft that is not allowed is never chosen, and so rejected."""
    masked: Bool[Array, " rows"]
    biased: Bool[Array, " rows"]
    penalized: Bool[Array, " rows"]
    random: Bool[Array, " rows"]
    any_penalized: Bool[Array, ""]
    """Whether any row of the step is penalized, on whichever device it is sampled."""
    all_seats: Int[Array, " n"] | None = None
    """The seats of all devices' rows, where each device samples its share; None: every device samples all rows."""
    supports: Bool[Array, " rows"] | None = None
    """Which rows report the tokens that theirs are drawn from; None: no program does."""

    @classmethod
    def of(
        cls,
        drafts: Int[Array, "rows drafts"],
        num_drafts: Int[Array, " rows"],
        length: Int[Array, " rows"],
        sample: Bool[Array, " rows"],
        row_id: Int[Array, " rows"],
        table: SamplingTable,
        output_counts: Int[Array, "seats vocab"],
        prompt_seen: Bool[Array, "seats vocab"],
        masks: Masks | None = None,
    ) -> SamplingInputs:
        """Returns the inputs of rows with `num_drafts` valid drafts each.

        Reads only narrow columns; wide ones (stop ids, biases, counts) are read only if rows need them.
        """
        biased, penalized, random = (
            sample & column[row_id] for column in (has_bias(table), has_penalties(table), table.temperature > 0)
        )
        return cls(
            drafts=jnp.where(jnp.arange(drafts.shape[1]) < num_drafts[:, None], drafts, -1), length=length,
            sample=sample, row_id=row_id, table=table, output_counts=output_counts, prompt_seen=prompt_seen,
            masks=masks, masked=jnp.zeros_like(sample) if masks is None else sample & masks.on[row_id], biased=biased,
            penalized=penalized, random=random, any_penalized=penalized.any(),
        )  # fmt: skip

    def on_this_device(self) -> SamplingInputs:
        """Returns the inputs for this device's share of the rows. Tables of the vocabulary stay divided."""
        count = self.row_id.shape[0] // lax.axis_size(TENSOR)

        def own(values: Array) -> Array:
            return lax.dynamic_slice_in_dim(values, axis_index() * count, count)

        divided = ("drafts", "length", "sample", "row_id", "masked", "biased", "penalized", "random", "supports")
        return replace(
            self, all_seats=self.row_id, **{name: jax.tree.map(own, getattr(self, name)) for name in divided}
        )

    def rows_of(self, table: Shaped[Array, "seats part"]) -> Shaped[Array, "rows vocab"]:
        """Returns the rows' entries of a table. If devices divide the rows, each has a part of the table's columns."""
        return keep_whole(table[self.row_id]) if self.all_seats is None else own_rows(table[self.all_seats])

    @property
    def own(self) -> SamplingTable:
        """The rows' entries."""
        return self.table.take(self.row_id)

    @property
    def index(self) -> Int[Array, "rows H"]:
        """The index of each head's token in its row's output."""
        prompt_length = self.table.prompt_length[self.row_id]
        return self.length[:, None] + jnp.arange(self.drafts.shape[1] + 1) - prompt_length[:, None]

    @property
    def adjusts(self) -> Bool[Array, ""]:
        """Whether `adjusted` changes any logits."""
        return self.masked.any() | self.biased.any() | self.any_penalized

    def adjusted(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "*n vocab"]:
        """Returns logits after masks, biases and penalties. Greedy rows choose the largest."""
        own, masks, row_id, logits = self.own, self.masks, self.row_id, self._by_rows(flat)
        if masks is not None:
            logits = once_if(self.masked.any(), lambda x: apply_masks(x, masks, row_id), logits)
        logits = once_if(self.biased.any(), lambda x: add_bias(x, own, self.index), logits)
        logits = once_if(
            self.any_penalized,
            lambda x: penalize(x, own, self.rows_of(self.output_counts), self.rows_of(self.prompt_seen), self.drafts),
            logits,
        )
        return logits.reshape(flat.shape)

    def processed(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "*n vocab"]:
        """Returns logits whose softmax is drawn from: adjusted, tempered and truncated; for greedy rows, adjusted."""
        own, logits = self.own, self._by_rows(self.adjusted(flat))
        weights = truncate(weights_of(logits, own.temperature), own)
        return jnp.where(self.random[:, None, None], jnp.log(weights), logits).reshape(flat.shape)

    def _by_rows(self, flat: Float[Array, "*n vocab"]) -> Float[Array, "rows H vocab"]:
        return flat.reshape(*self.index.shape, -1)


def own_rows(part: Shaped[Array, "rows part"]) -> Shaped[Array, "own vocab"]:
    """Exchanges a part of the vocabulary for all rows for the whole vocabulary of this device's rows."""
    return lax.all_to_all(part, TENSOR, split_axis=0, concat_axis=1, tiled=True)


def count_tokens(
    counts: Int[Array, "seats vocab"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
) -> Int[Array, "seats vocab"]:
    """One more of each token at its seat; past the last seat nothing is counted.

    On several devices each counts the tokens of its part of the vocabulary, where that divides evenly.
    """
    mesh = axis_mesh()
    if mesh is None or counts.shape[1] % mesh.shape[TENSOR]:
        return counts.at[seat, tokens].add(1, mode="drop")

    def on_each_device(
        part: Int[Array, "seats part"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
    ) -> Int[Array, "seats part"]:
        place = tokens - axis_index() * part.shape[1]
        mine = (place >= 0) & (place < part.shape[1])
        return part.at[jnp.where(mine, seat, part.shape[0]), place].add(1, mode="drop")

    own = P(None, TENSOR)
    divided = jax.shard_map(on_each_device, mesh=mesh, in_specs=(own, P(), P()), out_specs=own, check_vma=False)
    return divided(counts, seat, tokens)
