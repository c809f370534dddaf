"""What lies between a Mamba2 layer's projections, against its definition, and what holds for any implementation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_gated_recurrence as decode
from model_shapes import GATED
from operation_checks import Draw, assert_close, assert_same_bits, jitted

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.gated_recurrence import Mamba2Gates, gated_scan, pallas_tpu, reference
from mamba_jax.layout import PrefillLayout
from tests.support.selection import slow

pytestmark = pytest.mark.full

SHAPES = [s.small() for s in GATED]
PLAIN = SHAPES[0]
BLOCK_BYTES = pallas_tpu.BLOCK_BYTES


def places(shape, rows, *, tokens, tiles, writes):
    """Of rows given as (tokens absorbed before, tokens fed, slot to read)."""
    length, fed, read = (jnp.asarray(v, jnp.int32) for v in zip(*rows, strict=True))
    write = np.zeros(tiles, np.int32)
    write[: len(writes)] = writes
    layout = PrefillLayout.of(
        num_packed=tokens, tile_size=shape.tile_size, length=length, num_tokens=fed, read_slot=read,
        tile_write_slot=jnp.asarray(write), page_table=jnp.zeros((len(rows), 1), jnp.int32),
    )  # fmt: skip
    return jax.tree.map(np.asarray, layout.packed)


def layer(draw, shape, tokens, dtype=np.float32):
    of_groups, (_, weights) = (tokens, shape.groups, shape.state), decode.layer(draw, shape, 1, 1, dtype)
    return (
        draw.normal(tokens, 2, shape.heads * shape.head_dim, dtype=dtype),
        draw.normal(*of_groups, dtype=dtype),
        draw.normal(*of_groups, dtype=dtype),
        -draw.positive(tokens, shape.heads, scale=0.3),
        draw.positive(tokens, shape.heads, scale=0.3),
        weights,
    )


def stores(draw, shape, dtype=np.float32):
    return decode.stores(draw, shape, dtype)[:2]


# Rows of less than a convolution looks back, cut by a tile's end two tokens after their first, of whole tiles, fresh
# and continued; they begin anywhere, and some slots are written by the row that reads them.
RAGGED = {
    "rows": [(0, 1, 0), (14, 21, 1), (0, 0, 0), (32, 32, 2), (5, 3, 3), (0, 17, 0)],
    "tokens": 96,
    "tiles": 12,
    "writes": [4, 5, 1, 0, 0, 6, 7, 0, 8],
}


class GatedScan:
    """Every implementation."""

    implementation: str

    def run(self, gates, *arguments):
        # Compiled anew where a test changes the kernel's blocks.
        compiled = jitted.__wrapped__ if pallas_tpu.BLOCK_BYTES != BLOCK_BYTES else jitted
        return compiled(gated_scan, implementation=self.implementation, gates=gates)(*arguments)

    def check(self, shape, where, dtype=np.float32, gates=None):
        draw, gates = Draw(), gates or decode.gates(shape)
        inputs, before = layer(draw, shape, where["tokens"], dtype), stores(draw, shape, dtype)
        there = places(shape, **where)
        y, *after = self.run(gates, *inputs, *before, there)
        want_y, *want = reference.gated_scan(*inputs, *before, there, gates=gates)
        real = sum(fed for _, fed, _ in where["rows"])
        assert y.dtype == dtype
        assert np.isfinite(y.astype(np.float32)).all()
        assert_close(y[:real], want_y[:real], dtype, None if dtype == jnp.bfloat16 else 1e-4)
        assert_close(after[0][1:], want[0][1:], dtype)
        assert_same_bits(after[1][1:], want[1][1:])
        untouched = [slot for slot in range(1, decode.SLOTS) if slot not in where["writes"]]
        assert_same_bits(after[0][untouched], before[0][untouched])

    @pytest.mark.smoke
    @pytest.mark.parametrize(
        "shape",
        [pytest.param(s, marks=[pytest.mark.slow] * (s.name in ("bamba-9b", "mamba2-2.7b"))) for s in SHAPES],
        ids=lambda s: s.name,
    )
    def test_equals_definition(self, shape):
        self.check(shape, RAGGED)

    def test_bfloat16(self):
        self.check(PLAIN, RAGGED, jnp.bfloat16)

    @pytest.mark.parametrize("tokens", [16, slow(48)])
    def test_no_token_more_than_there_is_room_for(self, tokens):
        # Rows fill the array, and a tile ends with it.
        rows = [(0, tokens - 7, 0), (9, 7, 1)]
        self.check(PLAIN, {"rows": rows, "tokens": tokens, "tiles": 5, "writes": [2, 3, 4, 5][: tokens // 16 + 1]})

    def test_nothing_to_do(self):
        self.check(PLAIN, {"rows": [(0, 0, 0), (3, 0, 1)], "tokens": 16, "tiles": 2, "writes": []})


class TestXla(GatedScan):
    implementation = "xla"


class TestTpu(GatedScan):
    implementation = "pallas_tpu_interpreted"

    @pytest.mark.parametrize("norm", [True, slow(False)])
    def test_groups_wider_than_a_block(self, norm, monkeypatch):
        # Two blocks of 8 heads, each half of a group: the norm comes after the kernel.
        monkeypatch.setattr("kernels_pallas.gated_recurrence.pallas_tpu.BLOCK_BYTES", 8 * 32 * 128 * 4)
        shape = dataclasses.replace(PLAIN, heads=16, groups=1, state=128, norm=norm)
        # Without a norm, where it would come means nothing.
        self.check(shape, RAGGED, gates=Mamba2Gates((0.0, 1.0), 1e-5, not norm))

    @pytest.mark.slow
    def test_several_blocks_and_groups(self, monkeypatch):
        monkeypatch.setattr("kernels_pallas.gated_recurrence.pallas_tpu.BLOCK_BYTES", 8 * 32 * 128 * 4)
        self.check(dataclasses.replace(PLAIN, name="16 heads, 4 groups", heads=16, groups=4, state=128), RAGGED)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"tile_size": 8}, "96 tokens in tiles of 8, not multiples of 16"),
            ({"width": 10}, "a convolution over 10 inputs, more than 9"),
            ({"head_dim": 24}, "8 heads of 24, not a multiple of 128 channels"),
            ({"head_dim": 16}, "a norm of 64 channels, no multiple of 128"),
        ],
    )
    def test_says_what_it_cannot_run(self, change, reason):
        shape, draw = dataclasses.replace(PLAIN, **change), Draw()
        where = {**RAGGED, "tiles": 20}
        with pytest.raises(UnsupportedError, match=reason):
            self.run(decode.gates(shape), *layer(draw, shape, 96), *stores(draw, shape), places(shape, **where))
