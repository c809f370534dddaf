"""Whole sequences from their first token, without a store: training, scoring, and `model(tokens, lengths)`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels_pallas.paged_attention import attention_sequence
from mamba_jax.layout.operation import Operation


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SequenceLayout:
    """T = batch * length tokens; each sequence is followed by its padding. Differentiable; every `state` is None.

    Padding comes last and everything here is causal, so that no token of a sequence ever sees any.
    """

    positions: Int[Array, " T"]
    """Absolute; -1 = padding."""
    valid: Bool[Array, " T"]
    batch: int = field(metadata={"static": True})
    length: int = field(metadata={"static": True})

    @classmethod
    def of(cls, batch: int, length: int, lengths: Int[Array, " batch"] | None = None) -> SequenceLayout:
        """`lengths` says how many tokens of each sequence count; all of them if None."""
        position = jnp.broadcast_to(jnp.arange(length), (batch, length))
        valid = jnp.ones((batch, length), bool) if lengths is None else position < lengths[:, None]
        return cls(
            positions=jnp.where(valid, position, -1).reshape(-1), valid=valid.reshape(-1), batch=batch, length=length
        )

    def run(
        self, operation: Operation, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: None
    ) -> tuple[Array, None]:
        return operation.sequences(self, inputs, parameters), None

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"] | None,
        kv: None,
        *,
        scale: float,
        first_key: int = 0,
    ) -> tuple[Float[Array, "T heads head_dim"], None]:
        # Causal attention from the first key on; the queries before it see nothing and give 0.
        seen = [self.by_sequence(one)[:, first_key:] for one in (q, k, k if v is None else v)]
        out = attention_sequence(*seen, scale=scale)
        return self.by_token(jnp.pad(out, ((0, 0), (first_key, 0), (0, 0), (0, 0)))), None

    def by_sequence(self, x: Shaped[Array, "T ..."]) -> Shaped[Array, "batch length ..."]:
        """Packed tokens by sequences; padding is left as it is."""
        return x.reshape(self.batch, self.length, *x.shape[1:])

    def by_token(self, sequences: Shaped[Array, "batch length ..."]) -> Shaped[Array, "T ..."]:
        """Back from sequences to packed tokens."""
        return sequences.reshape(-1, *sequences.shape[2:])
