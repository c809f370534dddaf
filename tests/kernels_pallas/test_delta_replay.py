"""The delta rule's replay against its definition, and what holds for any implementation of a replay."""

import contextlib
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from operation_checks import Draw, assert_close, assert_same_bits, jitted, on_device
from test_state_replay import Replay, fill, row, states, tails, where

from benchmarks.kernels.workloads import DELTA
from kernels_pallas import tails as rings
from kernels_pallas.delta_replay import DeltaTail, by_channel, by_head, delta_replay, reference
from kernels_pallas.delta_update import delta_update

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in DELTA]
ODD, BY_CHANNEL = (s for s in SHAPES if s.name.startswith("6 heads, 3 groups"))


def layer(draw, shape, rows, steps, dtype=np.float32):
    keys, heads = (rows, steps, shape.groups, shape.state), (rows, steps, shape.heads)
    gates = (*heads, shape.state) if shape.by_channel else heads
    return (
        draw.normal(*keys, scale=shape.state**-0.5, dtype=dtype),
        draw.normal(*keys, scale=shape.state**-0.5, dtype=dtype),
        draw.normal(*heads, shape.head_dim, dtype=dtype),
        -draw.positive(*gates, scale=0.3),
        np.minimum(draw.positive(*heads, scale=0.5), 1),
    )


class DeltaReplay(Replay):
    operation = staticmethod(delta_replay)
    reference = staticmethod(reference.delta_replay)
    layer = staticmethod(layer)
    by_token = range(5)
    odd, strongest = ODD, 2e-3
    test_real_sizes = None

    @staticmethod
    def tails(draw, shape, *args, **kwargs):
        found = DeltaTail(*tails(draw, shape, *args, **kwargs))
        if not shape.by_channel:
            return found
        return found._replace(log_decay=np.repeat(found.log_decay, shape.state, axis=2))

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

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
    def test_equals_definition(self, replay, shape):
        self.check(replay, shape, self.rows_of(shape, shape.rows), slots=2 * shape.rows + 1)

    @pytest.mark.parametrize("shape", [ODD, BY_CHANNEL], ids=lambda s: s.name)
    @pytest.mark.parametrize("store", [np.float32, jnp.bfloat16], ids=["float32 states", "bfloat16 states"])
    def test_bfloat16(self, replay, shape, store):
        self.check(replay, shape, self.rows_of(shape, 5), dtype=jnp.bfloat16, store=store, slots=11)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", [ODD, BY_CHANNEL], ids=lambda s: s.name)
    @pytest.mark.parametrize(("rows", "dtype"), [(1, np.float32), (4, jnp.bfloat16)])
    def test_in_place(self, shape, rows, dtype):
        super().test_in_place(shape, rows, dtype)

    def test_strong_decay(self, replay):
        """Small decays next to decays whose inverse would overflow: in the tail, after it, and at the multiple."""
        draw, places = Draw(), where([row(1, 1, 8, 13, 4, 3), row(2, 2, 8, 14, 4, 4), row(1, 3, 8, 22, 2, 5)])
        q, k, v, log_decay, beta = self.layer(draw, self.odd, 3, 4)
        old, tail = states(draw, self.odd, 6), self.fill(draw, self.tails(draw, self.odd, 4, 16), places)
        for decays in (log_decay, tail.log_decay):
            decays *= draw.random.choice([1e-4, 1e-2, 1.0, 30.0, 3000.0], decays.shape, p=[0.4, 0.3, 0.2, 0.05, 0.05])
        inputs = (q, k, v, log_decay, beta)
        y, new, new_tail = replay(old, tail, *inputs, **places, interval=self.odd.interval)
        want_y, want, want_tail = self.reference(old, tail, *inputs, **places, interval=self.odd.interval)
        assert_close(y, want_y, tolerance=self.strongest)
        assert_close(new[3:], want[3:], tolerance=self.strongest)
        there = ~np.isnan(want_tail[0])
        assert_close(new_tail.u[there], want_tail[0][there], tolerance=self.strongest)

    @pytest.mark.parametrize("steps", [1, 3])
    def test_equals_snapshots(self, replay, steps):
        """A row from token to token, drafts rejected at random; `delta_update` stores every state."""
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


class ByChannel:
    """Every channel of a key decays on its own."""

    odd, strongest = BY_CHANNEL, 5e-5
    test_equals_definition = test_bfloat16 = test_in_place = None  # above, with all sizes


class TestXlaByChannel(ByChannel, TestXla):
    pass


@pytest.mark.slow
class TestXlaAllRowsByChannel(ByChannel, TestXlaAllRows):
    pass


def _own_decay_counts(patch):
    sound = lax.cumsum
    patch.setattr(lax, "cumsum", lambda v, **how: sound(jnp.roll(v, 1, axis=how["axis"]), **how))


def _new_decays_reach_the_anchor_twice(patch):
    sound = by_channel.ByChannel._around
    patch.setattr(by_channel.ByChannel, "_around", lambda self, which: sound(self, self.order.valid))


def _own_key_is_not_found(patch):
    patch.setattr(by_channel, "dot", lambda how, *v: by_head.dot(how, *v) * (how != "rths,rths->rth"))


def _stale_decays_count(patch):
    sound = rings.in_order

    def unmasked(kept, order, tail_id, *shape):
        return sound(kept, dataclasses.replace(order, valid=jnp.ones_like(order.valid)), tail_id, *shape)

    patch.setattr(rings, "in_order", unmasked)


def _keys_of_other_groups(patch):
    def own(self, keys):
        return jnp.tile(keys, (1, 1, self.new.shape[2] // keys.shape[2], 1))

    patch.setattr(by_channel.ByChannel, "_own", own)


@pytest.mark.parametrize(
    "plant",
    [
        None,
        _own_decay_counts,
        _new_decays_reach_the_anchor_twice,
        _own_key_is_not_found,
        _stale_decays_count,
        _keys_of_other_groups,
    ],
)
def test_faults_of_decays_by_channel_show(plant, monkeypatch):
    """What is planted in them, one call sees: rows before a multiple, at it and beyond."""
    case = TestXlaByChannel()
    if plant is not None:
        plant(monkeypatch)

    def fresh(*arrays, interval, **places):
        run = jax.jit(lambda arrays, places: delta_replay(*arrays, **places, interval=interval))
        return jax.tree.map(np.asarray, run(*on_device((arrays, places))))

    rows = [row(1, 1, 8, 11, 2, 4), row(2, 2, 8, 14, 2, 5), row(3, 3, 8, 15, 2, 6)]
    with contextlib.nullcontext() if plant is None else pytest.raises(AssertionError):
        case.check(fresh, BY_CHANNEL, rows, entries=16)
