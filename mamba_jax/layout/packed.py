"""Documents packed one after the other, independent of each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from mamba_jax.layout.sequence import SequenceLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedLayout(SequenceLayout):
    """T packed tokens of documents. Differentiable; every `state` is None.

    Recurrences, convolutions and attention run over each document as a sequence of its own, padded to `length`;
    everything else runs over the packed tokens only.
    """

    place: Int[Array, " T"]
    """Index of each token in the flattened sequences; past their end for padding."""
    token: Int[Array, "batch length"]
    """Index of the packed token at each place; T for none."""

    @classmethod
    def of_documents(cls, starts: Bool[Array, " T"], *, documents: int, longest: int) -> Self:
        """Returns the layout of packed documents.

        Args:
            starts: True for the first token of each document. Tokens before the first document are padding.
            documents: maximum number of documents.
            longest: maximum number of tokens in a document. Results for tokens beyond either maximum are NaN.
        """
        index = jnp.arange(starts.shape[0])
        document = jnp.cumsum(starts) - 1
        position = index - jax.lax.cummax(jnp.where(starts, index, 0))
        valid = (document >= 0) & (document < documents) & (position < longest)
        place = jnp.where(valid, document * longest + position, documents * longest)
        token = jnp.full(documents * longest, starts.shape[0]).at[place].set(index, mode="drop")
        return cls(
            positions=jnp.where(valid, position, -1),
            valid=valid,
            batch=documents,
            length=longest,
            place=place,
            token=token.reshape(documents, longest),
        )

    def by_sequence(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "batch length ..."]:
        """Packed tokens by documents. Padding is zeros."""
        return x.at[self.token].get(mode="fill", fill_value=0)

    def by_token(self, sequences: Shaped[Array, "batch length ..."]) -> Shaped[Array, "T ..."]:
        """Back from documents to packed tokens."""
        flat = sequences.reshape(-1, *sequences.shape[2:])
        return flat.at[self.place].get(mode="fill", fill_value=jnp.nan)
