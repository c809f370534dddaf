"""Programs are found again by what they are called with, and by nothing less. And a step's batch is sent as one array,
of which the program reads the same values.
"""

import dataclasses
import gc
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax import program_cache
from mamba_jax.batch import DecodeBatch, Packing, PrefillBatch, pack
from mamba_jax.program_cache import ProgramCache, look_of
from tests.support.fleets.step_host import Host
from tests.support.models.tiny_configs import STEP


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tree:
    a: jax.Array
    b: tuple


def tree(dtype=jnp.float32, size=3, more=()):
    return Tree(jnp.zeros(size, dtype), more)


class Counted:
    """A cache of one function, and how often it was compiled."""

    def __init__(self):
        self.cache, self.compiled = ProgramCache(), 0

    def __call__(self, given, batch):
        def make():
            self.compiled += 1
            return jax.jit(add, donate_argnums=0).lower(given, batch).compile()

        return self.cache.run("add", (given, batch), make, donated=1)


def add(given, batch):
    return jax.tree.map(lambda leaf: leaf + batch.astype(leaf.dtype).sum(), given)


def test_a_loop_compiles_once_and_looks_once(monkeypatch):
    looks, run, given = [], Counted(), tree()
    monkeypatch.setattr(program_cache, "look_of", lambda tree: looks.append(type(tree)) or look_of(tree))
    for _ in range(5):
        given = run(given, np.ones(2, np.int32))
    np.testing.assert_array_equal(given.a, 10 * np.ones(3))
    assert run.compiled == len(run.cache) == 1
    assert looks.count(Tree) == 2  # the first one, and what the program gives


@pytest.mark.parametrize(
    "other",
    [tree(jnp.bfloat16), tree(size=4), tree(more=(jnp.zeros(2),)), jax.device_put(tree(), jax.devices()[1])],
    ids=["dtype", "shape", "structure", "place"],
)
def test_what_differs_is_compiled_anew(other):
    run, batch = Counted(), np.ones(2, np.int32)
    run(tree(), batch)
    run(other, batch if other.a.devices() == {jax.devices()[0]} else jax.device_put(batch, jax.devices()[1]))
    assert run.compiled == 2
    run(tree(), batch)
    assert run.compiled == 2


def test_weak_types_and_batches_count():
    run = Counted()
    run(tree(), np.ones(2, np.int32))
    run(tree(), np.ones(3, np.int32))
    run(Tree(jnp.asarray(1.0), ()), np.ones(2, np.int32))
    run(Tree(jnp.float32(1.0), ()), np.ones(2, np.int32))
    assert run.compiled == 4


def test_nothing_is_kept_alive():
    run = Counted()
    given = run(tree(), np.ones(2, np.int32))
    assert len(run.cache._known) == 1
    del given
    gc.collect()
    assert not run.cache._known


BATCHES = {
    "decode": DecodeBatch.empty(rows=3, num_speculative_tokens=2, page_updates=5),
    "replay": DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=7, replay=True),
    "prefill": PrefillBatch.empty(tokens=64, rows=5, tiles=9, pages_per_row=0, tile_size=8),
}


def filled(batch):
    """The same batch, in the same memory, with other values."""
    rng = np.random.default_rng(0)
    for leaf in jax.tree.leaves(batch):
        leaf[...] = rng.integers(*((0, 2) if leaf.dtype == bool else (-(1 << 31), 1 << 31)), leaf.shape)
    return batch


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
    host = Host(dataclasses.replace(STEP, pattern="M*"))
    batch = DecodeBatch.empty(rows=6, num_speculative_tokens=3, pages_per_row=host.pages_per_row)
    lowered = host.programs.lower(host.store, host.rows, batch)
    (_, _, _, taken), _ = lowered.args_info
    assert [leaf.shape for leaf in jax.tree.leaves(taken)] == [(Packing.of(batch).size,)]
