"""What lies between a recurrent layer's projections, and the gated norm alone, against their definitions."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from call_checks import check_call, check_values, forget, numbers
from model_calls import F32, call_of
from model_shapes import DELTA, GATED, NORMS
from operation_checks import DTYPES, ELSEWHERE, Draw, assert_close, jitted, on_device
from test_recurrence_replay import row, where

from kernels_pallas.gated_norm import gated
from kernels_pallas.gated_recurrence import DeltaGates, Mamba2Gates, gated_scan
from kernels_pallas.places import Rows
from mamba_jax.layout import PrefillLayout
from tests.support.selection import slow, some_slow

pytestmark = pytest.mark.full

BF16, STEPS = jnp.bfloat16, 3
SCANNED = [s.small() for s in GATED]
# A few heads of each kind of grouping, with keys in one piece and in two.
ERASING = [
    dataclasses.replace(s, heads=2 * s.heads // s.groups, groups=2, head_dim=16, state=24 if s.state % 64 else 16)
    for s in DELTA[1:5]
]
SHAPES = [dataclasses.replace(s, interval=8, steps=STEPS) for s in (*SCANNED, *ERASING)]
PLAIN = SHAPES[0], SHAPES[len(SCANNED)]
# Rows that continue, are fresh, end before the last step, have no token, and write the slot that they read after the
# first step, with others after it.
ROWS = Rows(
    np.array([1, 0, 2, 3, 4], np.int32), np.array([[5, 6, 7], [8, 0, 9], [10, 11, 0], [0, 0, 0], [4, 0, 12]], np.int32)
)
VALID = np.array([[1, 1, 1], [1, 1, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]], bool)
# Far behind an anchor, right after it, one token after it, fresh with and without a tail, across a boundary with and
# without a slot for its state, onto an anchor between boundaries with and without inputs since, and padding.
ANCHORED = [
    row(1, 1, 8, 14, 3, 8),
    row(2, 2, 8, 8, 2, 9),
    row(3, 3, 16, 17, 1, 0),
    row(0, 4, 0, 0, 3, 10),
    row(0, 5, 0, 2, 3, 11),
    row(4, 6, 8, 15, 3, 0),
    row(5, 7, 5, 7, 2, 5),
    row(6, 8, 7, 7, 3, 6),
    row(),
]
# Rows of less than a convolution looks back, cut by a tile's end two tokens after their first, of whole tiles, fresh
# and continued; they begin anywhere, and some slots are written by the row that reads them.
RAGGED = {
    "rows": [(0, 1, 0), (14, 21, 1), (0, 0, 0), (32, 32, 2), (5, 3, 3), (0, 17, 0)],
    "tokens": 96,
    "tiles": 12,
    "writes": [4, 5, 1, 0, 0, 6, 7, 0, 8],
}
KINDS = pytest.mark.parametrize("shape", PLAIN, ids=["mamba2", "delta"])
BLOCKS = "kernels_pallas.gated_recurrence.pallas_tpu.BLOCK_BYTES"


def gates(shape):
    if not shape.erase:
        return Mamba2Gates((1e-3, 0.7), 1e-5, shape.norm_before_gate)
    if shape.by_channel:
        return DeltaGates(beta_scale=1.0, log_decay_bound=-5.0, activation="sigmoid", eps=1e-5)
    return DeltaGates(beta_scale=2.0, log_decay_bound=None, activation="silu", eps=1e-6)


def check_update(implementation, shape, dtype=F32, states=F32):
    given, shape = {"rows": ROWS, "valid": VALID}, dataclasses.replace(shape, rows=len(VALID))
    options = {"static": {"gates": gates(shape)}, "padding": ~VALID, "tolerance": 1e-4}
    check_call("gated_update", shape, implementation, dtype=dtype, states=states, given=given, **options)


def check_replay(implementation, shape, dtype=F32, states=F32):
    """With NaN in slot 0, in tail 0 and where no token since the anchor is."""
    places, shape = where(ANCHORED, shape), dataclasses.replace(shape, rows=len(ANCHORED))
    values = numbers(dict(call_of("gated_replay", shape, dtype, states, gates=gates(shape)).arguments))
    values["places"] = places
    for ring in jax.tree.leaves(values["tail"]):
        forget(ring, places, places.anchor_length)
    for ring in jax.tree.leaves(values["windows"][2:]):
        forget(ring, places, np.maximum(places.anchor_length, places.length - ring.shape[1] + STEPS))
    padding = np.arange(STEPS) >= places.num_tokens[:, None]
    options = {"dtype": dtype, "states": states, "tolerance": 1e-4}
    check_values("gated_replay", values, implementation, padding=padding, **options)


def check_scan(implementation, shape, dtype=F32, *, rows, tokens, tiles, writes, gates=gates, anew=False):
    """Of rows given as (tokens absorbed before, tokens fed, slot to read)."""
    length, fed, read = (jnp.asarray(v, jnp.int32) for v in zip(*rows, strict=True))
    layout = PrefillLayout.of(
        num_packed=tokens, tile_size=shape.tile_size, length=length, num_tokens=fed, read_slot=read,
        tile_write_slot=jnp.zeros(tiles, jnp.int32).at[: len(writes)].set(jnp.array(writes, jnp.int32)),
        page_table=jnp.zeros((len(rows), 1), jnp.int32),
    )  # fmt: skip
    sizes, chosen = dataclasses.replace(shape, tiles=-(-tokens // shape.tile_size)), {"gates": gates(shape)}
    if anew:
        implementation = jitted.__wrapped__(gated_scan, implementation=implementation, **chosen)
    y, *_ = check_call(
        "gated_scan", sizes, implementation, dtype=dtype, states=dtype, static=chosen,
        given={"packed": jax.tree.map(np.asarray, layout.packed)}, padding=np.arange(tokens) >= sum(fed),
        tolerance=1e-4,
    )  # fmt: skip
    assert np.isfinite(y.astype(np.float32)).all()


DECODES = pytest.mark.parametrize("check", [check_update, check_replay])
GPU = pytest.mark.parametrize("implementation", ["xla", "pallas_gpu_interpreted"])
TPU = pytest.mark.parametrize("implementation", ["pallas_tpu_interpreted", "xla"])


@pytest.mark.smoke
@GPU
@DECODES
@pytest.mark.parametrize("shape", some_slow(SHAPES, SHAPES[1], *SHAPES[5:7]), ids=lambda s: s.name)
def test_decode_equals_definition(implementation, check, shape):
    check(implementation, shape)


@GPU
@DECODES
@pytest.mark.parametrize("states", some_slow([BF16, F32], F32), ids=["bfloat16", "float32"])
@KINDS
def test_decode_in_bfloat16(implementation, check, states, shape):
    check(implementation, shape, BF16, states)


@GPU
@pytest.mark.parametrize("check", some_slow([check_update, check_replay], check_replay))
def test_three_groups_of_odd_width(implementation, check):
    check(implementation, dataclasses.replace(PLAIN[0], heads=9, groups=3, head_dim=24))


@pytest.mark.smoke
@TPU
@pytest.mark.parametrize("shape", some_slow(SCANNED, SCANNED[1]), ids=lambda s: s.name)
def test_scan_equals_definition(implementation, shape):
    check_scan(implementation, shape, **RAGGED)


# Rows fill the array, and a tile ends with it; and there are none.
FULL, EMPTY = [(0, 9, 0), (9, 7, 1)], [(0, 0, 0), (3, 0, 1)]


@TPU
@pytest.mark.parametrize(
    ("dtype", "rows", "tokens", "tiles", "writes"),
    [
        (BF16, *RAGGED.values()),
        (F32, FULL, 16, 5, [2, 3]),
        slow(F32, [(0, 41, 0), FULL[1]], 48, 5, [2, 3, 4, 5]),
        (F32, EMPTY, 16, 2, []),
    ],
    ids=["bfloat16", "one full tile", "full tiles", "nothing"],
)
def test_scan_of_any_rows(implementation, dtype, rows, tokens, tiles, writes):
    check_scan(implementation, SCANNED[0], dtype, rows=rows, tokens=tokens, tiles=tiles, writes=writes)


@pytest.mark.parametrize(
    ("groups", "norm"), [(1, True), slow(1, False), slow(4, True)], ids=["wide", "wide, no norm", "several"]
)
def test_scan_in_several_blocks_on_tpu(groups, norm, monkeypatch):
    # Blocks of 8 heads: half of a group, so that the norm comes after the kernel, or two of them.
    monkeypatch.setattr(BLOCKS, 8 * 32 * 128 * 4)
    shape = dataclasses.replace(SCANNED[0], heads=16, groups=groups, state=128, norm=norm)
    # Without a norm, where it would come means nothing.
    chosen = partial(Mamba2Gates, (0.0, 1.0), 1e-5)
    check_scan("pallas_tpu_interpreted", shape, **RAGGED, gates=lambda _: chosen(not norm), anew=True)


@pytest.mark.smoke
@pytest.mark.parametrize("implementation", ["xla", ELSEWHERE])
@DTYPES
@pytest.mark.parametrize(
    "gating", [{}, {"norm_before_gate": True}, {"norm_before_gate": True, "activation": "sigmoid"}], ids=str
)
@pytest.mark.parametrize("shape", [s.small() for s in NORMS], ids=lambda s: s.name)
def test_norm_equals_definition(implementation, shape, gating, dtype):
    values = numbers(dict(call_of("gated_rms_norm", shape, dtype, **gating).arguments))
    values["y"][0] *= 1e-3  # where eps counts
    check_values("gated_rms_norm", values, implementation, dtype=dtype)
    values |= {name: values[name][:6].reshape(2, 3, -1) for name in ("y", "gate")}
    check_values("gated_rms_norm", values, implementation, dtype=dtype)


@DTYPES
def test_the_gate_alone(dtype):
    draw = Draw()
    y, z = (draw.normal(2, 3, 12, dtype=dtype) for _ in range(2))
    wide = z.astype(np.float64)
    out = gated(*on_device((y, z)))
    assert out.dtype == dtype
    assert_close(out, y.astype(np.float64) * wide / (1 + np.exp(-wide)), dtype)
