"""Models with random weights, made so that what a test looks for shows in their outputs."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx

from checkpoints.adapters.initial_state import initial_state_shapes
from checkpoints.random import initial_values
from mamba_jax.config import HybridConfig
from mamba_jax.model import HybridModel
from mamba_jax.modules.basic import shapes_only


def fill(make: Callable[[], Any], value_of: Callable[[str, tuple[int, ...]], np.ndarray]) -> tuple[Any, dict[str, Any]]:
    """The module that `make` makes, with weights by `value_of` (path, shape); and those by their paths, in its dtypes.

    Weights are drawn by numpy: making them module by module in JAX would compile something for each shape.
    """
    with shapes_only():
        graph, state = nnx.split(make())
    filled, arrays = [], {}
    for path, leaf in nnx.to_flat_state(state):
        name = ".".join(map(str, path))
        arrays[name] = jnp.asarray(value_of(name, leaf.shape), leaf.dtype)
        filled.append((path, leaf.replace(arrays[name])))
    return nnx.merge(graph, nnx.from_flat_state(filled)), arrays


def random_layers(config: HybridConfig, seed: int = 0, scale: float = 1.0) -> dict[int, dict[str, np.ndarray]]:
    """An initial state of an adapter, by layer and part."""
    rng = np.random.default_rng(seed)
    return {
        index: {part: (scale * rng.normal(size=shape)).astype(np.float32) for part, shape in parts.items()}
        for index, parts in initial_state_shapes(config).items()
    }


def random_module(make: Callable[[], Any], *, scale: float) -> tuple[Any, dict[str, np.ndarray]]:
    """The module that `make` makes, with normally distributed weights; and those by their paths, in float64 numpy."""
    rng = np.random.default_rng(7)
    module, arrays = fill(make, lambda _, shape: scale * rng.normal(size=shape))
    return module, {name: np.asarray(value, np.float64) for name, value in arrays.items()}


@functools.cache
def random_model(config: HybridConfig) -> HybridModel:
    """A model with random weights everywhere, those included that begin as ones or zeros."""
    return random_module(lambda: HybridModel(config, rngs=nnx.Rngs(0), dtype=jnp.float32), scale=0.3)[0]


@functools.cache
def long_memory_model(
    config: HybridConfig, seed: int = 3, *, near_ties: bool = False, dtype: Any = jnp.float32
) -> HybridModel:
    """A model in which what was absorbed makes a difference, and still does many tokens later.

    With `near_ties` tokens 2i and 2i+1 are always nearly equally likely.
    """
    rng = np.random.default_rng(seed)

    def value_of(name: str, shape: tuple[int, ...]) -> np.ndarray:
        value = initial_values(name, shape, rng.standard_normal, rng.random)
        if name == "drafter.tokens":
            return 2 * np.arange(shape[0])
        if name.endswith("dt_bias"):
            value = value + 2.5
        if name.lower().endswith("a_log"):
            value = value - 2.5
        if near_ties and "head" in name:
            value[1::2] = value[::2] + 0.02 * value[1::2]
        return value

    return fill(lambda: HybridModel(config, rngs=nnx.Rngs(0), dtype=dtype), value_of)[0]
