"""Log-probabilities of whole sequences, in the ordinary arithmetic or with the bits of a schedule-invariant engine."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int

from kernels_pallas import native
from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.fixed_order import COMPILER_OPTIONS, NAME, log_sum_exp
from mamba_jax.config import HybridConfig
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel
from mamba_jax.sequences import checked_sequences
from mamba_jax.train.additions import attach

SCORE_OPTIONS: dict[str, Any] = COMPILER_OPTIONS
"""The compiler options (`jax.jit(..., compiler_options=...)`) of every program that calls `score`."""


def sequence_logprobs(
    model: HybridModel,
    tokens: Int[Array, "batch length"],
    lengths: Int[Array, " batch"],
    added: Mapping[str, Array] | None = None,
) -> Float[Array, "batch length_1"]:
    """Returns the log-probability (float32) of each token but the first, given all tokens before it.

    The head runs over one sequence at a time. `added` is an adapter (see `mamba_jax.train.additions`).

    Raises:
        TypeError, ValueError: as for `HybridModel.hidden`.
    """
    checked_sequences(model.config, tokens, lengths)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    batch, length = inputs.shape
    if not targets.size:
        return jnp.zeros(targets.shape)
    layout = attach(model, SequenceLayout.of(batch, length, jnp.minimum(lengths, length)), added or {})
    flat, _ = model.run(inputs.reshape(-1), layout, None)

    @jax.checkpoint
    def of_one(args: tuple[Array, Array]) -> Array:
        hidden, wanted = args
        logits = model.logits(hidden)
        return (jnp.take_along_axis(logits, wanted[:, None], axis=-1) - log_sum_exp(logits))[:, 0]

    return lax.map(of_one, (flat.reshape(batch, length, -1), targets))


def score(
    model: HybridModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    added: Mapping[str, Array] | None = None,
) -> Float[Array, "batch length_1"]:
    """Returns the log-probability (float32) of each token but the first, with the bits of a schedule-invariant engine.

    The bits are those that an engine on one device with the flag `schedule_invariant`, the same weights and the same
    dtype reports, if the program is compiled with `SCORE_OPTIONS`. Differentiable in the weights and in `added`: the
    gradient is that of `sequence_logprobs`, which computes the model a second time.

    Args:
        tokens: each sequence followed by padding of any value, whose log-probabilities are undefined.
        lengths: number of tokens of each sequence; None: all.
        added: an adapter (see `mamba_jax.train.additions`), which the engine serves. Its rank must be a power of two.
    Raises:
        TypeError, ValueError: the arguments are wrong, as for `HybridModel.hidden`.
        ValueError: the platform, the installation or the model does not support it.
    """
    check_score(model.config)
    tokens, lengths = checked_sequences(model.config, tokens, lengths)
    if lengths is None:
        lengths = jnp.full(tokens.shape[0], tokens.shape[1])
    graph, state = nnx.split(model)
    return _scored(graph, (state, dict(added or {})), tokens, lengths)


def check_score(config: HybridConfig) -> None:
    """Raises ValueError where the platform, the installation or the model does not support `score`."""
    if (platform := jax.default_backend()) != "cpu":
        raise ValueError(f"score is not supported on {platform.upper()}, only on CPU")
    if native.WHY_MISSING is not None:
        raise ValueError(f"score needs the C++ operations, which are missing: {native.WHY_MISSING}")
    if name := next((one.varying_bits for one in config.recurrences if one.varying_bits), None):
        raise ValueError(f"score does not support the {name} of this {config.family} model")


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scored(graph: Any, values: Any, tokens: Array, lengths: Array) -> Array:
    with KernelChoice(named=NAME).applied():
        return _ordinary(graph, values, tokens, lengths)


def _ordinary(graph: Any, values: Any, tokens: Array, lengths: Array) -> Array:
    state, added = values
    return sequence_logprobs(nnx.merge(graph, state), tokens, lengths, added)


def _forward(graph: Any, values: Any, tokens: Array, lengths: Array) -> tuple[Array, tuple[Any, Array, Array]]:
    return _scored(graph, values, tokens, lengths), (values, tokens, lengths)


def _backward(graph: Any, saved: tuple[Any, Array, Array], change: Array) -> tuple[Any, None, None]:
    values, tokens, lengths = saved
    _, pull = jax.vjp(lambda values: _ordinary(graph, values, tokens, lengths), values)
    return *pull(change), None, None


_scored.defvjp(_forward, _backward)
