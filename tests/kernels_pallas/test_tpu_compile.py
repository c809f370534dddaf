"""Kernels compiled by the TPU's own compiler at the sizes of real models: it takes them (so VMEM suffices), they update
the store in place, and allocates nothing of the store's size.

One of each of two kernels by default, a few with --full; all with --slow.
"""

import functools
import re

import jax.numpy as jnp
import pytest
from real_shapes import (
    BF16,
    F32,
    LIGHTNING,
    MODELS,
    OTHERS,
    attention_call,
    gated_scan_call,
    nbytes,
    scan_call,
    shape,
    update_call,
)
from topology import SLICES, compile_for_tpu

from kernels_pallas.causal_conv1d import causal_conv1d_update
from kernels_pallas.gated_scan import gated_scan
from kernels_pallas.paged_attention import paged_attention
from kernels_pallas.ssd_scan import ssd_scan
from kernels_pallas.state_update import state_update
from tests.support.hlo_traffic import Traffic
from tests.support.selection import slow

pytestmark = [pytest.mark.tpu_compile, pytest.mark.full]

STORE = 6
NEMOTRON, NANO, BAMBA, _ = MODELS


def update(*args):
    *inputs, read, write = args
    return state_update(*inputs, read_slot=read, write_slot=write, implementation="pallas_tpu")


def scan(x, dt, a, b, c, d, store, first, read, write):
    y, store = ssd_scan(
        x, dt, a, b, c, d, store, tile_first=first, read_slot=read, write_slot=write, implementation="pallas_tpu"
    )
    return y, store


def check_in_place(slice_name, operation, call, store=STORE):
    compiled = compile_for_tpu(slice_name, operation, *call, donate=store)
    memory = compiled.memory_analysis()
    state = call[store].shape[-1]
    # States of fewer numbers than a register has lanes take the padding.
    assert memory.alias_size_in_bytes == nbytes(call[store]) // state * (-(-state // 128) * 128)
    # Besides the kernel there is only what brings its inputs into its form.
    inputs = sum(nbytes(v) for v in call) - nbytes(call[store])
    assert memory.temp_size_in_bytes <= max(4 * inputs, 1 << 20)
    assert "tpu_custom_call" in compiled.as_text()
    assert "input_output_alias" in compiled.as_text()
    return compiled


def unique(models):
    """Models whose calls differ: some share the sizes of their Mamba layers."""
    return {(m.heads, m.head_dim, m.groups, m.state): m for m in reversed(models)}.values()


DIVIDED = unique([m.divided(n) for n in (1, 4, 8) for m in MODELS])
FEW = [
    ("v5e", NEMOTRON, 64, 4, F32),
    ("v6e", BAMBA.divided(4), 256, 1, F32),
    ("tpu7x", NANO.divided(8), 8, 4, BF16),
]
ALL = [
    (name, model, rows, steps, F32)
    for name in SLICES
    for model in DIVIDED
    for rows in (1, 8, 64, 256)
    for steps in (1, 4)
]
ALL += [(name, model, 64, 4, BF16) for name in SLICES for model in DIVIDED]
ALL += [(name, model, 8, steps, F32) for name in SLICES for model in OTHERS for steps in (1, 4)]


def cases(few, everything):
    found = [pytest.param(*c, id=describe(*c)) for c in few]
    return found + [pytest.param(*c, id=describe(*c), marks=pytest.mark.slow) for c in everything if c not in few]


def describe(slice_name, model, *rest):
    return " ".join([slice_name, model.name, *(str(getattr(r, "__name__", r)) for r in rest)])


@pytest.mark.smoke
@pytest.mark.parametrize(("slice_name", "model", "rows", "steps", "store"), cases(FEW, ALL))
def test_state_update(slice_name, model, rows, steps, store):
    call = update_call(model, rows, steps, store=store)
    compiled = check_in_place(slice_name, update, call)
    # Bytes moved: the states, once in and once out for each step, and little else.
    slot = nbytes(call[STORE]) // call[STORE].shape[0]
    least = rows * (1 + steps) * slot
    assert Traffic(compiled.as_text()).total() <= 1.1 * least + (1 << 20)


FEW_SCANS = [
    ("v5e", NEMOTRON.divided(8), 16, 128, F32),
    ("v6e", BAMBA.divided(8), 1, 128, BF16),
    ("tpu7x", NANO.divided(8), 16, 128, F32),
    ("v6e", LIGHTNING.divided(8), 16, 128, F32),
]
ALL_SCANS = [(name, model, tiles, 128, F32) for name in SLICES for model in DIVIDED for tiles in (1, 16)]
ALL_SCANS += [(name, model, 16, 128, BF16) for name in SLICES for model in DIVIDED]
ALL_SCANS += [(name, model, 16, 128, F32) for name in SLICES for model in OTHERS]
ALL_SCANS += [(name, NEMOTRON, 64, 256, F32) for name in SLICES]


@pytest.mark.parametrize(("slice_name", "model", "tiles", "tile_size", "store"), cases(FEW_SCANS, ALL_SCANS))
def test_ssd_scan(slice_name, model, tiles, tile_size, store):
    check_in_place(slice_name, scan, scan_call(model, tiles, tile_size=tile_size, store=store))


@pytest.mark.slow
@pytest.mark.parametrize("slice_name", SLICES)
def test_float32_inputs(slice_name):
    check_in_place(slice_name, scan, scan_call(NEMOTRON.divided(8), 4, dtype=jnp.float32))
    check_in_place(slice_name, update, update_call(NEMOTRON, 8, 4, dtype=jnp.float32))


def test_tiles_of_a_long_prompt():
    # XLA would copy an operand of many tiles if it did not like its layout.
    model = NANO.divided(8)
    compiled = check_in_place("v5e", scan, scan_call(model, 256, slots=256))
    assert compiled.memory_analysis().temp_size_in_bytes < nbytes(scan_call(model, 256)[0]) * 2


def between_projections(*args):
    *inputs, places = args
    return gated_scan(*inputs, eps=1e-5, implementation="pallas_tpu", **places)


FEW_GATED = [
    ("v5e", NEMOTRON, 18, 128),
    ("v6e", NEMOTRON.divided(8), 18, 128),
    ("tpu7x", NANO.divided(8), 18, 128),
]
# Lightning attention has no gated scan.
ALL_GATED = [(name, m, 18, 128) for name in SLICES for m in (*DIVIDED, *OTHERS) if m is not LIGHTNING]
ALL_GATED += [(name, BAMBA, 10, 256) for name in SLICES]
GATED_STORES = (9, 10)


@pytest.mark.parametrize(("slice_name", "model", "tiles", "tile_size"), cases(FEW_GATED, ALL_GATED))
def test_gated_scan(slice_name, model, tiles, tile_size):
    call = gated_scan_call(model, tiles, tile_size=tile_size)
    compiled = compile_for_tpu(slice_name, between_projections, *call, donate=GATED_STORES)
    memory, (zx, *_), stores = compiled.memory_analysis(), call, [call[i] for i in GATED_STORES]
    assert memory.alias_size_in_bytes == sum(map(nbytes, stores))
    # Arguments come as [tokens, 2, inner] here, and are laid out flat; a layer's product gives them so.
    assert memory.temp_size_in_bytes <= 1.1 * nbytes(zx)
    assert "tpu_custom_call" in compiled.as_text()


FEW_ATTENTION = [("v5e", NANO, 64, 4), ("v6e", NEMOTRON.divided(8), 64, 1), ("tpu7x", NANO.divided(8), 16, 128)]
ATTENDING = {(m.q_heads, m.kv_heads): m for n in (8, 4, 1) for m in (*OTHERS[:2], *MODELS) for m in [m.divided(n)]}
ALL_ATTENTION = [
    (name, model, *blocks)
    for name in SLICES
    for model in ATTENDING.values()
    for blocks in ((1, 1), (256, 1), (64, 4), (16, 128))
]


@pytest.mark.smoke
@pytest.mark.parametrize(("slice_name", "model", "blocks", "q_len"), cases(FEW_ATTENTION, ALL_ATTENTION))
def test_paged_attention(slice_name, model, blocks, q_len):
    run = functools.partial(paged_attention, scale=0.1, implementation="pallas_tpu")
    call = attention_call(model, blocks, q_len)

    def attend(q, kv, positions, page_table, block_row):
        return run(q, kv, positions=positions, page_table=page_table, block_row=block_row)

    compiled = compile_for_tpu(slice_name, attend, *call)
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= max(8 * nbytes(call[0]), 1 << 20)


@pytest.mark.parametrize(
    ("page_size", "context", "calls"),
    [(128, 1 << 18, 1), slow(32, 1 << 18, 3), slow(128, 1 << 20, 3)],
)
def test_paged_attention_with_tables_of_long_contexts(page_size, context, calls):
    """64 rows: the default page size on TPU holds 262,144 tokens in one call, other sizes take more."""
    pages = context // page_size + 1
    call = attention_call(NEMOTRON.divided(8), 64, 1, page_size=page_size, pages_per_row=pages)

    def attend(q, kv, positions, page_table, block_row):
        places = {"positions": positions, "page_table": page_table, "block_row": block_row}
        return paged_attention(q, kv, **places, scale=0.1, implementation="pallas_tpu")

    text = compile_for_tpu("v6e", attend, *call).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == calls


@pytest.mark.parametrize("slice_name", ["v5e", slow("v6e"), slow("tpu7x")])
def test_paged_attention_over_a_cache_in_8_bits(slice_name):
    q, kv, *places = attention_call(NEMOTRON, 64, 1)
    kv = shape(*kv.shape, dtype=jnp.float8_e4m3fn)

    def attend(q, kv, positions, page_table, block_row):
        places = {"positions": positions, "page_table": page_table, "block_row": block_row}
        return paged_attention(q, kv, **places, scale=0.1, implementation="pallas_tpu")

    compiled = compile_for_tpu(slice_name, attend, q, kv, *places)
    assert "tpu_custom_call" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes <= max(8 * nbytes(q), 1 << 20)


def test_convolution_copies_no_store():
    rows, steps, channels = 64, 4, 8192
    store, index = shape(400, 3, channels, dtype=BF16), functools.partial(shape, dtype=jnp.int32)
    call = (shape(rows, steps, channels, dtype=BF16), shape(channels, 4, dtype=BF16), shape(channels, dtype=BF16))

    def update(store, x, weight, bias, read, write):
        return causal_conv1d_update(x, weight, bias, store, read_slot=read, write_slot=write)

    compiled = compile_for_tpu("v5e", update, store, *call, index(rows), index(rows, steps), donate=0)
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(store)
    assert not re.findall(r"\w+\[400,3,8192\]\S* (?:copy|convert|transpose|bitcast-convert)\(", compiled.as_text())
