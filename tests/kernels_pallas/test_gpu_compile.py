"""Kernels compiled by XLA's compiler for an H200 that is not at hand, at the sizes of real models: it takes them,
stores are updated in place, caches are not copied, and registers are not spilled.

A few with --full; all with --slow.
"""

import jax
import jax.numpy as jnp
import pytest
from real_shapes import (
    BF16,
    I32,
    MODELS,
    OTHERS,
    attention_call,
    gated_update_call,
    nbytes,
    scan_call,
    shape,
    update_call,
)
from test_gpu_lower import scan, update
from topology import compile_for_gpu, registers_of_kernels

from kernels_pallas.gated_update import gated_update
from kernels_pallas.paged_attention import paged_attention
from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

NEMOTRON, NANO, *_ = MODELS
STORE, STORES = 6, (11, 12, 13)


def compiled(tmp_path, operation, call, donate=None):
    """The program, and registers and spilled bytes of its Triton kernels."""
    done = compile_for_gpu("h200", operation, *call, donate=donate, xla_dump_to=str(tmp_path))
    return done, registers_of_kernels(tmp_path)


def attend(q, kv, positions, page_table, block_row):
    places = {"positions": positions, "page_table": page_table, "block_row": block_row}
    return paged_attention(q, kv, **places, scale=0.1, first_key=1, implementation="pallas_gpu")


@pytest.mark.parametrize(("model", "steps"), [(NEMOTRON, 1), *(slow(m, 4) for m in (NANO, *OTHERS))])
def test_state_update(model, steps, tmp_path):
    call = update_call(model, 64, steps)
    program, registers = compiled(tmp_path, update, call, donate=STORE)
    assert program.memory_analysis().alias_size_in_bytes == nbytes(call[STORE])
    used, spilled = registers["state_update"]
    assert used <= 168
    assert spilled == 0


def between_projections(*args):
    *inputs, places = args
    options = {"eps": 1e-5, "dt_limit": (1e-3, float("inf")), "implementation": "pallas_gpu"}
    return gated_update(*inputs, **places, **options)


@pytest.mark.parametrize(("model", "steps"), [(NEMOTRON, 1), (NANO, 4), *(slow(m, 4) for m in OTHERS)])
def test_gated_update(model, steps, tmp_path):
    call = gated_update_call(model, 64, steps)
    program, registers = compiled(tmp_path, between_projections, call, donate=STORES)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == sum(nbytes(call[n]) for n in STORES)
    # The projections' outputs in one array, and y.
    assert memory.temp_size_in_bytes < 3 * (2 * nbytes(call[0]) + nbytes(call[1]))
    for kernel in ("gated_update", "gated_norm"):
        used, spilled = registers[kernel]
        assert used <= (168 if model.state <= 128 else 232)
        assert spilled == 0


@pytest.mark.parametrize("model", [NEMOTRON, *(slow(m) for m in (NANO, *OTHERS))])
def test_ssd_scan(model, tmp_path):
    call = scan_call(model, 16)
    program, registers = compiled(tmp_path, scan, call, donate=STORE)
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == nbytes(call[STORE])
    # A state for each tile, and steps and decays by head.
    assert memory.temp_size_in_bytes < 1.1 * 16 * nbytes(call[STORE]) // call[STORE].shape[0] + 4e6
    for kernel in ("ssd_scan_added", "ssd_scan_passed_on", "ssd_scan_outputs"):
        used, spilled = registers[kernel]
        if model.state <= 128:
            assert 128 * used <= 65536 // 2, f"two programs of 128 threads do not fit together: {kernel}"
        assert spilled <= (0 if model.state <= 128 else 256)


ATTENDING = [(NANO, 64, 4), (NEMOTRON, 18, 128)]
MORE = [(m, *blocks) for m in (*MODELS[:3], *OTHERS) for blocks in ((1, 1), (64, 1), (256, 4), (18, 128))]


@pytest.mark.parametrize(("model", "blocks", "q_len"), [*ATTENDING, *(slow(*c) for c in MORE if c not in ATTENDING)])
def test_paged_attention(model, blocks, q_len, tmp_path):
    call = attention_call(model, blocks, q_len)
    program, registers = compiled(tmp_path, attend, call)
    used, spilled = registers["paged_attention"]
    assert used <= 255
    assert spilled == 0
    # Queries by kv head, and what programs found of each: no cache, no scores.
    assert program.memory_analysis().temp_size_in_bytes < 100e6
    assert not program.as_text().count("while(")


LATENTS = [(64, 1, 32, BF16), (18, 128, 32, BF16)]
MORE_LATENTS = [(64, 4, 32, BF16), (1, 1, 32, BF16), (64, 1, 4, BF16), (64, 1, 64, BF16), (18, 128, 4, BF16)]
MORE_LATENTS += [(64, 1, 32, jnp.float8_e4m3fn)]


@pytest.mark.parametrize(("blocks", "q_len", "heads", "dtype"), [*LATENTS, *(slow(*c) for c in MORE_LATENTS)])
@pytest.mark.parametrize("page_size", [32, 64])
def test_paged_attention_to_latents(blocks, q_len, heads, dtype, page_size, tmp_path):
    """Of Kimi-Linear and Ling: 576 numbers a token, whole and divided over 8 devices, up to 262,144 tokens a row."""
    rows, pages = blocks if q_len < 16 else 2, 262_144 // page_size
    call = (
        shape(blocks, q_len, heads, 576, dtype=BF16),
        shape(1 + pages, page_size, 1, 576, dtype=dtype),
        shape(blocks, q_len, dtype=I32),
        shape(rows, pages, dtype=I32),
        shape(blocks, dtype=I32),
    )
    program, registers = compiled(tmp_path, attend, call)
    used, spilled = registers["paged_attention"]
    assert used <= 255
    assert spilled == 0
    # One program fills a multiprocessor, so there are few partial results; a prompt's tiles have none.
    assert program.memory_analysis().temp_size_in_bytes < (20e6 if q_len < 16 else 1e6)


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(224, jnp.bfloat16), (128, jnp.float8_e4m3fn), (192, jnp.float8_e4m3fn)]
)
def test_paged_attention_of_other_heads_and_narrow_keys(head_dim, dtype, tmp_path):
    """Heads of Zamba2-7B, which are seven pieces of 32, and keys in 8 bits, which the kernel widens."""
    q, kv, *places = attention_call(NANO, 64, 1)
    q, kv = (jax.ShapeDtypeStruct((*of.shape[:3], head_dim), kind) for of, kind in ((q, jnp.bfloat16), (kv, dtype)))
    program, registers = compiled(tmp_path, attend, (q, kv, *places))
    used, spilled = registers["paged_attention"]
    assert used <= 255
    assert spilled == 0
    assert program.memory_analysis().temp_size_in_bytes < 100e6
