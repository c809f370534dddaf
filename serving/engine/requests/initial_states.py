"""The slots of learned initial states. They come after the slots that the scheduler manages and are only read by steps.

A request without a cached prefix reads such a slot where it would otherwise read zeros. That adds no work to a step.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jaxtyping import Shaped

from checkpoints.adapters.initial_state import InitialState
from mamba_jax.config import HybridConfig
from mamba_jax.store import Store
from serving.state_transfer.programs import Arrangement, PointPrograms, state_spec
from serving.state_transfer.source import Loop

_Arrays = Mapping[str, Shaped[np.ndarray, "..."]]


class InitialStates:
    """The initial states on the device. A new store gets all of them again, from the host's memory.

    Args:
        config: the model's configuration, as the store is made for it.
        first: the first slot.
        count: the number of slots.
    """

    def __init__(self, config: HybridConfig, *, first: int, count: int) -> None:
        self._config, self._first, self.count = config, first, count
        self._held: dict[int, _Arrays] = {}
        self._programs: PointPrograms | None = None

    def slot(self, entry: int) -> int:
        """The slot of an entry, from 1 to `count`."""
        return self._first + entry - 1

    def put(self, loop: Loop, entry: int, state: InitialState) -> None:
        """Replaces the state of an entry. Steps that are already dispatched read the old state."""
        slot, held = self.slot(entry), _stacked(state, self._config)
        if loop.store is not None:  # otherwise, `fill` writes the state when the store is created
            self.warm_up(loop.store)
            loop.replace_store(lambda store: self._written(store, slot, held))
        self._held[slot] = held

    def check(self, state: InitialState, store: Store | None) -> None:
        """
        Raises:
            ValueError: a number is not finite in the dtypes of the store.
        """
        dtypes = {} if store is None else {name: each.dtype for arrays in store.slots for name, each in arrays.items()}
        for name, value in _stacked(state, self._config).items():
            with np.errstate(over="ignore"):
                finite = np.isfinite(value.astype(dtypes.get(name, np.float32))).all()
            if not finite:
                raise ValueError(f"its initial state ({name}) has numbers that are not finite in {dtypes[name]}")

    def clear(self, loop: Loop, slot: int) -> None:
        """Writes zeros into a slot, and forgets its state."""
        held = self._held.pop(slot, None)
        if held is not None and loop.store is not None:
            loop.replace_store(lambda store: self._written(store, slot, {}))

    def fill(self, store: Store) -> Store:
        """Returns a new store with all states. Donates the given store."""
        for slot, held in self._held.items():
            store = self._written(store, slot, held)
        return store

    def warm_up(self, store: Store) -> None:
        """Compiles the program that writes a state. A store cannot be lost by an error of the compiler then."""
        self._programs_of(store).warm_up(store, unit=1, layers=0, reading=False, sizes=())

    def _written(self, store: Store, slot: int, held: _Arrays) -> Store:
        programs = self._programs_of(store)
        spec = state_spec(store, programs.arrangement)
        values = {name: held.get(name, np.zeros(each.shape, np.float32)) for name, each in spec.items()}
        state = {name: jnp.asarray(value, spec[name].dtype) for name, value in values.items()}
        return programs.write_state(store, slot, state, 0)

    def _programs_of(self, store: Store) -> PointPrograms:
        if self._programs is None:
            self._programs = PointPrograms(Arrangement.of(self._config, store))
        return self._programs


def _stacked(state: InitialState, config: HybridConfig) -> _Arrays:
    """The arrays of a state by name, each over all layers that have it, as `PointPrograms` take them."""
    layers: dict[str, list[np.ndarray]] = {}
    for arrays in state.slot_arrays(config):
        for name, value in arrays.items():
            layers.setdefault(name, []).append(value)
    return {name: np.stack(values) for name, values in layers.items()}
