"""A step's batch is sent to the device as one array, and the program reads the same values from it."""

import dataclasses

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.packing import Packing, pack
from tests.support.fleets.step_host import Host

BATCHES = {
    "decode": DecodeBatch.empty(rows=3, num_speculative_tokens=2, page_updates=5),
    "replay": DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=7, replay=True),
    "prefill": PrefillBatch.empty(tokens=64, rows=5, tiles=9, pages_per_row=0, tile_size=8),
}


def filled(batch):
    """The same batch, in the same memory, with other values."""
    rng = np.random.default_rng(0)
    for leaf in jax.tree.leaves(batch):
        leaf[...] = (
            rng.integers(0, 2, leaf.shape) if leaf.dtype == bool else rng.integers(-(1 << 31), 1 << 31, leaf.shape)
        )
    return batch


@pytest.mark.parametrize("name", BATCHES)
def test_a_program_sees_the_same_arrays(name):
    batch = filled(BATCHES[name])
    found = jax.jit(Packing.of(batch).unpack)(pack(batch))
    assert jax.tree.structure(found) == jax.tree.structure(batch)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(batch), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", BATCHES)
def test_an_empty_batch_is_packed_already(name):
    batch = filled(BATCHES[name])
    assert pack(batch) is batch.row_id.base
    again = jax.tree.map(np.copy, batch)
    np.testing.assert_array_equal(pack(again), pack(batch))
    changed = dataclasses.replace(batch, sample=~batch.sample)
    assert (pack(changed) != pack(batch)).any()


def test_batches_share_no_memory():
    one, other = (DecodeBatch.empty(rows=3, num_speculative_tokens=2, page_updates=5) for _ in range(2))
    one.tokens[:] = 7
    assert not pack(other).any()


def test_a_step_takes_one_array_from_the_host():
    host = Host()
    batch = DecodeBatch.empty(rows=6, num_speculative_tokens=3, pages_per_row=host.pages_per_row)
    lowered = host.programs.lower(host.store, host.rows, batch)
    (_, _, _, taken), _ = lowered.args_info
    assert [leaf.shape for leaf in jax.tree.leaves(taken)] == [(Packing.of(batch).size,)]
