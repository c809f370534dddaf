"""Planted faults of rows with adapters: scopes of keys, entries of LoRA matrices, and initial states. See `faults`."""

from functools import partial

import jax.numpy as jnp

from mamba_jax.layout import DecodeLayout, PrefillLayout
from serving.core.cache.cache import Cache
from serving.core.cache.row_state import RowState
from serving.engine.requests.adapters import AdapterTable
from serving.engine.requests.initial_states import InitialStates
from serving.engine.steps.batching import BatchBuilder
from tests.serving.differential.faults import ADAPTERS, Patch
from tests.serving.differential.faults import fault as _fault

fault = partial(_fault, table=ADAPTERS)


@fault(56, Cache, "scope")
def scope_without_adapter(sound, self, salt, adapter=None):
    return sound(self, salt)


@fault(57, AdapterTable, "put")
def scope_by_name(sound, self, name, path, adapter):
    loaded = sound(self, name, path, adapter)
    loaded.digest = name
    return loaded


@fault(58)
def entry_of_the_row_before(patch: Patch) -> None:
    sound, last = BatchBuilder.seat, [0]

    def seat(self, *args, adapter=0, **how):
        before, last[0] = last[0], adapter
        return sound(self, *args, adapter=before, **how)

    patch.setattr(BatchBuilder, "seat", seat)


@fault(59, DecodeLayout, "with_adapters", compiles="decode")
@fault(60, PrefillLayout, "with_adapters", compiles="prefill")
def entry_of_a_neighbor(sound, self, entries):
    return sound(self, jnp.roll(entries, 1))


@fault(61)
def entries_in_use_are_overwritten(patch: Patch) -> None:
    sound = AdapterTable.take

    def take(self, request, content=None):
        loaded = sound(self, request, content)
        loaded.users = 0
        return loaded

    patch.setattr(AdapterTable, "take", take)
    patch.setattr(AdapterTable, "release", lambda self, adapter: None)


@fault(62, RowState, "__init__")
def starts_from_zeros(sound, self, cache, slot):
    sound(self, cache, 0)


@fault(63, InitialStates, "fill")
def lost_initial_states(sound, self, store):
    return store
