"""The replay of the selective scan against its definition, at the places of the linear recurrence's."""

import jax
import numpy as np
import pytest
from operation_checks import ELSEWHERE, Draw, assert_close, assert_in_place, assert_same_bits, jitted, on_device
from test_recurrence_replay import PLACES, row, rows_of, where
from test_selective_scan import layer, states

from benchmarks.kernels.workloads import SELECTIVE
from kernels_pallas.places import Rows
from kernels_pallas.selective_scan import SelectiveTail, reference, selective_replay, selective_update
from tests.support.selection import slow

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in SELECTIVE]
ODD = next(s for s in SHAPES if s.name == "27 channels, states of 5")
EACH = pytest.mark.parametrize("implementation", ["xla", ELSEWHERE])


def tails(shape, count, entries=None, dtype=np.float32):
    """Full of a last tenant's entries, which are NaN wherever a test does not fill them."""
    lead, sizes = (count, entries or shape.entries), (shape.inner, shape.state, shape.inner)
    return SelectiveTail(*(np.full((*lead, n), np.nan, d) for n, d in zip(sizes, (dtype, dtype, "f4"), strict=True)))


def fill(draw, tail, places):
    """Inputs of the tokens between each row's anchor and its length."""
    for which, a, c in zip(places.tail_id, places.anchor_length, places.length, strict=True):
        for at in (n % tail.x.shape[1] for n in range(a, c)):
            for ring in tail[:2]:
                ring[which, at] = draw.normal(ring.shape[2], dtype=ring.dtype)
            tail.dt[which, at] = draw.positive(tail.dt.shape[2], scale=0.3)
    return tail


def check(implementation, shape, rows, *, dtype=np.float32, store=None, slots=8, entries=None):
    draw, places = Draw(), where(rows, shape)
    inputs = layer(draw, shape, len(rows), shape.steps, dtype=dtype)
    for v in (inputs[i] for i in (0, 1, 3, 4)):
        for i, count in enumerate(places.num_tokens):
            v[i, count:] = np.nan
    old = states(draw, shape, slots, dtype if store is None else store)
    tail = fill(draw, tails(shape, len(rows) + 2, entries, dtype), places)
    y, new, new_tail = jitted(selective_replay, implementation=implementation)(*inputs, old, tail, places)
    want_y, want, want_tail = reference.selective_replay(*inputs, old, tail, places)
    assert y.dtype == dtype
    assert_close(y, want_y, dtype)
    written = np.asarray(on_device(places).due_slot)
    assert_close(new[written[written > 0]], want[written[written > 0]], old.dtype)
    untouched = np.setdiff1d(np.arange(1, slots), written)
    assert_same_bits(new[untouched], old[untouched])
    for ours, theirs in zip(new_tail, want_tail, strict=True):
        assert_same_bits(ours[1:], theirs[1:])


@pytest.mark.smoke
@EACH
@pytest.mark.parametrize("shape", [ODD, *(slow(s) for s in SHAPES if s is not ODD)], ids=lambda s: s.name)
def test_equals_definition(implementation, shape):
    check(implementation, shape, rows_of(shape, shape.rows), slots=2 * shape.rows + 1)


@EACH
@pytest.mark.parametrize("store", ["float32", "bfloat16"])
def test_bfloat16(implementation, store):
    rows = rows_of(ODD, ODD.rows)
    check(implementation, ODD, rows, dtype=np.dtype("bfloat16"), store=np.dtype(store), slots=2 * ODD.rows + 1)


@EACH
def test_places(implementation):
    for rows in PLACES.values():
        check(implementation, ODD, rows, entries=16)


@EACH
@pytest.mark.parametrize("steps", [1, 3])
def test_equals_snapshots(implementation, steps):
    """A row from token to token, drafts rejected at random; `selective_update` stores every state."""
    draw, random = Draw(3), np.random.default_rng(steps)
    inputs, replay = layer(draw, ODD, 1, 40), jitted(selective_replay, implementation=implementation)
    slots = Rows(np.zeros(1, np.int32), np.arange(1, 41, dtype=np.int32)[None])
    want_y, want = jitted(selective_update, implementation="xla")(*inputs, states(draw, ODD, 41), slots)
    store, tail = states(draw, ODD, 3), tails(ODD, 2, 16)
    at, anchor, spare, start = 0, 0, 1, 0
    while at < 40 - steps:
        kept = int(random.integers(1, steps + 1))
        fed = [v[:, at : at + steps].copy() if i in (0, 1, 3, 4) else v for i, v in enumerate(inputs)]
        fed[0][:, kept:] = random.normal(size=fed[0][:, kept:].shape)  # these drafts will be rejected
        places = where([row(anchor, 1, start, at, steps, spare)], ODD)
        y, store, tail = replay(*fed, store, SelectiveTail(*tail), places)
        assert_close(y[0, :kept], want_y[0, at : at + kept])
        due, at = (at // ODD.interval + 1) * ODD.interval, at + kept
        if at >= due:
            assert_close(store[spare], want[due])
            start, anchor, spare = due, spare, 3 - spare
    assert start >= 32


@pytest.mark.smoke
@pytest.mark.parametrize(("rows", "dtype"), [(1, "float32"), (4, "bfloat16")])
def test_in_place(rows, dtype):
    draw, dtype = Draw(), np.dtype(dtype)
    inputs, one = layer(draw, ODD, rows, 2, dtype=dtype), states(draw, ODD, 1, dtype)
    store = np.zeros((4_000_000 // one.size, *one.shape[1:]), one.dtype)
    tail = jax.tree.map(np.nan_to_num, tails(ODD, 40, 2 * ODD.entries, dtype))
    places = where([row(1 + i, 1 + i, 8, 9, 2, 1 + rows + i) for i in range(rows)], ODD)

    def run(donated, inputs, places):
        return selective_replay(*inputs, *donated, places, implementation="xla")[::-1]

    assert_in_place(run, (store, tail), inputs, places)
