"""One call of an operation, and the arrays that it is made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp


@dataclass(frozen=True)
class Call:
    """One operation with its arguments."""

    operation: Callable[..., Any]
    inputs: tuple[Any, ...]
    stores: tuple[Any, ...] = ()
    """What the operation updates: arguments after the inputs, and results after y."""
    places: Mapping[str, Any] = field(default_factory=dict)
    """Arrays that are passed by name."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments, by name."""
    moved: int = 0
    """Bytes that must be read and written at least: all arguments and results once, of a store the slots in use."""

    @property
    def arrays(self) -> tuple[Any, ...]:
        """The arguments of `program`."""
        return self.stores, self.inputs, self.places

    def program(self, implementation: str | None = None) -> Callable[..., Any]:
        """Returns the function (stores, inputs, places) -> (stores, y), to be compiled with the stores donated."""

        def run(stores: Any, inputs: Any, places: Any) -> tuple[Any, Any]:
            out = self.operation(*inputs, *stores, **places, **self.options, implementation=implementation)
            return (tuple(out[1:]), out[0]) if stores else ((), out)

        return run


class Draw:
    """Random arrays of a dtype.

    Args:
        store: the dtype of states, and of pages if it is narrower than `dtype`.
        slots: the least number of slots of a store.
    """

    def __init__(self, dtype: Any, *, store: Any = jnp.float32, slots: int = 0) -> None:
        self.dtype, self.store, self.slots = jnp.dtype(dtype), jnp.dtype(store), slots
        self._drawn = 0

    def _key(self) -> Any:
        self._drawn += 1
        return jax.random.key(self._drawn)

    def __call__(self, *shape: int, dtype: Any = None) -> Any:
        return jax.random.normal(self._key(), shape, jnp.float32).astype(dtype or self.dtype)

    def positive(self, *shape: int) -> Any:
        """As step sizes and strengths are."""
        return jax.random.uniform(self._key(), shape, jnp.float32, 0.01, 0.2)

    def weight(self, *shape: int) -> Any:
        """A weight of a product, [.., outputs, inputs]."""
        return self(*shape) / shape[-1] ** 0.5

    def states(self, shape: Any, slots: int) -> Any:
        """A store of zeros."""
        return jnp.zeros((max(slots, self.slots), *shape.state_shape), self.store)


def i32(values: Any) -> Any:
    """An array of indices."""
    return jnp.asarray(values, jnp.int32)


def nbytes(*trees: Any) -> int:
    """Bytes of all arrays."""
    return sum(math.prod(array.shape) * array.dtype.itemsize for array in jax.tree.leaves(trees))


def slot_bytes(store: Any) -> int:
    """Of one slot or page."""
    return nbytes(store) // store.shape[0]
