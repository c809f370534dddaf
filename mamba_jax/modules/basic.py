"""Dense layers, RMS norm and activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.linear import linear
from kernels_pallas.quantised import Quantised

_INIT_SCALE = 0.02


def _relu2(x: Array) -> Array:
    return jnp.square(jax.nn.relu(x))


def _gelu_exact(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "swish": jax.nn.silu,
    "gelu": _gelu_exact,
    "gelu_new": jax.nn.gelu,
    "gelu_pytorch_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu2": _relu2,
}


def activation(name: str) -> Callable[[Array], Array]:
    """One of `config.ACTIVATIONS`."""
    return _ACTIVATIONS[name]


class Linear(nnx.Module):
    """y = W x (+ bias), accumulated in float32 and rounded once.

    The weight is [out, in] as in checkpoints. `outputs` may have several axes, which the result then has too; they
    exist so that each can be sharded, and one product computes them all. The weight may be quantised.
    """

    quantisable = ("weight",)

    def __init__(
        self,
        inputs: int,
        outputs: int | tuple[int, ...],
        *,
        bias: bool = False,
        rngs: nnx.Rngs,
        dtype: DTypeLike,
    ) -> None:
        shape = (outputs,) if isinstance(outputs, int) else outputs
        self.weight = nnx.Param(normal(rngs, (*shape, inputs), dtype))
        self.bias = nnx.Param(jnp.zeros(shape, dtype)) if bias else None

    def __call__(self, x: Float[Array, "*batch inputs"], *, out_dtype: DTypeLike | None = None) -> Array:
        """`out_dtype` is that of the result; x's own if None."""
        weight = self.weight[...]
        outputs = weight.shape[:-1]
        flat = weight.matrix() if isinstance(weight, Quantised) else weight.reshape(math.prod(outputs), -1)
        if self.bias is None:
            y = linear(x, flat, out_dtype=out_dtype)
        else:
            y = linear(x, flat, out_dtype=jnp.float32) + self.bias[...].reshape(-1).astype(jnp.float32)
            y = y.astype(out_dtype or x.dtype)
        return y.reshape(*x.shape[:-1], *outputs)


class Weight(nnx.Module):
    """A weight alone."""

    def __init__(self, value: Array) -> None:
        self.weight = nnx.Param(value)


class Table(Weight):
    """A vector for each token of the vocabulary [vocab, hidden], as an embedding or a head. It may be quantised."""

    quantisable = ("weight",)

    def rows(self, index: Int[Array, " T"], dtype: DTypeLike) -> Float[Array, "T hidden"]:
        """The vectors of some tokens; those out of range are clipped."""
        table = self.weight[...]
        if isinstance(table, Quantised):
            return table.take(index).dequantise(dtype)
        return jnp.take(table, index, axis=0, mode="clip").astype(dtype)

    def scores(self, x: Float[Array, "*batch hidden"]) -> Float[Array, "*batch vocab"]:
        """The product of hidden states with every token's vector, in float32."""
        return linear(x, self.weight[...], out_dtype=jnp.float32)


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32; the result has the weight's dtype.

    With `unit_offset` the factor is 1 + weight.
    """

    def __init__(self, size: int, eps: float, *, unit_offset: bool = False, dtype: DTypeLike) -> None:
        self.weight = nnx.Param((jnp.zeros if unit_offset else jnp.ones)(size, dtype))
        self.eps, self.offset = eps, 1.0 if unit_offset else 0.0

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        weight, x = self.weight[...], x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return (x * scale * (weight.astype(jnp.float32) + self.offset)).astype(weight.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Initial values of a weight."""
    return (_INIT_SCALE * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def scaled_by(x: Array, factor: Array) -> Array:
    """x * factor, computed in float32 and rounded once to x's dtype."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def scaled(x: Array, factor: float) -> Array:
    """x * factor, nothing at all for a factor of 1."""
    return x if factor == 1.0 else x * factor
