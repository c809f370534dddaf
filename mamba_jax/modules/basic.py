"""Dense layers and the low-rank adapters of them (Hu et al., "LoRA", 2021), RMS norm and activations."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from typing import cast

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.fixed_order import is_fixed, rounded, row_sum, silu
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear, linear_pair
from kernels_pallas.quantized import Quantized
from mamba_jax.sharding.axis import sum_over_devices

_INIT_SCALE = 0.02


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))  # not a lambda: a module's structure names it, and is stored with programs


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": silu,
    "swish": silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def activation(name: str) -> Callable[[Array], Array]:
    """Returns one of `config.ACTIVATIONS`."""
    return _ACTIVATIONS[name]


Read = Float[Array, "*batch inputs"]
Entries = Int[Array, " batch"] | None
"""The entries of tokens' adapters."""


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
            precision = jax.lax.Precision.HIGHEST if x.dtype == jnp.float32 else jax.lax.Precision.DEFAULT
            product = partial(jnp.einsum, precision=precision, preferred_element_type=jnp.float32)
            return product("tr,otr->to", product("ti,tri->tr", x, a[index]).astype(x.dtype), b[:, index])
        # One product with all entries; the mask keeps each token's own. Its cost is that of entries * rank columns. If
        # the rank is a power of two, the place of the entry does not change the bits of C++ products: they add up
        # lanes by halves, and zeros change nothing.
        inner = linear(x, a.reshape(entries * rank, inputs), out_dtype=jnp.float32)
        own = jnp.repeat(jnp.arange(entries), rank) == index[:, None]
        inner = jnp.where(own, inner, 0).astype(x.dtype)
        return linear(inner, b.reshape(-1, entries * rank), out_dtype=jnp.float32)

    def factors(self, index: Int[Array, " T"]) -> Float[Array, "T outputs"]:
        """Returns each token's factors of the result, with DoRA."""
        assert self.factor is not None
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


class Linear(nnx.Module):
    """y = W x (+ bias), accumulated in float32 and rounded once.

    The weight is [out, in] as in checkpoints. `outputs` may have several axes, which the result then has too; they
    exist so that each can be sharded, and one product computes them all. The weight may be quantized.
    """

    quantizable = ("weight",)
    lora: LoRA | None = None
    """What adapters add to the result; see `mamba_jax.adapters`."""

    def __init__(
        self, inputs: int, outputs: int | tuple[int, ...], *, bias: bool = False, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        shape = (outputs,) if isinstance(outputs, int) else outputs
        self.weight = nnx.Param(normal(rngs, (*shape, inputs), dtype))
        self.bias = nnx.Param(constant(0, shape, dtype)) if bias else None

    def __call__(self, x: Read, adapter: Entries = None, *, out_dtype: DTypeLike | None = None) -> Array:
        """y of each input.

        Args:
            adapter: the entry of each token's adapter (`Layout.adapter`). Ignored by a layer without adapters.
            out_dtype: of the result; x's own if None.
        Raises:
            ValueError: the layer has adapters and `adapter` is None.
        """
        weight = self.weight[...]
        outputs = weight.shape[:-1]
        flat = weight.matrix() if isinstance(weight, Quantized) else weight.reshape(math.prod(outputs), -1)
        if self.bias is None and self.lora is None:
            y = linear(x, flat, out_dtype=out_dtype)
        else:
            y = linear(x, flat, out_dtype=jnp.float32)
            if self.lora is None:
                y = self._add_bias(y)
            elif adapter is None:
                raise ValueError("a layer with adapters was called without the tokens' adapters")
            elif self.lora.factor is None:
                y = self._add_bias(y) + self.lora(x, adapter)
            else:  # factors scale all but the bias
                y = self._add_bias(rounded((y + self.lora(x, adapter)) * self.lora.factors(adapter)))
            y = y.astype(out_dtype or x.dtype)
        return y.reshape(*x.shape[:-1], *outputs)

    def _add_bias(self, y: Array) -> Array:
        return y if self.bias is None else y + self.bias[...].reshape(-1).astype(jnp.float32)

    @property
    def is_product(self) -> bool:
        """Whether the layer only multiplies by a matrix that is not quantized."""
        weight = self.weight[...]
        return self.bias is None and self.lora is None and not isinstance(weight, Quantized) and weight.ndim == 2


class LowRank(nnx.Module):
    """A product of two matrices, with few channels between them."""

    def __init__(
        self, inputs: int, rank: int, outputs: int | tuple[int, ...], *, rngs: nnx.Rngs, dtype: DTypeLike
    ) -> None:
        self.down = Linear(inputs, rank, rngs=rngs, dtype=dtype)
        self.up = Linear(rank, outputs, rngs=rngs, dtype=dtype)

    def __call__(self, x: Read, adapter: Entries = None, *, out_dtype: DTypeLike | None = None) -> Array:
        """As `Linear`."""
        return self.up(self.down(x, adapter), adapter, out_dtype=out_dtype)


def both(
    first: Callable[..., Array],
    second: Callable[..., Array],
    x: Read,
    adapter: Entries = None,
    *,
    out_dtype: DTypeLike | None = None,
) -> tuple[Array, Array]:
    """Calls two layers, as `Linear` is called; their products may run as one."""
    if isinstance(first, Linear) and isinstance(second, Linear) and first.is_product and second.is_product:
        weights = first.weight[...], second.weight[...]
        if weights[0].shape == weights[1].shape:
            return linear_pair(x, *weights, out_dtype=out_dtype)
    return first(x, adapter, out_dtype=out_dtype), second(x, adapter, out_dtype=out_dtype)


class Weight(nnx.Module):
    """A weight alone."""

    def __init__(self, value: Array) -> None:
        self.weight = nnx.Param(value)


class Table(Weight):
    """A vector for each token of the vocabulary [vocab, hidden], as an embedding or a head. It may be quantized."""

    quantizable = ("weight",)

    def rows(self, index: Int[Array, " T"], dtype: DTypeLike) -> Float[Array, "T hidden"]:
        """Returns the vectors of some tokens; those out of range are clipped."""
        table = self.weight[...]
        if isinstance(table, Quantized):
            return rounded(table.take(index).dequantize(dtype))
        return jnp.take(table, index, axis=0, mode="clip").astype(dtype)

    def scores(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """Returns the product of hidden states with every token's vector, in float32."""
        return linear(x, self.weight[...], out_dtype=jnp.float32)


class OwnTables(nnx.Module):
    """Tables of adapters that replace the model's: its embedding or its head."""

    def __init__(self, has: Bool[Array, " entries"], tables: Sequence[Float[Array, "vocab hidden"]]) -> None:
        """`has`: which adapters have a table; entry 0 is no adapter. `tables`: of the entries from 1 on."""
        self.has, self.tables = nnx.Param(has), nnx.List([Table(table) for table in tables])

    def replace(self, result: Array, entry: Int[Array, "*batch"] | None, of: Callable[[Table], Array]) -> Array:
        """Returns `result` [*batch, width], but `of(table)` where the entry of the adapter has a table.

        A table that no row uses is not read. The other rows stay as they are.

        Raises:
            ValueError: `entry` is None.
        """
        if entry is None:
            raise ValueError("an embedding or head with adapters was called without the tokens' adapters")
        for index, table in enumerate(self.tables, 1):
            own = (entry == index) & self.has[index]
            result = jax.lax.cond(
                own.any(),
                lambda before, own=own, table=table: jnp.where(own[..., None], of(table), before),
                lambda before: before,
                result,
            )
        return result


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32; the result has the weight's dtype.

    With `unit_offset` the factor is 1 + weight.
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(constant(0 if unit_offset else 1, (size,), dtype))
        self.eps, self.unit_offset = eps, unit_offset

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        return self.of_part(x, x.shape[-1])

    def of_part(self, x: Float[Array, "*batch channels"], size: int) -> Float[Array, "*batch channels"]:
        """The norm over `size` channels, which may be divided over devices: the devices add up their squares."""
        weight, x = self.weight[...], x.astype(jnp.float32)
        total = row_sum(jnp.square(x))
        mean = rounded((total if x.shape[-1] == size else sum_over_devices(total)) / size)
        x = x * jax.lax.rsqrt(mean + self.eps)
        product = x * weight.astype(jnp.float32)
        # Not x * (1 + weight): XLA for GPU adds 1 in a kernel of its own if several kernels need the result.
        return (rounded(product) + x if self.unit_offset else product).astype(weight.dtype)


_SHAPES_ONLY: ContextVar[bool] = ContextVar("shapes_only", default=False)


@contextlib.contextmanager
def shapes_only() -> Iterator[None]:
    """Makes `initial`, and what calls it, return shapes and dtypes in place of values."""
    token = _SHAPES_ONLY.set(True)
    try:
        yield
    finally:
        _SHAPES_ONLY.reset(token)


def initial(shape: tuple[int, ...], dtype: DTypeLike, values: Callable[[], Array]) -> Array:
    """Returns the initial values of a parameter; in `shapes_only`, a `jax.ShapeDtypeStruct`."""
    return cast(Array, jax.ShapeDtypeStruct(shape, dtype)) if _SHAPES_ONLY.get() else values().astype(dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Returns the initial values of a weight, as `initial` does."""
    return initial(shape, dtype, lambda: _INIT_SCALE * jax.random.normal(rngs.params(), shape, jnp.float32))


def constant(value: float, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Returns the same initial value for each element, as `initial` does."""
    return initial(shape, dtype, lambda: jnp.full(shape, value, dtype))


def scaled_by(x: Array, factor: Array) -> Array:
    """x * factor, computed in float32 and rounded once to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def scaled(x: Array, factor: float) -> Array:
    """Returns x * factor, without a product for a factor of 1."""
    return x if factor == 1.0 else rounded(x * factor)
