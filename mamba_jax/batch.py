"""The host's input to one step, and the step's output: small integer arrays padded to a few static shapes.

A step takes the arrays of its batch as one array of 32-bit words, so that the host sends one array and not a dozen.

The host fills numpy arrays (made by `DecodeBatch.empty` and the other `empty` methods); the device computes everything
that follows from row lengths. A padding row is all zeros: seat 0, no tokens, null slot.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Int32, UInt8

from mamba_jax.sampling.table import SamplingTable


@dataclass(frozen=True)
class StepRows:
    """What the decode rows and the prefill rows of a step have in common."""

    row_id: Int[Array, " rows"]
    length: Int[Array, " rows"]
    """Tokens committed before the step."""
    num_tokens: Int[Array, " rows"]
    """Tokens fed, drafts included. A decode row with 0 samples from the hidden state in its slot and feeds nothing."""
    read_slot: Int[Array, " rows"]
    """The slot of S(length), or of a decode row's anchor."""
    page_table: Int[Array, "rows pages"] | None
    """None: the seats' own tables are used."""
    page_updates: Int[Array, "updates 3"] | None
    """Changes of the seats' page tables, made before the step, as (seat, index, page); (0, 0, 0) = none. None where the
    batch has tables."""
    page_copy: Int[Array, "rows 2"]
    """A page to copy before anything is written, as (source, target); (0, 0) = none."""
    sample: Bool[Array, " rows"]
    """Whether the row emits tokens: a prefill row one, after its last."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodeBatch(StepRows):
    """One decode step: D rows of at most 1 + K tokens each, K = `tokens.shape[1] - 1`."""

    continues: Bool[Array, " rows"]
    """The row continues from the seat's own length, slot, last token and drafts; the host's values are ignored."""
    tokens: Int[Array, "rows steps"]
    """Certain tokens, then drafts (-1: a draft that is always rejected)."""
    num_drafts: Int[Array, " rows"]
    write_slot: Int[Array, "rows writes"]
    """The slot for the state after each token, one per step; 0 = dropped. Under replay there is one slot, for the state
    at the next multiple of the interval."""
    anchor: Int[Array, " rows"] | None = None
    """Under replay: how many tokens the state in `read_slot` has absorbed."""

    @classmethod
    def empty(
        cls,
        *,
        rows: int,
        num_speculative_tokens: int,
        pages_per_row: int = 0,
        page_updates: int | None = None,
        replay: bool = False,
    ) -> Self:
        """Returns a batch of padding, as numpy arrays to be filled in place.

        Args:
            rows: D.
            num_speculative_tokens: K.
            pages_per_row: width of the batch's page tables.
            page_updates: the most pages that may change in the seats' page tables; the batch has no tables then.
            replay: whether the store has tails.
        Raises:
            ValueError: no rows.
        """
        batch: Self = _decode_packing(rows, 1 + num_speculative_tokens, pages_per_row, page_updates, replay).empty()
        return batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PrefillBatch(StepRows):
    """One prefill step: R rows of any lengths, their T tokens packed one row after the other.

    A row's tokens [length, length + num_tokens) are divided into tiles at absolute multiples of `tile_size`.
    `tile_write_slot` has one entry for each tile of all rows, in row order.
    """

    tokens: Int[Array, " tokens"]
    tile_write_slot: Int[Array, " tiles"]
    """The slot for the state after each tile; 0 = dropped."""
    tile_size: int = field(metadata={"static": True})
    most_writes: int = field(metadata={"static": True})
    """The most entries of `tile_write_slot` that are not 0. Members exchange as many states."""

    @classmethod
    def empty(
        cls,
        *,
        tokens: int,
        rows: int,
        tiles: int,
        tile_size: int,
        pages_per_row: int = 0,
        page_updates: int | None = None,
        most_writes: int | None = None,
    ) -> Self:
        """Returns a batch of padding, as numpy arrays to be filled in place; pages are as of `DecodeBatch.empty`.

        `most_writes`: None, or more than the tiles: one for each tile.

        Raises:
            ValueError: no rows, tokens or tiles.
        """
        writes = tiles if most_writes is None else min(most_writes, tiles)
        batch: Self = _prefill_packing(tokens, rows, tiles, pages_per_row, page_updates, tile_size, writes).empty()
        return batch


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedBatch:
    """One step with decode rows and prefill rows: no row is in both."""

    decode: DecodeBatch
    prefill: PrefillBatch


@functools.cache
def _decode_packing(rows: int, steps: int, pages_per_row: int, page_updates: int | None, replay: bool) -> Packing:
    batch = DecodeBatch(
        **_step_rows(rows, pages_per_row, page_updates, steps), continues=_array(rows, dtype=bool),
        tokens=_array(rows, steps), num_drafts=_array(rows), write_slot=_array(rows, 1 if replay else steps),
        anchor=_array(rows) if replay else None,
    )  # fmt: skip
    return Packing.of(batch)


@functools.cache
def _prefill_packing(
    tokens: int, rows: int, tiles: int, pages_per_row: int, page_updates: int | None, tile_size: int, writes: int
) -> Packing:
    batch = PrefillBatch(
        **_step_rows(rows, pages_per_row, page_updates, tokens, tiles, tile_size),
        tokens=_array(tokens),
        tile_write_slot=_array(tiles),
        tile_size=tile_size,
        most_writes=writes,
    )
    return Packing.of(batch)


def _step_rows(rows: int, pages_per_row: int, page_updates: int | None, *others: int) -> dict[str, Any]:
    if min(rows, *others) < 1:
        raise ValueError(f"a batch of sizes {(rows, *others)}: at least 1 of each is expected")
    return {
        **dict.fromkeys(("row_id", "length", "num_tokens", "read_slot"), _array(rows)),
        "page_table": _array(rows, pages_per_row) if page_updates is None else None,
        "page_updates": None if page_updates is None else _array(page_updates, 3),
        "page_copy": _array(rows, 2),
        "sample": _array(rows, dtype=bool),
    }


def _array(*shape: int, dtype: Any = np.int32) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype)


def num_tiles(length: int, num_tokens: int, tile_size: int) -> int:
    """Returns how many tiles the tokens [length, length + num_tokens) of a row are cut into."""
    return -(-(length + num_tokens) // tile_size) - length // tile_size if num_tokens else 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SeatBatch:
    """Assigns a request to a seat: its sampling parameters and, for one with penalties, its token counts."""

    row_id: Int[Array, ""]
    sampling: SamplingTable
    """Sampling parameters of one row; see `sampling_row`."""
    output_counts: Int[Array, " vocab"] | None = None
    """How often each token was emitted so far; required (zeros at first) where the row has any penalty."""
    prompt_seen: Bool[Array, " vocab"] | None = None
    """Which tokens the prompt has; given together with `output_counts`."""
    tokens: Int[Array, " max_len"] | None = None
    """Prompt and output so far, then -1; for draft sources that look at tokens."""
    adapter: Int[Array, ""] | None = None
    """Entry of the request's adapter, 0 = none; given where the rows have adapters."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PageTableBatch:
    """The whole page table of one seat."""

    row_id: Int[Array, ""]
    pages: Int[Array, " pages"]
    """0 after the row's last one."""

    @classmethod
    def empty(cls, *, pages_per_row: int) -> Self:
        """Returns a batch for the seat of padding, as numpy arrays to be filled in place."""
        seat: Any = np.int32(0)
        pages: Any = np.zeros(pages_per_row, np.int32)
        return cls(row_id=seat, pages=pages)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prefill step's own tokens, each given the tokens before it.

    A sequence's first token has none: its entry is undefined.
    """

    token: Float[Array, " tokens"]
    top_ids: Int[Array, "tokens top"]
    top: Float[Array, "tokens top"]
    of_ids: Float[Array, "tokens ids"]
    """Of the row's `SamplingTable.prompt_logprob_ids`; undefined for -1."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class StepOutput:
    """The output of a step; H = 1 + K for decode and 1 for prefill."""

    tokens: Int[Array, "rows H"]
    """Accepted drafts, then the newly sampled token; -1 = none."""
    num_emitted: Int[Array, " rows"]
    kept: Int[Array, " rows"]
    """Number of fed tokens that stay; the row's length has grown by it."""
    logprobs: Float[Array, "rows H"]
    """Of the emitted tokens, under the model's own distribution (before penalties and temperature). Only rows that
    ask for log-probabilities have them; the same holds for the alternatives."""
    top_ids: Int[Array, "rows H top"]
    top_logprobs: Float[Array, "rows H top"]
    tag_error: Bool[Array, ""]
    """With `debug_state`: some row read a slot that does not hold what it should, or that another row writes; or a slot
    was written twice. Otherwise False."""
    finite: Bool[Array, " rows"]
    """Whether all logits that determine the row's tokens are finite; otherwise its tokens are undefined."""
    prompt_logprobs: PromptLogprobs | None
    """Of a prefill step; only rows that ask have them."""
    sampling_mask: UInt8[Array, "rows H bytes"] | None = None
    """The tokens that each emitted token could have been: bit i % 8 of byte i // 8 is token i. Only rows that ask have
    them; None unless the step reports them."""
    num_drafts: Int[Array, " rows"] | None = None
    """Drafts that a decode step with K > 0 verified. May be fewer than planned: a source may have made none."""
    proposed: Int[Array, "rows drafts"] | None = None
    """Drafts that each row's next step verifies; -1 = none. Only if rows may have masks: the host computes masks along
    the drafts."""


_WORD = 4


@dataclass(frozen=True)
class Packing:
    """Where the arrays of a batch are in the words: each begins at a whole word, in the order of the tree's leaves."""

    structure: Any
    leaves: tuple[tuple[tuple[int, ...], np.dtype, int, int], ...]
    """Shape, dtype (int32 or bool), first word and the word after the last."""

    @classmethod
    def of(cls, batch: Any) -> Packing:
        """`batch` is a tree of arrays, or of anything that has a shape and a dtype."""
        found, structure = jax.tree.flatten(batch)
        leaves, at = [], 0
        for leaf in found:
            shape, dtype = tuple(np.shape(leaf)), np.dtype(leaf.dtype)
            end = at + -(-math.prod(shape) * dtype.itemsize // _WORD)
            leaves.append((shape, dtype, at, end))
            at = end
        return cls(structure, tuple(leaves))

    @property
    def size(self) -> int:
        """Words."""
        return self.leaves[-1][3] if self.leaves else 0

    def empty(self) -> Any:
        """Returns a batch of zeros whose arrays are views of one new array, so that `pack` copies nothing."""
        words = np.zeros(self.size, np.int32)
        arrays = [
            words[start:end].view(dtype)[: math.prod(shape)].reshape(shape) for shape, dtype, start, end in self.leaves
        ]
        return jax.tree.unflatten(self.structure, arrays)

    def unpack(self, words: Int32[Array, " words"]) -> Any:
        """Returns the batch, within a compiled program."""
        arrays = []
        for shape, dtype, start, end in self.leaves:
            part = words[start:end]
            if dtype == np.bool_:
                part = jax.lax.bitcast_convert_type(part, jnp.uint8).reshape(-1)[: math.prod(shape)] != 0
            arrays.append(part.reshape(shape))
        return jax.tree.unflatten(self.structure, arrays)


def pack(batch: Any) -> np.ndarray:
    """Returns the words of a batch on the host; not copied if `Packing.empty` made it."""
    leaves = jax.tree.leaves(batch)
    words = leaves[0].base
    if words is not None and all(leaf.base is words for leaf in leaves):
        return words
    packing = Packing.of(batch)
    words = np.zeros(packing.size, np.int32)
    for leaf, (shape, dtype, start, end) in zip(leaves, packing.leaves, strict=True):
        words[start:end].view(dtype)[: math.prod(shape)] = np.asarray(leaf).reshape(-1)
    return words
