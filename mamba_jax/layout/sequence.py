"""Whole sequences from their first token, without a store: training, scoring, and `model(tokens, lengths)`."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.causal_conv1d import causal_conv1d_sequence
from kernels_pallas.paged_attention import attention_sequence
from kernels_pallas.ssd_scan import ssd_scan_sequence


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

    def conv(
        self,
        x: Float[Array, "T channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        state: None,
    ) -> tuple[Float[Array, "T channels"], None]:
        return causal_conv1d_sequence(self._by_sequence(x), weight, bias).reshape(x.shape), None

    def scan(
        self,
        x: Float[Array, "T heads head_dim"],
        dt: Float[Array, "T heads"],
        a: Float[Array, " heads"],
        b: Float[Array, "T groups state"],
        c: Float[Array, "T groups state"],
        d: Float[Array, " heads"],
        state: None,
    ) -> tuple[Float[Array, "T heads head_dim"], None]:
        x, dt, b, c = (self._by_sequence(v) for v in (x, dt, b, c))
        y, _ = ssd_scan_sequence(x, dt, a, b, c, d)
        return y.reshape(-1, *y.shape[2:]), None

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"],
        kv: None,
        *,
        scale: float,
        first_key: int = 0,
    ) -> tuple[Float[Array, "T heads head_dim"], None]:
        # Causal attention from the first key on; the queries before it see nothing and give 0.
        seen = [self._by_sequence(v)[:, first_key:] for v in (q, k, v)]
        out = attention_sequence(*seen, scale=scale)
        return jnp.pad(out, ((0, 0), (first_key, 0), (0, 0), (0, 0))).reshape(q.shape), None

    def _by_sequence(self, x: Array) -> Array:
        return x.reshape(self.batch, self.length, *x.shape[1:])
