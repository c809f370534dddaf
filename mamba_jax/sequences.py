"""Checks of the sequences that a caller gives to a model."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Int

from mamba_jax.config import HybridConfig
from mamba_jax.layout import Layout


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
    hint = "; give the number of tokens before padding as lengths"
    check_ids(config.vocab_size, known, np.arange(length) < counts[:, None], hint=hint)
    return tokens, lengths


def check_packed(config: HybridConfig, tokens: Any, layout: Layout) -> None:
    """Checks a layout's tokens, padding aside, as `check_ids` does, unless their values are unknown (in `jax.jit`)."""
    if not isinstance(tokens, jax.core.Tracer) and not isinstance(valid := layout.valid, jax.core.Tracer):
        check_ids(config.vocab_size, tokens, valid)


def check_ids(vocab_size: int, tokens: Any, valid: Any = True, *, hint: str = "") -> None:
    """Checks tokens of any shape, of which only the `valid` ones count.

    Raises:
        ValueError: a token is not in the vocabulary.
    """
    known = np.asarray(tokens)
    outside = ((known < 0) | (known >= vocab_size)) & np.asarray(valid)
    if outside.any():
        place = tuple(map(int, np.argwhere(outside)[0]))
        raise ValueError(f"tokens{list(place)} is {known[place]}: expected ids from 0 to {vocab_size - 1}{hint}")


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
