"""How a store keeps the model's logical arrays. Transferred arrays are logical, so both sides may differ in this.

Divided over devices, an array of several parts (the convolution's B and C, for example) has them device by device, and
a unit that devices share several times: such an array cannot be cut by bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import jax.numpy as jnp
from jax.sharding import NamedSharding
from jaxtyping import Array, Shaped

from mamba_jax.config import Division, HybridConfig, StateArray
from mamba_jax.rounding import NarrowDtype
from mamba_jax.store import Store, StoreShape


@dataclass(frozen=True)
class Arrangement:
    """The layout of a model's state on this number of devices. With one device, it is that of the logical arrays."""

    shape: StoreShape
    """Of the logical arrays."""
    shards: int = 1
    """Devices that share each layer."""
    narrow: NarrowDtype | None = None
    """The form in which accumulated states are transferred; None: the form of the slots."""

    @classmethod
    def of(cls, config: HybridConfig, store: Store, narrow: NarrowDtype | None = None) -> Arrangement:
        """That of a store, wherever it lies."""
        sharding = store.hidden.sharding
        return cls(StoreShape.of(config), sharding.mesh.size if isinstance(sharding, NamedSharding) else 1, narrow)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays of a state that travels, in their order."""
        forms = ((name, self._form(name)) for name in self.shape.arrays)
        return tuple(each for name, form in forms for each in ((name,) if form is None else form.names(name)))

    def traveling(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of slots, as they travel."""
        found: dict[str, Array] = {}
        for name, values in state.items():
            form = self._form(name)
            found |= {name: values} if form is None else form.parts(name, values)
        return found

    def arrived(self, name: str, state: Mapping[str, Array]) -> Array:
        """The inverse, of one array of slots."""
        form = self._form(name)
        return state[name] if form is None else form.widened(name, state)

    def _form(self, name: str) -> NarrowDtype | None:
        """The narrow form of an array, if it travels in one."""
        return self.narrow if name in self.shape.accumulated else None

    def logical(self, array: StateArray, stored: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """Values of `array`, any number of them, as the store has them -> as the model defines them."""
        division = self._division(array)
        if division is None:
            return stored
        lead, rest = _around(stored, array, division)
        if division.repeat > 1:
            by_unit = stored.reshape(*lead, division.units, division.repeat, -1, *rest)
            each_once = by_unit[(slice(None),) * (len(lead) + 1) + (0,)]
            return each_once.reshape(*lead, -1, *rest)
        by_device = stored.reshape(*lead, self.shards, division.parts, -1, *rest)
        return jnp.swapaxes(by_device, len(lead), len(lead) + 1).reshape(stored.shape)

    def stored(self, array: StateArray, logical: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """The inverse of `logical`."""
        division = self._division(array)
        if division is None:
            return logical
        lead, rest = _around(logical, array, division)
        if division.repeat > 1:
            by_unit = logical.reshape(*lead, division.units, 1, -1, *rest)
            return jnp.repeat(by_unit, division.repeat, axis=len(lead) + 1).reshape(*lead, -1, *rest)
        by_part = logical.reshape(*lead, division.parts, self.shards, -1, *rest)
        return jnp.swapaxes(by_part, len(lead), len(lead) + 1).reshape(logical.shape)

    def _division(self, array: StateArray) -> Division | None:
        """How the array is divided, where the store has it otherwise than the model."""
        division = array.over(self.shards).division
        if self.shards == 1 or division is None or (division.parts == 1 and division.repeat == 1):
            return None
        return division


def _around(
    values: Shaped[Array, "*sizes"], array: StateArray, division: Division
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sizes before and after the axis that is divided."""
    axis = values.ndim - len(array.shape) + division.axis
    return values.shape[:axis], values.shape[axis + 1 :]
