"""How the kernel that JAX keeps for TPU is called, and our own for GPU, interpreted.

Pallas' interpreter cannot run the kernel for TPU (it has no reshaped references), so our definition stands in for it.
That kernels compile is checked in test_tpu_compile.py and test_gpu_compile.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import Draw, assert_close, on_device
from test_paged_attention import DTYPES, PLAIN, Attention

from kernels_pallas.dispatch import UnsupportedError
from kernels_pallas.paged_attention import paged_attention, pallas_gpu, pallas_tpu, reference

pytestmark = pytest.mark.full

PAGE, PAGES = 8, 4


def call(draw, positions, block_row, *, rows, q_heads=4, kv_heads=2, head_dim=128, dtype=np.float32):
    """Queries at these positions, [blocks, q_len]; whatever no query may see is NaN."""
    positions, block_row = np.array(positions, np.int32), np.array(block_row, np.int32)
    q = draw.normal(*positions.shape, q_heads, head_dim, dtype=dtype)
    q[positions < 0] = np.nan
    kv = draw.normal(1 + rows * PAGES, PAGE, 2 * kv_heads, head_dim, dtype=dtype)
    kv[0] = np.nan
    page_table = draw.slots(1 + rows * PAGES, rows, PAGES)
    for row in range(rows):
        length = positions[block_row == row].max(initial=-1) + 1
        for key in range(length, PAGES * PAGE):
            kv[page_table[row, key // PAGE], key % PAGE] = np.nan
        page_table[row, -(-length // PAGE) :] = 0
    return (q, kv), {"positions": positions, "page_table": page_table, "block_row": block_row}


def stand_in(q, kv, kv_lens, page_indices, cu_q_lens, num_seqs, *, sm_scale, sliding_window, **blocks):
    """What the kernel gives: a sequence's queries are its last ones. It needs keys in all sequences, and a query."""
    lengths, ends, tables = (np.asarray(v) for v in (kv_lens, cu_q_lens, page_indices))
    assert (lengths >= 1).all()
    assert ends[-1] >= 1
    out = np.full(q.shape, np.nan, q.dtype)
    for i in range(int(num_seqs[0])):
        count = ends[i + 1] - ends[i]
        assert 0 <= count <= lengths[i]
        positions = np.arange(lengths[i] - count, lengths[i])[None]
        queries = np.asarray(q)[None, ends[i] : ends[i + 1]]
        places = {"positions": positions, "page_table": tables, "block_row": [i]}
        out[ends[i] : ends[i + 1]] = reference.paged_attention(
            queries, kv, **places, scale=sm_scale, window=sliding_window
        )[0]
    return jnp.asarray(out)


@pytest.mark.smoke
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("positions", "block_row"),
    [
        ([[5], [-1], [0], [25], [-1]], [0, 1, 2, 3, 4]),
        ([[-1, -1, -1], [9, 10, -1], [3, -1, -1], [7, 8, 9]], [0, 1, 2, 3]),
        ([[2, 3, 4, -1], [5, 6, 7, 8], [9, -1, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]], [0, 0, 0, 1, 1]),
        ([[-1], [-1]], [0, 1]),
    ],
    ids=["one query each", "drafts", "tiles of a prompt", "nothing"],
)
def test_equals_definition(positions, block_row, window, monkeypatch):
    monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", stand_in)
    args, kwargs = call(Draw(), positions, block_row, rows=max(block_row) + 1)
    static = {"scale": 0.1, "window": window}
    out = paged_attention(*on_device(args), **on_device(kwargs), **static, implementation="pallas_tpu")
    want = reference.paged_attention(*args, **kwargs, **static)
    valid = np.array(positions) >= 0
    assert_close(out[valid], want[valid], tolerance=1e-4)
    assert (out[~valid] == 0).all()


@pytest.mark.parametrize("blocks_per_call", [1, 2, 3])
def test_tables_too_long_for_scalar_memory_take_several_calls(blocks_per_call, monkeypatch):
    calls = []

    def count(q, kv, kv_lens, page_indices, *rest, **static):
        calls.append(len(page_indices))
        return stand_in(q, kv, kv_lens, page_indices, *rest, **static)

    monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", count)
    monkeypatch.setattr(pallas_tpu, "SCALAR_BYTES", 4 * pallas_tpu.LANES * blocks_per_call)
    positions = [[2, 3, 4, -1], [5, 6, 7, 8], [9, -1, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]
    args, kwargs = call(Draw(), positions, [0, 0, 0, 1, 1], rows=2)
    out = paged_attention(*on_device(args), **on_device(kwargs), scale=0.1, implementation="pallas_tpu")
    want = reference.paged_attention(*args, **kwargs, scale=0.1)
    valid = np.array(positions) >= 0
    assert_close(out[valid], want[valid], tolerance=1e-4)
    assert sum(calls) == 5
    assert max(calls) <= blocks_per_call


def test_refuses_a_table_that_scalar_memory_cannot_hold_even_for_one_block(monkeypatch):
    monkeypatch.setattr(pallas_tpu, "SCALAR_BYTES", 4 * pallas_tpu.LANES - 1)
    args, kwargs = call(Draw(), [[3]], [0], rows=1)
    with pytest.raises(UnsupportedError, match="a page table of 4 pages does not fit in 511 bytes of scalar memory"):
        paged_attention(*on_device(args), **on_device(kwargs), scale=0.1, implementation="pallas_tpu")


@pytest.mark.parametrize(("blocks", "q_len", "size"), [(64, 1, 32), (64, 4, 32), (18, 128, 128), (1, 1, 1)])
def test_prefill_has_larger_blocks_of_queries_than_decode(blocks, q_len, size, monkeypatch):
    """Each block of queries reads the keys before it once, so blocks of 32 read a long past four times as often."""
    sizes = []

    def record(q, *_, num_queries_per_block, **__):
        sizes.append(num_queries_per_block)
        return q

    monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", record)
    positions = np.arange(blocks * q_len).reshape(blocks, q_len) % (PAGES * PAGE)
    args, kwargs = call(Draw(), positions, [0] * blocks, rows=1)
    paged_attention(*on_device(args), **on_device(kwargs), scale=0.1, implementation="pallas_tpu")
    assert sizes == [size]


@pytest.mark.parametrize(
    ("changed", "static", "reason"),
    [
        ({"head_dim": 64}, {}, "heads have a size of 64, not a multiple of 128"),
        ({}, {"first_key": 1}, "it hides the first 1 keys"),
        ({"kv_heads": 3, "q_heads": 3, "dtype": jnp.bfloat16}, {}, "3 kv heads do not fill registers"),
    ],
    ids=["size of heads", "hidden keys", "number of heads"],
)
def test_says_what_it_cannot_run(changed, static, reason):
    args, kwargs = call(Draw(), [[3]], [0], rows=1, **changed)
    with pytest.raises(UnsupportedError, match=reason):
        paged_attention(*on_device(args), **on_device(kwargs), **static, scale=0.1, implementation="pallas_tpu")


class TestGpu(Attention):
    """Triton's blocks are powers of two of at least 16."""

    implementation = "pallas_gpu_interpreted"
    test_holds_no_copy_of_the_cache = None  # the interpreter copies; the compiled kernel is looked at instead
    test_a_query_without_keys_gives_zero = None
    test_a_window_hides_older_keys = None  # XLA runs these calls

    def check(self, shape, *args, **kwargs):
        # Latents keep their width: it selects the form for wide heads.
        width = pallas_gpu.WIDE + 64 if shape.latent else 16
        super().check(dataclasses.replace(shape, page_size=max(16, shape.page_size), head_dim=width), *args, **kwargs)

    @DTYPES
    def test_rows_of_very_different_lengths(self, dtype):
        # The first is split over programs, of which the others leave most idle.
        self.check(PLAIN, 1, [[2100], [3], [-1], [700]], [2101, 4, 1, 701], range(4), dtype)

    def test_hidden_keys_of_a_row_without_others(self):
        self.check(PLAIN, 2, [[0, -1], [1, 2]], [1, 3], [0, 1], first_key=1)

    @DTYPES
    def test_heads_whose_size_is_no_power_of_two(self, dtype):
        shape = dataclasses.replace(PLAIN, page_size=16, head_dim=112)
        super().check(shape, 2, [[9, 10], [300, -1]], [11, 301], [0, 1], dtype)

    @DTYPES
    def test_keys_and_values_in_8_bits(self, dtype):
        draw = Draw()
        q, kv = draw.normal(2, 1, 4, 16, dtype=dtype), draw.normal(5, 16, 4, 16).astype(jnp.float8_e4m3fn)
        places = {"positions": [[5], [40]], "page_table": [[1, 0, 0], [2, 3, 4]], "block_row": [0, 1]}
        places = {name: np.array(place, np.int32) for name, place in places.items()}
        out = self.run(*on_device((q, kv)), **on_device(places))
        want = reference.paged_attention(q, kv.astype(np.float32), **places, scale=0.3)
        assert_close(out, want, tolerance=1e-4 if dtype == np.float32 else 2e-2)

    def test_says_that_it_has_no_windows(self):
        with pytest.raises(UnsupportedError, match="queries see only the last 3 keys"):
            self.check(PLAIN, 1, [[2]], [3], [0], window=3)

    def test_one_long_row_fills_the_gpu(self):
        assert pallas_gpu._splits(1, 262_144) == 256
        assert pallas_gpu._splits(1, 4096) == 16
        assert pallas_gpu._splits(64 * 8, 262_144) == 2

    def test_several_parts_of_queries(self):
        self.check(PLAIN, 48, [[*range(500, 548)], [*range(48)]], [548, 48], [0, 1])


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"head_dim": 72}, "heads have a size of 72, not a multiple of 16"),
        ({}, "pages hold 8 keys, not a multiple of 16"),
    ],
)
def test_says_what_it_cannot_run_on_gpu(changed, reason):
    args, kwargs = call(Draw(), [[3]], [0], rows=1, **changed)
    with pytest.raises(UnsupportedError, match=reason):
        paged_attention(*on_device(args), **on_device(kwargs), scale=0.1, implementation="pallas_gpu_interpreted")
