"""The replay against its definition, and what holds for any implementation of it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_in_place, assert_same_bits, jitted, on_device

from benchmarks.kernels.workloads import MAMBA2
from kernels_pallas import native, state_update
from kernels_pallas.state_replay import Tail, reference, state_replay

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in MAMBA2]
ODD = next(s for s in SHAPES if s.name == "9 heads, 3 groups")
DTYPES = pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])


def layer(draw, shape, rows, steps, dtype=np.float32):
    inner = (rows, steps, shape.groups, shape.state)
    return (
        draw.normal(rows, steps, shape.heads, shape.head_dim, dtype=dtype),
        draw.positive(rows, steps, shape.heads, scale=0.3),
        -draw.positive(shape.heads),
        draw.normal(*inner, dtype=dtype),
        draw.normal(*inner, dtype=dtype),
        draw.normal(shape.heads),
    )


def states(draw, shape, count, dtype=np.float32):
    store = draw.normal(count, shape.heads, shape.head_dim, shape.state, dtype=dtype)
    store[0] = np.nan
    return store


def tails(draw, shape, count, entries=None, dtype=np.float32):
    """Tails full of a last tenant's entries, which are NaN wherever a test does not fill them."""
    lead = (count, entries or shape.entries)
    inner = (shape.heads * shape.head_dim, shape.groups * shape.state)
    return Tail(
        np.full((*lead, inner[0]), np.nan, dtype),
        np.full((*lead, inner[1]), np.nan, dtype),
        np.full((*lead, shape.heads), np.nan, np.float32),
    )


def fill(draw, tail, places, last=lambda draw, heads: draw.positive(heads, scale=0.3)):
    """Inputs of the tokens between each row's anchor and its length."""
    entries = tail[0].shape[1]
    for which, a, c in zip(*(places[key] for key in ("tail_id", "anchor_length", "length")), strict=True):
        for n in range(a, c):
            for kept in tail[:2]:
                kept[which, n % entries] = draw.normal(kept.shape[2], dtype=kept.dtype)
            tail[2][which, n % entries] = last(draw, tail[2].shape[2])
    return tail


def row(anchor_slot=0, tail_id=0, anchor_length=0, length=0, num_tokens=0, write_slot=0):
    return (anchor_slot, tail_id, anchor_length, length, num_tokens, write_slot)


NAMES = ("anchor_slot", "tail_id", "anchor_length", "length", "num_tokens", "write_slot")


def where(rows):
    return {name: np.array(values, np.int32) for name, values in zip(NAMES, zip(*rows, strict=True), strict=True)}


class Replay:
    """Every implementation of a replay."""

    implementation: str
    operation = staticmethod(state_replay)
    reference = staticmethod(reference.state_replay)
    snapshots = staticmethod(state_update.state_update)
    """The operation that stores every state, and takes the same inputs."""
    layer = staticmethod(layer)
    states = staticmethod(states)
    tails = staticmethod(tails)
    fill = staticmethod(fill)
    by_token = (0, 1, 3, 4)
    """Which of a layer's inputs belong to tokens."""
    odd = ODD
    """Sizes for the tests of everything else than sizes."""

    @pytest.fixture
    def replay(self):
        return self.run

    def run(self, *args, interval, **kwargs):
        return jitted(self.operation, implementation=self.implementation, interval=interval)(*args, **kwargs)

    def check(self, replay, shape, rows, *, dtype=np.float32, store=None, steps=None, slots=8, entries=None, seed=0):
        """Runs a call on rows that are given by `row`; returns what came out of it and what went in."""
        draw, places = Draw(seed), where(rows)
        inputs = self.layer(draw, shape, len(rows), steps or shape.steps, dtype)
        for v in (inputs[i] for i in self.by_token):
            for i, count in enumerate(places["num_tokens"]):
                v[i, count:] = np.nan
        old = self.states(draw, shape, slots, dtype if store is None else store)
        tail = self.fill(draw, self.tails(draw, shape, len(rows) + 2, entries, dtype), places)
        y, new, new_tail = replay(old, tail, *inputs, **places, interval=shape.interval)
        want_y, want, want_tail = self.reference(old, tail, *inputs, **places, interval=shape.interval)
        assert y.dtype == dtype
        assert_close(y, want_y, dtype)
        written = [r[5] for r in rows if r[5] and r[4] and (r[3] // shape.interval + 1) * shape.interval <= r[3] + r[4]]
        assert_close(new[written], want[written], old.dtype)
        untouched = np.setdiff1d(np.arange(1, slots), written)
        assert_same_bits(new[untouched], old[untouched])
        self.check_tail(new_tail, want_tail, dtype)
        return y, new, new_tail

    def check_tail(self, tail, expected, dtype):
        for ours, theirs in zip(tail, expected, strict=True):
            assert_same_bits(ours[1:], theirs[1:])

    def rows_of(self, shape, rows):
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

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("shape", [ODD, SHAPES[4]], ids=lambda s: s.name)
    @pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
    def test_bfloat16(self, replay, shape, store):
        rows = self.rows_of(shape, shape.rows)
        self.check(replay, shape, rows, dtype=jnp.bfloat16, store=store, slots=2 * shape.rows + 1)

    def test_every_place_around_a_boundary(self, replay):
        # From an anchor at a boundary: before the next one, reaching it with the last token, the first, and beyond.
        shape, steps = self.odd, 4
        for first in range(0, shape.interval, 4):
            rows = [row(1 + i, 1 + i, 8, 8 + first + i, steps, 5 + i) for i in range(4)]
            self.check(replay, shape, rows, steps=steps, slots=9, entries=16)

    def test_an_anchor_between_boundaries(self, replay):
        # As a hit on the end of a prompt leaves it; c == a, c == a + 1, and one that reaches its boundary.
        rows = [row(1, 1, 5, 5, 2, 4), row(2, 2, 5, 6, 2, 5), row(3, 3, 5, 7, 2, 6)]
        self.check(replay, self.odd, rows)

    def test_the_longest_tail(self, replay):
        # No spare was left when the boundary was reached: the anchor stayed where it was.
        shape = self.odd
        far = shape.interval + shape.steps - 1
        rows = [row(1, 1, 8, 8 + far, 2, 4), row(2, 2, 16, 16 + far, 1, 5), row(3, 3, 7, 7 + far, 2, 0)]
        self.check(replay, shape, rows, entries=16)

    def test_a_row_may_write_over_its_anchor(self, replay):
        # Where no other slot is left: everything that needs the anchor is read before.
        rows = [row(1 + i, 1 + i, 8, 14 + i, 2 - i, 1 + i) for i in range(2)]
        self.check(replay, self.odd, [*rows, row(3, 3, 8, 12, 1, 3)])

    def test_a_full_ring(self, replay):
        shape = self.odd
        rows = [row(1 + i, 1 + i, 13 + i, 13 + i + 14, 2, 4 + i) for i in range(3)]
        self.check(replay, shape, rows, entries=16)

    def test_nothing_is_written_without_a_slot_or_a_boundary(self, replay):
        rows = [row(1, 1, 8, 14, 2, 0), row(2, 2, 8, 13, 2, 5), row(3, 3, 8, 14, 1, 6)]
        self.check(replay, self.odd, rows)

    def test_a_fresh_row_has_no_anchor(self, replay):
        rows = [row(0, 1, 0, 0, 2, 4), row(0, 2, 0, 7, 1, 5), row(0, 3, 0, 3, 2, 6)]
        self.check(replay, self.odd, rows)

    def test_several_rows_may_read_one_anchor(self, replay):
        self.check(replay, self.odd, [row(3, 1 + i, 8, 8 + 3 * i, 2, 4 + i) for i in range(3)])

    @DTYPES
    def test_padding_changes_nothing(self, replay, dtype):
        rows = [row(), row(1, 1, 8, 15, 1, 3), row(), row(2, 2, 8, 12, 1, 4), row(), row()]
        y, *_ = self.check(replay, self.odd, rows, dtype=dtype)
        assert (y[[0, 2, 4, 5]] == 0).all()
        assert (y[:, 1] == 0).all()

    def test_only_padding(self, replay):
        y, *_ = self.check(replay, self.odd, [row()] * 3)
        assert (y == 0).all()

    def test_strong_decay(self, replay):
        # Sums of a thousand and more: what comes later must be masked before exp.
        shape, draw = self.odd, Draw()
        rows = [row(1, 1, 8, 13, 2, 3), row(2, 2, 8, 14, 2, 4)]
        places, inputs = where(rows), self.layer(draw, shape, 2, 2)
        inputs = (inputs[0], 40 * inputs[1], 30 * inputs[2], *inputs[3:])
        old, tail = self.states(draw, shape, 5), self.fill(draw, self.tails(draw, shape, 3), places)
        tail.dt[...] *= 40
        y, new, _ = replay(old, tail, *inputs, **places, interval=shape.interval)
        want_y, want, _ = self.reference(old, tail, *inputs, **places, interval=shape.interval)
        assert_close(y, want_y)
        assert_close(new[4], want[4])

    @pytest.mark.parametrize("steps", [1, 3])
    def test_equals_snapshots(self, replay, steps):
        """A row from token to token, drafts rejected at random; `snapshots` stores every state."""
        shape, draw, random = self.odd, Draw(3), np.random.default_rng(steps)
        inputs = self.layer(draw, shape, 1, 40)
        dt, a, d = inputs[1], inputs[2], inputs[5]
        places = {"read_slot": np.zeros(1, np.int32), "write_slot": np.arange(1, 41, dtype=np.int32)[None]}
        want_y, want = jitted(self.snapshots, implementation="xla")(*inputs, self.states(draw, shape, 41), **places)
        store, tail = self.states(draw, shape, 3), self.tails(draw, shape, 2, 16)
        at, anchor, spare, start = 0, 0, 1, 0
        while at < 40 - steps:
            kept = int(random.integers(1, steps + 1))
            fed = [v[:, at : at + steps].copy() for v in (inputs[0], dt, inputs[3], inputs[4])]
            for v in fed:
                v[:, kept:] = random.normal(size=v[:, kept:].shape)  # these drafts will be rejected
            fed[1] = np.abs(fed[1])
            called = where([row(anchor, 1, start, at, steps, spare)])
            y, store, tail = replay(
                store, Tail(*tail), fed[0], fed[1], a, fed[2], fed[3], d, **called, interval=shape.interval
            )
            assert_close(y[0, :kept], want_y[0, at : at + kept])
            due, at = (at // shape.interval + 1) * shape.interval, at + kept
            if at >= due:
                assert_close(store[spare], want[due])
                start, anchor, spare = due, spare, 3 - spare
        assert start >= 32

    @pytest.mark.smoke
    @pytest.mark.parametrize(("rows", "dtype"), [(1, np.float32), (3, np.float32), (4, jnp.bfloat16)])
    @pytest.mark.parametrize("shape", [SHAPES[0], ODD, SHAPES[-2]], ids=lambda s: s.name)
    def test_in_place(self, shape, rows, dtype):
        draw = Draw()
        inputs = self.layer(draw, shape, rows, 2, dtype)
        one = self.states(draw, shape, 1, dtype)
        store = np.zeros((4_000_000 // one.size, *one.shape[1:]), one.dtype)
        entries = 2 * shape.entries
        tail = jax.tree.map(np.nan_to_num, self.tails(draw, shape, 40, entries, dtype))
        places = where([row(1 + i, 1 + i, 8, 9, 2, 1 + rows + i) for i in range(rows)])

        def run(donated, inputs, places):
            return self.operation(
                *donated, *inputs, **places, interval=shape.interval, implementation=self.implementation
            )[::-1]

        assert_in_place(run, (store, tail), inputs, places)

    @pytest.mark.slow
    @pytest.mark.parametrize("shape", MAMBA2, ids=lambda s: s.name)
    def test_real_sizes(self, replay, shape):
        shape = dataclasses.replace(shape, rows=min(shape.rows, 3))
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)


missing = native.why_missing("state_replay")


@pytest.mark.skipif(missing is not None, reason=f"native operations: {missing}")
class TestNative(Replay):
    implementation = "native"

    def test_bits_depend_neither_on_drafts_nor_on_other_rows(self, replay):
        """What a token gives, and the state at a boundary: alone, and as one of several tokens among other rows."""
        shape, draw, count = self.odd, Draw(5), 4
        alone, among = row(1, 1, 8, 13, 1, 4), row(1, 1, 8, 13, count, 4)
        others = [row(2, 2, 3, 6, 2, 5), among, row(3, 3, 8, 12, 3, 6)]
        inputs = self.layer(draw, shape, 3, count)
        old, tail = states(draw, shape, 7), self.fill(draw, self.tails(draw, shape, 4, 16), where(others))
        y, _, _ = replay(old, tail, *inputs, **where(others), interval=8)
        _, _, again = replay(old, tail, *inputs, **where([row(), among, row()]), interval=8)
        states_due = []
        for t in range(count):
            one = [v[1:2, t : t + 1] if i in self.by_token else v for i, v in enumerate(inputs)]
            place = (*alone[:3], 13 + t, *alone[4:])
            single, new, _ = replay(old, Tail(*again), *one, **where([place]), interval=8)
            assert_same_bits(single[0, 0], y[1, t])
            states_due.append(new[4])
        _, new, _ = replay(old, tail, *inputs, **where(others), interval=8)
        assert_same_bits(new[4], states_due[2])  # of token 15


class TestXla(Replay):
    implementation = "xla"


class TestXlaAllRows(Replay):
    """The form for other platforms."""

    implementation = "xla_all_rows"


class TestErrors:
    def call(self, *, entries=8, interval=8, tail=None):
        draw, places = Draw(), where([row(1, 1, 8, 8, 1)])
        tail = tails(draw, ODD, 2, entries) if tail is None else tail
        args, places = on_device(((states(draw, ODD, 3), tail, *layer(draw, ODD, 1, 1)), places))
        return state_replay(*args, **places, interval=interval)

    def test_entries(self):
        with pytest.raises(ValueError, match=r"tails have 12 entries, expected a power of two of at least 8"):
            self.call(entries=12)
        with pytest.raises(ValueError, match=r"tails have 8 entries, expected a power of two of at least 9"):
            self.call(interval=9)

    def test_interval(self):
        with pytest.raises(ValueError, match="the interval is 0, expected at least 1"):
            self.call(interval=0)

    def test_channels(self):
        tail = tails(Draw(), ODD, 2)
        with pytest.raises(ValueError, match=r"tail.b has shape \(2, 16, 7\), expected 120 channels"):
            self.call(tail=tail._replace(b=tail.b[..., :7]))
