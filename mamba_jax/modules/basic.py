"""Dense layers, RMS norm and activations."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.linear import linear

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
    exist so that each can be sharded, and one product computes them all.
    """

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
        flat = weight.reshape(math.prod(outputs), -1)
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


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * weight, computed in float32; the result has the weight's dtype."""

    def __init__(self, size: int, eps: float, *, dtype: DTypeLike) -> None:
        self.weight = nnx.Param(jnp.ones(size, dtype))
        self.eps = eps

    def __call__(self, x: Float[Array, "*batch size"]) -> Float[Array, "*batch size"]:
        weight, x = self.weight[...], x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.eps)
        return (x * scale * weight.astype(jnp.float32)).astype(weight.dtype)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Initial values of a weight."""
    return (_INIT_SCALE * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)


def scaled(x: Array, factor: float) -> Array:
    """x * factor, nothing at all for a factor of 1."""
    return x if factor == 1.0 else x * factor
