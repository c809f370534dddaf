"""Low-rank adapters of dense layers (Hu et al., "LoRA", 2021), several at once: each token has its own."""

import math

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from kernels_pallas.fixed_order import is_fixed
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear


class LoRA(nnx.Module):
    """The low-rank additions of every loaded adapter to one dense layer.

    `a` is [entries, rank, inputs] and `b` is [*outputs, entries, rank], so that `b` is divided over devices along the
    same axis as the layer's weight. Entry 0 is zero: it belongs to tokens without an adapter. Adapters of a lower rank,
    and those that do not adapt this layer, are padded with zeros. `b` includes the adapter's scale.

    DoRA (Liu et al., 2024, arXiv:2402.09353): `factor` [*outputs, entries] is that of the layer's result with what an
    adapter adds, in float32; 1 where an adapter has no magnitudes.
    """

    def __init__(self, a: Array, b: Array, factor: Array | None = None) -> None:
        self.a, self.b = nnx.Param(a), nnx.Param(b)
        self.factor = None if factor is None else nnx.Param(factor)

    def __call__(self, x: Float[Array, "T inputs"], index: Int[Array, " T"]) -> Float[Array, "T outputs"]:
        """What each token's adapter adds to the layer's result, in float32.

        Args:
            index: the entry of each token's adapter.
        """
        a, b = self.a[...], self.b[...]
        entries, rank, inputs = a.shape
        b = b.reshape(math.prod(b.shape[:-2]), entries, rank)
        if x.shape[0] < entries and not is_fixed():
            # Fewer tokens than adapters: read the entries of these tokens only.
            return _gathered(x, a, b, index)
        # One product with all entries; the mask keeps each token's own. Its cost is that of entries * rank columns. If
        # the rank is a power of two, the place of the entry does not change the bits of C++ products: they add up
        # lanes by halves, and zeros change nothing.
        inner = linear(x, a.reshape(entries * rank, inputs), out_dtype=jnp.float32)
        own = jnp.repeat(jnp.arange(entries), rank) == index[:, None]
        inner = jnp.where(own, inner, 0).astype(x.dtype)
        return linear(inner, b.reshape(-1, entries * rank), out_dtype=jnp.float32)

    def factors(self, index: Int[Array, " T"]) -> Float[Array, "T outputs"] | float:
        """Returns each token's factors of the result; 1 without DoRA."""
        if self.factor is None:
            return 1.0
        factor = self.factor[...]
        return factor.reshape(-1, factor.shape[-1])[:, index].T


class ExpertLoRA(LoRA):
    """The low-rank additions of every loaded adapter to one weight of all routed experts.

    `a` is [experts, entries, rank, inputs] and `b` is [experts, *outputs, entries, rank]; otherwise like `LoRA`.
    """

    def __call__(  # type: ignore[override]
        self, x: Float[Array, "rows inputs"], sizes: Int[Array, " experts"], index: Int[Array, " rows"]
    ) -> Float[Array, "rows outputs"]:
        """What each row's adapter adds to the result of the row's expert.

        Args:
            x: rows sorted by expert, `sizes` of them for each; later rows give 0.
            sizes: the number of rows of each expert.
            index: the entry of each row's adapter.
        """
        a, b = self.a[...], self.b[...]
        experts, entries, rank, inputs = a.shape
        inner = grouped_matmul(x, a.reshape(experts, entries * rank, inputs), sizes)
        own = jnp.repeat(jnp.arange(entries), rank) == index[:, None]
        return grouped_matmul(jnp.where(own, inner, 0), b.reshape(experts, -1, entries * rank), sizes)


def _gathered(x: Array, a: Array, b: Array, index: Int[Array, " T"]) -> Float[Array, "T outputs"]:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    inner = jnp.einsum("ti,tri->tr", x, a[index], precision=precision, preferred_element_type=jnp.float32)
    inner = inner.astype(x.dtype)
    return jnp.einsum("tr,otr->to", inner, b[:, index], precision=precision, preferred_element_type=jnp.float32)
