"""Planted faults that change only bits of schedule-invariant engines. See `faults`."""

from functools import partial

import jax.numpy as jnp
import pytest

from kernels_pallas import fixed_order
from kernels_pallas.paged_attention import api as attention_api
from kernels_pallas.paged_attention import xla as attention_xla
from kernels_pallas.recurrence import api as recurrence_api
from kernels_pallas.recurrence import native
from kernels_pallas.recurrence.scan import xla as scan_xla
from tests.serving.differential.faults import BITS, Patch
from tests.serving.differential.faults import fault as _fault

fault = partial(_fault, table=BITS)


@fault(64, fixed_order, "product", compiles="step")
def another_order_for_few_rows(sound, rows, weight):
    turned = slice(None, None, -1) if len(rows) < 3 else slice(None)
    return sound(rows[:, turned], weight[:, turned])


@fault(65, compiles="step")
def attention_in_pieces_by_batch(patch: Patch) -> None:
    def attention(q, kv, **layout):
        with pytest.MonkeyPatch.context() as short:
            short.setattr(attention_xla, "QUERIES", 16 if q.shape[0] > 3 else 128)
            return attention_xla.paged_attention(q, kv, **layout)

    patch.setattr(attention_api, "PAGED", fixed_order.implementations(attention, None))


@fault(66, compiles="step")
def states_of_a_tile_at_once(patch: Patch) -> None:
    patch.setattr(recurrence_api, "SCAN", fixed_order.implementations(scan_xla.scan, None))


@fault(67, compiles="step")
def another_last_bit_in_stored_states(patch: Patch) -> None:
    def scan(entry, store, tiles, **recurrence):
        y, store = native.scan(entry, store, tiles, **recurrence)
        return y, store.at[tiles.write_slot].set(jnp.nextafter(store[tiles.write_slot], jnp.inf))

    patch.setattr(recurrence_api, "SCAN", fixed_order.implementations(scan, None))
