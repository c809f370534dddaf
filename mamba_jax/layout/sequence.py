"""Whole sequences from their first token, without a store: training, scoring, and `model(tokens, lengths)`.

Documents may also be packed one after the other, independent of each other.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.paged_attention import attention_sequence
from mamba_jax.layout.base import Inputs, Keys, Operation, Parameters, Queries, Span


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceLayout:
    """T = batch * length tokens; each sequence is followed by its padding. Differentiable; every `state` is None.

    Padding comes last and all operations are causal, so no token of a sequence depends on padding.
    """

    positions: Int[Array, " T"]
    """Absolute; -1 = padding."""
    valid: Bool[Array, " T"]
    batch: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})
    adapter: Int[Array, " T"] | None = field(default=None, kw_only=True)
    """Entry of each token's adapter, 0 = none; None for a model without adapters."""
    initial_states: dict[int, dict[str, Array]] | None = field(default=None, kw_only=True)
    """The state before each sequence, of one sequence: by the index of the block, arrays by the names that the block's
    sublayers declare. Missing arrays are zeros."""
    block: int = field(default=0, kw_only=True, metadata={"static": True})
    """Index of the block that runs."""

    @classmethod
    def of(cls, batch: int, length: int, lengths: Int[Array, " batch"] | None = None) -> SequenceLayout:
        """Returns the layout. `lengths` is the number of tokens of each sequence; None: all."""
        position = jnp.broadcast_to(jnp.arange(length), (batch, length))
        valid = jnp.ones((batch, length), bool) if lengths is None else position < lengths[:, None]
        return cls(
            positions=jnp.where(valid, position, -1).reshape(-1), valid=valid.reshape(-1), batch=batch, length=length
        )

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: None) -> tuple[Array, None]:
        return operation.sequences(self, inputs, parameters), None

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: None, span: Span) -> tuple[Queries, None]:
        # Causal attention from the first key on; queries before it see no key and give 0.
        seen = [self.by_sequence(one)[:, span.first_key :] for one in (q, k, k if v is None else v)]
        out = attention_sequence(*seen, scale=span.scale, window=span.window)
        return self.by_token(jnp.pad(out, ((0, 0), (span.first_key, 0), (0, 0), (0, 0)))), None

    def of_block(self, index: int) -> Self:
        """Returns the layout for one block of the model."""
        return dataclasses.replace(self, block=index) if self.initial_states else self

    def initial_state(self, name: str) -> Float[Array, "batch ..."] | None:
        """Returns an array of the block's state before each sequence; None: zeros."""
        state = (self.initial_states or {}).get(self.block, {}).get(name)
        return None if state is None else jnp.broadcast_to(state, (self.batch, *state.shape))

    def by_sequence(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "batch length ..."]:
        """Arranges packed tokens by sequences; padding is unchanged."""
        return x.reshape(self.batch, self.length, *x.shape[1:])

    def by_token(self, sequences: Shaped[Array, "batch length ..."]) -> Shaped[Array, "T ..."]:
        """Converts sequences back to packed tokens."""
        return sequences.reshape(-1, *sequences.shape[2:])


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
