"""The delta rule's replay against its definition, and what holds for any implementation of a replay."""

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, assert_same_bits, jitted
from test_state_replay import Replay, fill, row, states, tails, where

from kernels_pallas.delta_replay import DeltaTail, delta_replay, reference, shapes
from kernels_pallas.delta_update import delta_update

SHAPES = [s.small() for s in shapes.SHAPES]
ODD = next(s for s in SHAPES if s.name == "6 heads, 3 groups")


def layer(draw, shape, rows, steps, dtype=np.float32):
    keys, heads = (rows, steps, shape.groups, shape.state), (rows, steps, shape.heads)
    return (
        draw.normal(*keys, scale=shape.state**-0.5, dtype=dtype),
        draw.normal(*keys, scale=shape.state**-0.5, dtype=dtype),
        draw.normal(*heads, shape.head_dim, dtype=dtype),
        -draw.positive(*heads, scale=0.3),
        np.minimum(draw.positive(*heads, scale=0.5), 1),
    )


class DeltaReplay(Replay):
    operation = staticmethod(delta_replay)
    reference = staticmethod(reference.delta_replay)
    layer = staticmethod(layer)
    by_token = range(5)
    odd = ODD
    test_strong_decay = None
    test_real_sizes = None

    @staticmethod
    def tails(*args, **kwargs):
        return DeltaTail(*tails(*args, **kwargs))

    @staticmethod
    def fill(draw, tail, places):
        filled = fill(draw, tail, places, lambda draw, heads: -draw.positive(heads, scale=0.3))
        return filled._replace(k=(filled.k * 0.2).astype(filled.k.dtype))

    def check_tail(self, tail, expected, dtype):
        for ours, theirs in zip(tail[1:], expected[1:], strict=True):
            assert_same_bits(ours[1:], theirs[1:])
        ours, theirs = tail.u[1:], np.asarray(expected[0])[1:]
        there = ~np.isnan(theirs.astype(np.float32))
        assert (np.isnan(ours.astype(np.float32)) == ~there).all()
        assert_close(ours[there], theirs[there], dtype)

    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("shape", [ODD])
    @pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
    def test_bfloat16(self, replay, shape, store):
        self.check(replay, shape, self.rows_of(shape, 5), dtype=jnp.bfloat16, store=store, slots=11)

    @pytest.mark.parametrize("shape", [ODD])
    @pytest.mark.parametrize(("rows", "dtype"), [(1, np.float32), (4, jnp.bfloat16)])
    def test_in_place(self, shape, rows, dtype):
        super().test_in_place(shape, rows, dtype)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_equals_snapshots(self, replay, steps):
        """A row from token to token, drafts rejected at random, beside `delta_update`, which keeps every state."""
        shape, draw, random = self.odd, Draw(3), np.random.default_rng(steps)
        inputs = layer(draw, shape, 1, 40)
        places = {"read_slot": np.zeros(1, np.int32), "write_slot": np.arange(1, 41, dtype=np.int32)[None]}
        want_y, want = jitted(delta_update, implementation="xla")(*inputs, states(draw, shape, 41), **places)
        store, tail = states(draw, shape, 3), self.tails(draw, shape, 2, 16)
        at, anchor, spare, start = 0, 0, 1, 0
        while at < 40 - steps:
            kept = int(random.integers(1, steps + 1))
            fed = [v[:, at : at + steps].copy() for v in inputs]
            for v in fed[:3]:
                v[:, kept:] = random.normal(size=v[:, kept:].shape)  # these drafts will be rejected
            called = where([row(anchor, 1, start, at, steps, spare)])
            y, store, tail = replay(store, DeltaTail(*tail), *fed, **called, interval=shape.interval)
            assert_close(y[0, :kept], want_y[0, at : at + kept])
            due, at = (at // shape.interval + 1) * shape.interval, at + kept
            if at >= due:
                assert_close(store[spare], want[due])
                start, anchor, spare = due, spare, 3 - spare
        assert start >= 32


class TestXla(DeltaReplay):
    implementation = "xla"


class TestXlaAllRows(DeltaReplay):
    """The form for other platforms."""

    implementation = "xla_all_rows"
