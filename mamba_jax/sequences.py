"""Checks of the sequences that a caller gives to a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from mamba_jax.config import HybridConfig


def checked_sequences(
    config: HybridConfig, tokens: ArrayLike, lengths: ArrayLike | None
) -> tuple[Int[Array, "batch length"], Int[Array, " batch"] | None]:
    """Converts sequences to arrays and checks them, as `HybridModel.hidden` says.

    Values are checked only if they are known (not in `jax.jit`).
    """
    given = [tokens, lengths]
    tokens = _integers("tokens", tokens, "[batch, length]", 2)
    batch, length = tokens.shape
    if lengths is not None:
        lengths = _integers("lengths", lengths, "[batch]", 1)
        if lengths.shape != (batch,):
            raise ValueError(f"lengths has shape {list(lengths.shape)}: expected [{batch}], one per sequence")
    if any(isinstance(each, jax.core.Tracer) for each in given):
        return tokens, lengths
    # Not the converted arrays: 64-bit numbers lose their upper half.
    known = np.asarray(given[0])
    counts = np.full(batch, length) if lengths is None else np.asarray(given[1])
    if counts.size and (counts.min() < 0 or counts.max() > length):
        raise ValueError(f"lengths is {counts.tolist()}: expected numbers from 0 to {length}")
    outside = ((known < 0) | (known >= config.vocab_size)) & (np.arange(length) < counts[:, None])
    if outside.any():
        row, place = np.argwhere(outside)[0]
        raise ValueError(
            f"tokens[{row}, {place}] is {known[row, place]}: expected ids from 0 to {config.vocab_size - 1}; give the "
            "number of tokens before padding as lengths"
        )
    return tokens, lengths


def _integers(name: str, value: Any, axes: str, rank: int) -> Array:
    """Converts an argument to an array of integers and checks its type and rank."""
    if not isinstance(value, jax.Array | np.ndarray):
        raise TypeError(f"{name} is a {type(value).__name__}: expected an array {axes} of integers (use jnp.array)")
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name} has dtype {value.dtype}: expected integers")
    if value.ndim != rank:
        hint = "; use tokens[None] for one sequence" if (rank, value.ndim) == (2, 1) else ""
        raise ValueError(f"{name} has shape {list(value.shape)}: expected {axes}{hint}")
    return jnp.asarray(value)
