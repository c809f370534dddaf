"""How the kernel that JAX keeps for TPU is called, and our own for GPU, interpreted.

Pallas' interpreter cannot run the kernel for TPU (it has no reshaped references), so our definition stands in for it.
That kernels compile is checked in test_tpu_compile.py and test_gpu_compile.py.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from operation_checks import DTYPES, Draw, assert_close, on_device
from test_paged_attention import PLAIN, Attention, Parts

from kernels_pallas.paged_attention import paged_attention, pallas_gpu, pallas_tpu, reference

pytestmark = pytest.mark.full


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


class Whole:
    """Heads of whole registers, which kernels for TPU take; no latents."""

    def check(self, shape, *args, **kwargs):
        whole = dataclasses.replace(PLAIN, q_heads=4, kv_heads=2, head_dim=128, page_size=8)
        if not shape.latent:
            super().check(whole, *args, **kwargs)

    @pytest.mark.parametrize("blocks_per_call", [1, 2, 3])
    def test_tables_too_long_for_scalar_memory_take_several_calls(self, blocks_per_call, monkeypatch):
        monkeypatch.setattr(pallas_tpu, "SCALAR_BYTES", 4 * pallas_tpu.LANES * blocks_per_call)
        positions = [[2, 3, 4, -1], [5, 6, 7, 8], [9, -1, -1, -1], [0, 1, 2, 3], [-1, -1, -1, -1]]
        self.check(PLAIN, 4, positions, [10, 4], [0, 0, 0, 1, 1])


class TestTpu(Whole, Attention):
    """The call of the kernel that JAX keeps."""

    implementation = "pallas_tpu"
    tolerance = 1e-4
    test_a_query_without_keys_gives_zero = test_hidden_first_keys = test_a_window_and_hidden_first_keys = None

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        """The queries' shapes, and the options, of the kernel's calls."""
        calls = []

        def record(q, kv, *places, **options):
            calls.append((len(places[1]), options["num_queries_per_block"]))
            return stand_in(q, kv, *places, **options)

        monkeypatch.setattr(pallas_tpu, "ragged_paged_attention", record)
        return calls

    def run(self, *args, scale=0.3, **kwargs):
        given = {name: jnp.asarray(v) for name, v in kwargs.items() if isinstance(v, np.ndarray)}
        return np.asarray(paged_attention(*on_device(args), **kwargs | given, scale=scale, implementation="pallas_tpu"))

    @pytest.mark.parametrize("blocks_per_call", [1, 2, 3])
    def test_tables_too_long_for_scalar_memory_take_several_calls(self, blocks_per_call, monkeypatch, calls):
        super().test_tables_too_long_for_scalar_memory_take_several_calls(blocks_per_call, monkeypatch)
        assert sum(blocks for blocks, _ in calls) == 5
        assert max(blocks for blocks, _ in calls) <= blocks_per_call

    @pytest.mark.parametrize(
        ("blocks", "q_len", "sequences", "size"),
        [(64, 1, 64, 32), (16, 4, 16, 32), (1, 128, 1, 128), (2, 128, 1, 256), (5, 128, 1, 512), (1, 1, 1, 1)],
    )
    def test_prefill_has_larger_blocks_of_queries_than_decode(self, calls, blocks, q_len, sequences, size):
        """Each block of queries reads the keys before it once, so blocks of 32 read a long past 16 times as often."""
        positions = np.arange(blocks * q_len).reshape(blocks, q_len)
        self.check(PLAIN, q_len, positions, [blocks * q_len], [0] * blocks)
        assert calls == [(sequences, size)]

    @pytest.mark.parametrize("window", [None, 100])
    def test_tiles_of_a_row_are_one_sequence(self, calls, window):
        """Of a row that begins within a tile, one without tokens, and a fresh one; then a tile of padding."""
        tile = pallas_tpu.TILE_QUERIES
        positions = np.full((5, tile), -1)
        positions[0, :50] = np.arange(78, tile)
        positions[1], positions[2, :9] = np.arange(tile, 2 * tile), np.arange(2 * tile, 2 * tile + 9)
        positions[3, :30] = np.arange(30)
        self.check(PLAIN, tile, positions, [2 * tile + 9, 1, 30, 1], [0, 0, 0, 2, 3], window=window)
        assert calls == [(4, tile)]


class Gpu:
    """Triton's blocks are powers of two of at least 16."""

    implementation = "pallas_gpu_interpreted"
    # XLA runs these calls.
    test_a_query_without_keys_gives_zero = test_a_window_hides_older_keys = test_a_window_and_hidden_first_keys = None

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

    def test_several_parts_of_queries(self):
        self.check(PLAIN, 48, [[*range(500, 548)], [*range(48)]], [548, 48], [0, 1])


class TestGpu(Gpu, Attention):
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

    def test_one_long_row_fills_the_gpu(self):
        assert pallas_gpu._splits(1, 262_144) == 256
        assert pallas_gpu._splits(1, 4096) == 16
        assert pallas_gpu._splits(64 * 8, 262_144) == 2


class TestPartsGpu(Gpu, Parts):
    """A member's keys are to the kernel all keys of a row."""


class TestPartsTpu(Whole, Parts):
    """Our own kernel, in Pallas' interpreter, where pages have 8 keys and pieces of a row's keys 4 pages."""

    implementation = "pallas_tpu_interpreted"
    tolerance = 1e-4

    @pytest.fixture(autouse=True)
    def short_pieces(self, monkeypatch):
        monkeypatch.setattr(pallas_tpu, "KEYS", 32)

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
    def test_rows_of_very_different_lengths(self, dtype):
        positions, lengths = [[-1], [400], [3], [-1], [3], [130], [-1]], [1, 401, 4, 1, 4, 131, 1]
        self.check(PLAIN, 1, positions, lengths, range(7), dtype)
        self.check(PLAIN, 1, positions, lengths, range(7), dtype, window=100)
