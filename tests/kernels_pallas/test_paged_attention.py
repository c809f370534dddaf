"""Attention against its definition, and what holds for any implementation of it."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import TypeCheckError
from model_shapes import ATTENTION
from operation_checks import (
    DTYPES,
    ELSEWHERE,
    Draw,
    assert_close,
    assert_in_place,
    assert_same_bits,
    assert_same_gradients,
    ints,
    jitted,
    on_device,
)

from kernels_pallas.paged_attention import attention_sequence, copy_pages, merge_attention_parts, reference, xla
from kernels_pallas.paged_attention.api import paged_attention, paged_attention_part, write_kv
from tests.support.selection import some_slow

SHAPES = [s.small() for s in ATTENTION]
PLAIN, LATENT = SHAPES[0], next(s for s in SHAPES if s.latent)
pytestmark = pytest.mark.full


def cache(draw, shape, pages, dtype=np.float32):
    kv = draw.normal(pages, shape.page_size, shape.entries, shape.head_dim, dtype=dtype)
    kv[0] = np.nan
    return kv


def table(draw, shape, lengths, width, spare=()):
    """Pages of rows of these lengths; 0, or a page full of NaN, past their ends."""
    counts = [-(-length // shape.page_size) for length in lengths]
    pages = iter(1 + draw.random.permutation(sum(counts)))
    rows = [[next(pages) for _ in range(count)] + [*spare, *[0] * width][: width - count] for count in counts]
    return ints(rows), sum(counts) + 1


def test_what_8_bits_cannot_hold_becomes_the_largest():
    kv = jnp.zeros((3, 4, 2, 8), jnp.float8_e4m3fn)
    k, v = jnp.full((1, 1, 8), 1e4), jnp.full((1, 1, 8), -0.3)
    out = write_kv(kv, k, v, page=jnp.asarray([2]), offset=jnp.asarray([1])).astype(np.float32)
    assert (out[2, 1, 0] == 448).all()
    assert (out[2, 1, 1] == -0.3125).all()
    assert (out[:2] == 0).all()


class Attention:
    """Every implementation of `paged_attention`."""

    implementation: str
    tolerance: float | None = None

    def run(self, *args, scale=0.3, first_key=0, window=None, **kwargs):
        static = {"scale": scale, "first_key": first_key, "window": window}
        operation = jitted(paged_attention, **static, implementation=self.implementation)
        return operation(*args, **kwargs)

    def check(self, shape, q_len, positions, lengths, block_row, dtype=np.float32, **options):
        draw = Draw()
        page_table, bad = table(draw, shape, lengths, width=-(-max(lengths) // shape.page_size) + 2, spare=[0])
        kv = cache(draw, shape, bad + 1, dtype)
        page_table[:, -1] = bad  # a live page of another row, poisoned
        kv[bad] = np.nan
        for row, length in enumerate(lengths):  # so is the tail of the last page
            if length % shape.page_size:
                kv[page_table[row, length // shape.page_size], length % shape.page_size :] = np.nan
        q = draw.normal(len(positions), q_len, shape.q_heads, shape.head_dim, dtype=dtype)
        q[np.array(positions) < 0] = np.nan
        places = {"positions": ints(positions), "page_table": page_table, "block_row": ints(block_row)}
        out = self.run(q, kv, **places, **options)
        want = reference.paged_attention(q, kv, **places, **{"scale": 0.3, **options})
        assert out.dtype == dtype
        assert_close(out, want, dtype, self.tolerance if dtype == np.float32 else None)

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", some_slow(SHAPES, *SHAPES[1:3]), ids=lambda s: s.name)
    def test_prefill_equals_definition(self, shape):
        # Two blocks of a continued row, a short one of a fresh row, and a block of padding.
        q_len = 8
        positions = [[*range(29, 37)], [*range(37, 45)], [0, 1, 2, *[-1] * 5], [-1] * q_len]
        self.check(shape, q_len, positions, [45, 3], [0, 0, 1, 0])

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=lambda s: s.name)
    def test_decode_equals_definition(self, shape, dtype):
        positions = [[0, -1], [299, 300], [63, 64], [-1, -1], [15, -1]]
        self.check(shape, 2, positions, [1, 301, 65, 1, 16], range(5), dtype)

    def test_nothing_to_attend_to(self):
        self.check(PLAIN, 1, [[-1], [-1]], [1, 1], [0, 1])

    def test_long_rows(self):
        self.check(PLAIN, 128, [[*range(128)], [*range(128, 256)], [*range(256, 384)]], [384], [0, 0, 0])

    def test_hidden_first_keys(self):
        self.check(PLAIN, 3, [[0, 1, 2], [19, 20, 21]], [3, 22], [0, 1], first_key=1)

    @pytest.mark.smoke
    @pytest.mark.parametrize("window", [1, 7, 300])
    def test_a_window_hides_older_keys(self, window):
        positions = [[*range(293, 301)], [0, 1, 2, *[-1] * 5], [-1] * 8, [*range(40, 48)]]
        self.check(PLAIN, 8, positions, [301, 48], [0, 1, 0, 1], window=window)

    def test_a_window_and_hidden_first_keys(self):
        self.check(PLAIN, 1, [[300], [-1], [0]], [301, 48], [0, 0, 1], window=300, first_key=1)

    def test_a_query_without_keys_gives_zero(self):
        q, kv = np.ones((1, 2, 4, 128), np.float32), np.full((2, 8, 4, 128), np.nan, np.float32)
        places = {"positions": ints([[0, -1]]), "page_table": ints([[1]]), "block_row": ints([0])}
        assert (self.run(q, kv, **places, first_key=1) == 0).all()


class TestXla(Attention):
    implementation = "xla"

    @DTYPES
    def test_holds_no_copy_of_the_cache(self, dtype):
        draw = Draw()
        kv, q = np.zeros((3000, 16, 6, 24), dtype), draw.normal(2, 4, 9, 24, dtype=dtype)
        places = {"positions": ints([[5] * 4] * 2), "page_table": ints([[1] * 9] * 2), "block_row": ints([0, 1])}

        def run(q, kv, places):
            return paged_attention(q, kv, **places, scale=1.0, implementation="xla")

        memory = jax.jit(run).lower(*on_device((q, kv, places))).compile().memory_analysis()
        assert memory.temp_size_in_bytes < kv.nbytes / 4


class TestXlaAllBlocks(Attention):
    """The form for other platforms."""

    implementation = ELSEWHERE


class Parts(Attention):
    """Pages are divided over three members by position; each attends to its own, and reads no other."""

    members = 3

    def run(self, q, kv, *, positions, page_table, block_row, scale=0.3, first_key=0, window=None):
        tables = np.pad(page_table, ((0, 0), (0, -page_table.shape[1] % self.members)))
        static = {"page_stride": self.members, "scale": scale, "first_key": first_key, "window": window}
        parts = []
        for member in range(self.members):
            own = tables[:, member :: self.members]
            here = np.where(np.isin(np.arange(len(kv)), own[own > 0])[:, None, None, None], kv, np.nan).astype(kv.dtype)
            places = {"positions": positions, "page_table": own, "block_row": block_row}
            operation = jitted(paged_attention_part, **static, implementation=self.implementation)
            parts.append(operation(q, here, **places, first_page=np.int32(member)))
        out, lse = (np.stack(each) for each in zip(*parts, strict=True))
        return jitted(merge_attention_parts)(out, lse).astype(q.dtype)


class TestParts(Parts):
    implementation = "xla"


class TestPartsAllBlocks(Parts):
    """The form for other platforms."""

    implementation = ELSEWHERE


@pytest.mark.parametrize(("members", "pieces"), [(None, 8 + 1 + 1 + 0), (1, 8 + 1 + 1 + 0), (2, 4 + 1 + 1 + 0)])
def test_a_short_row_costs_as_much_in_any_company(members, pieces, monkeypatch):
    read = []

    def counted(kv, i, *args, attend=xla._attend_pages, **kwargs):
        jax.debug.callback(read.append, i)
        return attend(kv, i, *args, **kwargs)

    monkeypatch.setattr(xla, "_attend_pages", counted)
    table, kv, q = np.zeros((4, 128), np.int32), np.zeros((129, 16, 2, 8)), np.zeros((4, 1, 2, 8))
    places = {"positions": ints([[20], [2000], [3], [-1]]), "page_table": table, "block_row": ints(range(4))}
    of_part = {} if members is None else {"first_page": jnp.int32(0), "page_stride": members}
    run = partial(paged_attention if members is None else paged_attention_part, **of_part, scale=1.0)
    jax.block_until_ready(run(*on_device((np.float32(q), np.float32(kv))), **on_device(places)))
    jax.effects_barrier()
    assert len(read) == pieces


class TestPages:
    """`write_kv` and `copy_pages`."""

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("shape", [PLAIN, LATENT], ids=lambda s: s.name)
    def test_write(self, shape, dtype):
        draw = Draw()
        kv, k, v = cache(draw, shape, 5, dtype), *(draw.normal(6, shape.kv_heads, shape.head_dim) for _ in range(2))
        k[1] = v[1] = np.nan
        places = {"page": ints([2, 0, 4, 4, 1, 2]), "offset": ints([0, 0, 3, 4, 15, 1])}
        v = None if shape.latent else v
        assert_same_bits(jitted(write_kv)(kv, k, v, **places), reference.write_kv(kv, k, v, **places))

    @DTYPES
    def test_copy(self, dtype):
        # A chain and a swap: what is copied is what was there before.
        kv = cache(Draw(), PLAIN, 7, dtype)
        run = jitted(copy_pages)
        for source, target in [([1, 2, 0, 4, 5, 0], [2, 3, 0, 5, 4, 6]), ([0, 0], [0, 0]), ([3], [1])]:
            places = {"source": ints(source), "target": ints(target)}
            assert_same_bits(run(kv, **places), reference.copy_pages(kv, **places))

    @pytest.mark.smoke
    @DTYPES
    @pytest.mark.parametrize("count", [1, 5])
    def test_in_place(self, count, dtype):
        draw = Draw()
        kv = np.zeros((2000, PLAIN.page_size, 2 * PLAIN.kv_heads, PLAIN.head_dim), dtype)
        k = draw.normal(count, PLAIN.kv_heads, PLAIN.head_dim, dtype=dtype)
        some = draw.slots(9, count)
        assert_in_place(write_kv, kv, k, k, page=some, offset=some)
        assert_in_place(copy_pages, kv, source=some, target=some + 100)


class TestSequence:
    """Every implementation of `attention_sequence`."""

    implementation = "xla"

    def inputs(self, shape, length):
        draw = Draw(length)
        heads = (shape.q_heads, shape.kv_heads, shape.kv_heads)
        return [draw.normal(2, length, n, shape.head_dim) for n in heads]

    @pytest.mark.smoke
    @pytest.mark.parametrize("shape", [PLAIN, *SHAPES[3:]], ids=lambda s: s.name)
    @pytest.mark.parametrize("length", some_slow([1, 150, 5, 128], 5, 128))
    def test_equals_definition(self, shape, length):
        self.check(shape, length)

    def check(self, shape, length, window=None):
        q, k, v = self.inputs(shape, length)
        static = {"scale": 0.3, "window": window}
        out = jitted(attention_sequence, **static, implementation=self.implementation)(q, k, v)
        assert_close(out, reference.attention_sequence(q, k, v, **static))

    @pytest.mark.parametrize("window", [1, 9, 130])
    def test_a_window_hides_older_keys(self, window):
        self.check(PLAIN, 270, window)

    def test_gradients(self):
        q, k, v = self.inputs(PLAIN, 140)

        def plain(q, k, v):
            repeats = q.shape[2] // k.shape[2]
            k, v = (jnp.repeat(x, repeats, axis=2) for x in (k, v))
            scores = 0.3 * jnp.einsum("bqhd,bkhd->bhqk", q, k)
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[2:], bool)), scores, -jnp.inf)
            return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)

        ours = partial(attention_sequence, scale=0.3, implementation=self.implementation)
        assert_same_gradients(ours, plain, (q, k, v), tolerance=1e-4)

    def test_holds_no_table_of_all_scores(self):
        q, k, v = on_device(self.inputs(PLAIN, 1500))

        def loss(q, k, v):
            return attention_sequence(q, k, v, scale=0.3, implementation=self.implementation).sum()

        memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile().memory_analysis()
        assert memory.temp_size_in_bytes < 4 * q.shape[0] * q.shape[2] * 1500 * 1500 / 2


def test_refuses_heads_that_do_not_fit():
    q, kv = jnp.ones((1, 1, 5, 4)), jnp.ones((2, 4, 4, 4))
    places = on_device({"positions": ints([[0]]), "page_table": ints([[1]]), "block_row": ints([0])})
    with pytest.raises(ValueError, match="5 heads do not divide into 2 groups"):
        paged_attention(q, kv, **places, scale=1.0)
    for k, v in ((jnp.ones((1, 1, 4)), None), (jnp.ones((1, 3, 4)), jnp.ones((1, 3, 4)))):
        with pytest.raises((ValueError, TypeCheckError), match="kv"):
            write_kv(kv, k, v, page=places["block_row"], offset=places["block_row"])
