"""The replays of recurrences against their definitions, and what holds for any implementation of them.

What the interpreter cannot show is checked elsewhere: that compilers take the kernels (test_tpu_compile.py,
test_gpu_compile.py).
"""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest
import recurrence_cases as shared
from operation_checks import ELSEWHERE, Draw, assert_close, assert_same_bits, ints, needs_native

from kernels_pallas.places import Anchored, Rows
from tests.support.selection import slow

pytestmark = pytest.mark.full

ALL = "native", "xla", ELSEWHERE, *shared.KERNELS
LACKS = [
    *(("native", kind) for kind in ("erase", "erase, by channel", "linear, by channel", "selective")),
    *((kernel, "selective") for kernel in shared.KERNELS),
    (shared.KERNELS[0], "linear, by channel"),
]
"""Implementations that do not run a recurrence."""
EACH = shared.cases(*ALL, lacks=LACKS)
replayed = functools.partial(shared.program, "replay")


def row(anchor_slot=0, tail_id=0, anchor_length=0, length=0, num_tokens=0, write_slot=0):
    return (anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot)


def where(rows, shape):
    return Anchored(*map(ints, zip(*rows, strict=True)), shape.interval)


ROWS, STEPS, SLOTS, ENTRIES = 6, 4, 13, 16
"""Of most calls, with padding, so that they are one program."""


def check(replay, shape, rows, *, dtype=np.float32, store=None, steps=STEPS, slots=SLOTS, entries=ENTRIES):
    """Runs a call on rows that are given by `row`, and padding; returns what came out of it."""
    rows = [*rows, *[row()] * (ROWS - len(rows))]
    draw, places = Draw(), where(rows, shape)
    tokens = shared.entry(draw, shape, len(rows), steps, dtype=dtype)
    for v in tokens:
        v[np.arange(steps) >= places.num_tokens[:, None]] = np.nan
    old = shared.states(draw, shape, slots, dtype if store is None else store)
    tail = shared.tails(shape, len(rows) + 2, entries, dtype, places)
    return shared.check_call("replay", replay, shape, tokens, old, tail, places, dtype=old.dtype)


def rows_of(shape, rows):
    """Rows at any place between two boundaries, with and without one ahead, a fresh one and padding among them."""
    random, found = np.random.default_rng(1), []
    for i in range(rows):
        anchor = shape.interval * int(random.integers(1, 5))
        length = anchor + int(random.integers(0, shape.interval))
        found.append(row(1 + i, 1 + i, anchor, length, int(random.integers(1, shape.steps + 1)), 1 + rows + i))
    if rows > 2:
        found[1] = row(0, 2, 0, 1, 1, 2 + rows)
        found[2] = row()
    return found


@shared.sizes(*ALL, lacks=LACKS)
def test_sizes(implementation, shape):
    rows = rows_of(shape, shape.rows)
    sizes = {"steps": shape.steps, "slots": 2 * shape.rows + 1, "entries": shape.entries}
    check(replayed(implementation, shape), shape, rows, **sizes)


@pytest.mark.parametrize("store", [np.float32, jnp.bfloat16])
@EACH
def test_in_bfloat16(implementation, shape, store):
    check(replayed(implementation, shape), shape, rows_of(shape, 5), dtype=jnp.bfloat16, store=store)


PLACES = {
    # As a hit on the end of a prompt leaves it; c == a, c == a + 1, and one that reaches its boundary.
    "an anchor between boundaries": [row(1, 1, 5, 5, 2, 4), row(2, 2, 5, 6, 2, 5), row(3, 3, 5, 7, 2, 6)],
    # No spare was left when the boundary was reached: the anchor stayed where it was.
    "the longest tail": [row(1, 1, 8, 17, 2, 4), row(2, 2, 16, 25, 1, 5), row(3, 3, 7, 16, 2, 0)],
    # Where no other slot is left: everything that needs the anchor is read before.
    "a row writes over its anchor": [row(1, 1, 8, 14, 2, 1), row(2, 2, 8, 15, 1, 2), row(3, 3, 8, 12, 1, 3)],
    "a full ring": [row(1 + i, 1 + i, 13 + i, 13 + i + 14, 2, 4 + i) for i in range(3)],
    "nothing is written": [row(1, 1, 8, 14, 2, 0), row(2, 2, 8, 13, 2, 5), row(3, 3, 8, 14, 1, 6)],
    "a fresh row has no anchor": [row(0, 1, 0, 0, 2, 4), row(0, 2, 0, 7, 1, 5), row(0, 3, 0, 3, 2, 6)],
    "several rows read one anchor": [row(3, 1 + i, 8, 8 + 3 * i, 2, 4 + i) for i in range(3)],
    "only padding": [row()] * 3,
}


@pytest.mark.smoke
@EACH
def test_places(implementation, shape):
    """Rows at any place, and each of `PLACES`, by one program."""
    for rows in (rows_of(shape, 5), *PLACES.values()):
        y, *_ = check(replayed(implementation, shape), shape, rows)
    assert (y == 0).all()


@shared.cases(*ALL, shapes=shared.ODD[:4], lacks=LACKS)
def test_strong_decay(implementation, shape):
    """Small decays next to decays whose inverse would overflow: in the tail, after it, and at the multiple."""
    rows = [row(1, 1, 8, 13, 4, 3), row(2, 2, 8, 14, 4, 4), row(1, 3, 8, 22, 2, 5), *[row()] * (ROWS - 3)]
    draw, places = Draw(), where(rows, shape)
    tokens, old = shared.entry(draw, shape, ROWS, STEPS), shared.states(draw, shape, SLOTS)
    tail = shared.tails(shape, ROWS + 2, ENTRIES, places=places)
    for decays in (tokens.log_decay, tail.log_decay):
        decays *= draw.random.choice([1e-4, 1e-2, 1.0, 30.0, 3000.0], decays.shape, p=[0.4, 0.3, 0.2, 0.05, 0.05])
    # Decays of heads are differences of sums.
    tolerance = 5e-5 if shape.by_channel else 2e-3
    call = replayed(implementation, shape), shape, tokens, old, tail, places
    shared.check_call("replay", *call, tolerance=tolerance)


@pytest.mark.parametrize("steps", [1, 3])
@EACH
def test_equals_snapshots(implementation, shape, steps):
    """A row from token to token, drafts rejected at random; the update stores every state."""
    draw, random, options = Draw(3), np.random.default_rng(steps), shared.how(Draw(1), shape)
    tokens, replay = shared.entry(draw, shape, 1, 40), replayed(implementation, shape)
    rows = Rows(ints([0]), ints([np.arange(1, 41)]))
    want_y, want = shared.program("update", "xla", shape)(tokens, shared.states(draw, shape, 41), rows, **options)
    store, tail = shared.states(draw, shape, SLOTS), shared.tails(shape, ROWS + 2, ENTRIES)
    others = [row()] * (ROWS - 1)
    at, anchor, spare, start = 0, 0, 1, 0  # what `check` runs is the same program
    while at < 40 - steps:
        kept = int(random.integers(1, steps + 1))
        fed = type(tokens)(*(np.full((ROWS, STEPS, *v.shape[2:]), np.nan, v.dtype) for v in tokens))
        for v, one in zip(fed, tokens, strict=True):
            v[0, :steps] = one[0, at : at + steps]
        for v in fed[:3]:
            v[0, kept:steps] = random.normal(size=v[0, kept:steps].shape)  # these drafts will be rejected
        places = where([row(anchor, 1, start, at, steps, spare), *others], shape)
        y, store, tail = replay(fed, store, tail, places, **options)
        assert_close(y[0, :kept], want_y[0, at : at + kept])
        due, at = (at // shape.interval + 1) * shape.interval, at + kept
        if at >= due:
            assert_close(store[spare], want[due])
            start, anchor, spare = due, spare, 3 - spare
    assert start >= 32


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        (shared.MAMBA, 16),
        (shared.MAMBA, 48),
        (shared.ERASING, 16),
        (shared.BY_CHANNEL, 48),
        slow(shared.ERASING, 48),
        slow(shared.BY_CHANNEL, 16),
    ],
    ids=lambda s: getattr(s, "name", s),
)
def test_several_blocks_of_heads_on_tpu(shape, heads, monkeypatch):
    # 16 heads: a block is half a group. 48: three blocks, of a group each.
    monkeypatch.setattr("kernels_pallas.recurrence.replay.pallas_tpu.BLOCK_BYTES", 8 * 16 * 128 * 4)
    shape = dataclasses.replace(shape, heads=heads, groups=heads // 16, head_dim=16, state=128)
    check(replayed(shared.KERNELS[0], shape, anew=True), shape, rows_of(shape, 6), steps=shape.steps)


@needs_native
def test_bits_of_cpp_depend_neither_on_drafts_nor_on_other_rows():
    """What a token gives, and the state at a boundary: alone, and as one of several tokens among other rows."""
    shape, draw, count, options = shared.MAMBA, Draw(5), 4, shared.how(Draw(1), shared.MAMBA)
    alone, among = row(1, 1, 8, 13, 1, 4), row(1, 1, 8, 13, count, 4)
    others, replay = [row(2, 2, 3, 6, 2, 5), among, row(3, 3, 8, 12, 3, 6)], replayed("native", shape)
    tokens, old = shared.entry(draw, shape, 3, count), shared.states(draw, shape, 7)
    tail = shared.tails(shape, 4, 16, places=where(others, shape))
    y, new, _ = replay(tokens, old, tail, where(others, shape), **options)
    _, _, again = replay(tokens, old, tail, where([row(), among, row()], shape), **options)
    states_due = []
    for t in range(count):
        one, place = shared.part(tokens, slice(1, 2), slice(t, t + 1)), (*alone[:3], 13 + t, *alone[4:])
        single, due, _ = replay(one, old, again, where([place], shape), **options)
        assert_same_bits(single[0, 0], y[1, t])
        states_due.append(due[4])
    assert_same_bits(new[4], states_due[2])  # of token 15
