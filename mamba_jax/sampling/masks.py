"""Which tokens a row may choose: one bit a token, for each head, kept at the row's seat.

The host writes a row's masks before each of its steps; rows without masks cost nothing. Masks come before everything
else that changes logits, so a token that is not allowed has probability 0 under any sampling parameters.
"""

from dataclasses import dataclass
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt8, UInt32

_WORD = 32

_zeros: Any = np.zeros


def mask_words(vocab_size: int) -> int:
    """Words that the mask of one head takes."""
    return -(-vocab_size // _WORD)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Masks:
    """The masks of all seats."""

    bits: UInt32[Array, "seats H words"]
    """Bit i % 32 of word i // 32 is set if token i is allowed at this head."""
    on: Bool[Array, " seats"]
    """Whether the seat's tenant has masks at all; the bits of others say nothing."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MaskBatch:
    """Masks of some seats for their next step; padding has seat 0."""

    row_id: Int[Array, " n"]
    bits: UInt32[Array, "n H words"]

    @classmethod
    def empty(cls, *, rows: int, heads: int, vocab_size: int) -> Self:
        """Returns a batch of padding, as numpy arrays to be filled in place."""
        return cls(row_id=_zeros(rows, np.int32), bits=_zeros((rows, heads, mask_words(vocab_size)), np.uint32))


def pack_bits(tokens: Bool[Array, "*rows vocab"]) -> UInt8[Array, "*rows bytes"]:
    """Packs a set of tokens: bit i % 8 of byte i // 8 is set if token i is in it."""
    return jnp.packbits(tokens, axis=-1, bitorder="little")


def bit_of(token: Int[Array, "*rows"], vocab_size: int) -> UInt8[Array, "*rows bytes"]:
    """Returns the set of one token, packed as by `pack_bits`."""
    places = jnp.arange(-(-vocab_size // 8))
    bit = jnp.left_shift(jnp.uint8(1), (token % 8).astype(jnp.uint8))[..., None]
    return jnp.where(places == token[..., None] // 8, bit, jnp.uint8(0))


def init_masks(seats: int, heads: int, vocab_size: int) -> Masks:
    """No seat has masks."""
    return Masks(bits=jnp.zeros((seats, heads, mask_words(vocab_size)), jnp.uint32), on=jnp.zeros(seats, bool))


def write_masks(masks: Masks, batch: MaskBatch) -> Masks:
    """`batch` to its seats. Padding changes nothing."""
    at = jnp.where(batch.row_id > 0, batch.row_id, masks.on.shape[0])
    return Masks(bits=masks.bits.at[at].set(batch.bits, mode="drop"), on=masks.on.at[at].set(True, mode="drop"))


def apply_masks(
    logits: Float[Array, "rows H vocab"], masks: Masks, row_id: Int[Array, " rows"]
) -> Float[Array, "rows H vocab"]:
    """Sets the logits of tokens that a row may not choose to -inf. Rows without masks keep theirs bit by bit."""
    rows, heads, vocab_size = logits.shape
    words = masks.bits[row_id, :heads]
    bits = (words[..., None] >> jnp.arange(_WORD, dtype=jnp.uint32)) & 1
    allowed = bits.reshape(rows, heads, -1)[..., :vocab_size] == 1
    return jnp.where(allowed | ~masks.on[row_id][:, None, None], logits, -jnp.inf)
