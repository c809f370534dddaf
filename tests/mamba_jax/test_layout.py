"""The index arrays of a step, against loops over rows and tokens."""

import itertools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas.paged_attention import copy_pages
from mamba_jax.batch import num_tiles
from mamba_jax.layout import member as member_module
from mamba_jax.layout.base import Span
from mamba_jax.layout.decode import DecodeLayout
from mamba_jax.layout.member import Member
from mamba_jax.layout.paged import page_of
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.layout.sequence import PackedLayout
from mamba_jax.sharding import CONTEXT, make_mesh
from mamba_jax.sharding.across import this_member

TILE = 4
prefill_layout = jax.jit(PrefillLayout.of, static_argnames=("num_packed", "tile_size"))


def tiles_of(length, num_tokens):
    """(first, last + 1) of every tile, counted from the row's first token of the step."""
    cuts = [length, *(p for p in range(length + 1, length + num_tokens) if p % TILE == 0), length + num_tokens]
    return [(a - length, b - length) for a, b in itertools.pairwise(cuts)] if num_tokens else []


@pytest.mark.parametrize("seed", range(30))
def test_prefill_layout(seed):
    rng = np.random.default_rng(seed)
    rows, packed, tiles = 5, 40, 16
    num_tokens = rng.multinomial(rng.integers(0, packed + 1), np.ones(rows) / rows).astype(np.int32)
    num_tokens[rng.random(rows) < 0.3] = 0
    length = (rng.integers(0, 3 * TILE, rows) * (rng.random(rows) < 0.6)).astype(np.int32)
    read_slot = rng.integers(1, 20, rows).astype(np.int32)
    tile_write_slot = rng.integers(1, 20, tiles).astype(np.int32)
    layout = jax.tree.map(
        np.asarray,
        prefill_layout(
            num_packed=packed,
            tile_size=TILE,
            length=length,
            num_tokens=num_tokens,
            read_slot=read_slot,
            tile_write_slot=tile_write_slot,
            page_table=np.zeros((rows, 0), np.int32),
        ),
    )
    token, tile = 0, 0
    for row in range(rows):
        assert layout.read_slot[row] == (read_slot[row] if num_tokens[row] else 0)
        spans = tiles_of(length[row], num_tokens[row])
        assert len(spans) == num_tiles(int(length[row]), int(num_tokens[row]), TILE)
        for i, (begin, end) in enumerate(spans):
            assert layout.packed.row_start[row] == token - begin
            assert layout.packed.tile_row[tile] == row
            assert layout.packed.tile_end[tile] == end
            assert layout.packed.tiles.first[tile] == (i == 0)
            assert layout.packed.tiles.read_slot[tile] == (layout.read_slot[row] if i == 0 else 0)
            assert layout.packed.tiles.write_slot[tile] == tile_write_slot[tile]
            np.testing.assert_array_equal(layout.packed.tile_valid[tile], np.arange(TILE) < end - begin)
            for lane in range(end - begin):
                assert layout.packed.tile_tokens[tile, lane] == token
                assert layout.packed.token_in_tiles[token] == tile * TILE + lane
                assert layout.packed.token_row[token] == row
                assert layout.positions[token] == length[row] + begin + lane
                assert layout.valid[token]
                token += 1
            tile += 1
    assert not layout.valid[token:].any()
    assert (layout.positions[token:] == -1).all()
    assert layout.packed.tiles.first[tile:].all()
    assert not layout.packed.tile_valid[tile:].any()
    for unused in (layout.packed.tile_end, layout.packed.tiles.read_slot, layout.packed.tiles.write_slot):
        assert not unused[tile:].any()
    assert (layout.packed.tile_tokens >= 0).all()
    assert (layout.packed.tile_tokens < packed).all()


def test_decode_layout():
    layout = DecodeLayout.of(
        length=jnp.array([5, 0, 7, 3]), num_tokens=jnp.array([2, 3, 0, 1]), read_slot=jnp.array([4, 9, 6, 2]),
        write_slot=jnp.arange(10, 22).reshape(4, 3), page_table=jnp.zeros((4, 0), jnp.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(layout.positions.reshape(4, 3), [[5, 6, -1], [0, 1, 2], [-1, -1, -1], [3, -1, -1]])
    np.testing.assert_array_equal(layout.valid, layout.positions >= 0)
    np.testing.assert_array_equal(layout.read_slot, [4, 9, 0, 2])  # nothing fed: nothing read
    np.testing.assert_array_equal(layout.write_slot, [[10, 11, 0], [13, 14, 15], [0, 0, 0], [19, 0, 0]])


def test_pages_of_tokens():
    table = jnp.array([[5, 6], [7, 0]])
    page, offset = page_of(table, jnp.array([0, 0, 1, 1, 0, 1]), jnp.array([0, 7, 3, 4, -1, 8]), page_size=4)
    # A page not there yet, padding, and a position past the table are all nowhere.
    np.testing.assert_array_equal(page, [5, 6, 7, 0, 0, 0])
    np.testing.assert_array_equal(offset[:4], [0, 3, 3, 0])


def test_documents_beyond_the_maximum_are_nan():
    starts = jnp.array([True, False, False, True, False, True])
    layout = PackedLayout.of_documents(starts, documents=2, longest=2)
    x = jnp.arange(1.0, 7.0)
    np.testing.assert_array_equal(layout.by_sequence(x), [[1, 2], [4, 5]])
    np.testing.assert_array_equal(layout.by_token(layout.by_sequence(x)), [1, 2, np.nan, 4, 5, np.nan])
    np.testing.assert_array_equal(layout.positions, [0, 1, -1, 0, 1, -1])


MEMBERS, PAGE, EACH = 4, 4, 8


def on_members(length, num_tokens):
    """Attention of decode rows, and their pages, divided over members and on one device: (out, pages) of each."""
    random, steps = np.random.default_rng(3), max(num_tokens)
    table = np.zeros((len(length), 9), np.int32)  # no multiple of the members
    free = [[member * EACH + 1 + i for i in random.permutation(EACH - 1)] for member in range(MEMBERS)]
    for row, count in enumerate(length):
        pages = -(-(count + steps) // PAGE)
        table[row, :pages] = [free[i % MEMBERS].pop() for i in range(pages)]
    kv = random.normal(size=(MEMBERS * EACH, PAGE, 4, 8)).astype(np.float32)
    kv[::EACH] = np.nan  # null pages
    q, k, v = (random.normal(size=(len(length) * steps, heads, 8)).astype(np.float32) for heads in (6, 2, 2))
    copies = np.array([[table[0, 1], free[1].pop()], [0, 0]], np.int32)

    def run(kv, q, k, v, table, copies, member=None):
        layout = DecodeLayout.in_pages(
            length=jnp.array(length), num_tokens=jnp.array(num_tokens), page_table=table, steps=steps
        )
        source, target = copies.T
        if member is not None:
            layout = layout.on_member(member)
            source, target = (member.own_pages(each, len(kv)) for each in (source, target))
        kv = copy_pages(kv, source=source, target=target)
        return layout.attend(q, k, v, kv, Span(0.3, window=21))

    def on_each_device(kv, *rest):
        return run(kv, *rest, member=this_member(MEMBERS))

    mesh, spec = make_mesh(1, members=MEMBERS), jax.sharding.PartitionSpec
    divided = jax.shard_map(
        on_each_device, mesh=mesh, in_specs=(spec(CONTEXT), *[spec()] * 5), out_specs=(spec(), spec(CONTEXT)),
        check_vma=False,
    )  # fmt: skip
    given = kv, q, k, v, table, copies
    return [jax.tree.map(np.asarray, jax.jit(form)(*given)) for form in (divided, run)]


def test_members_attend_to_their_own_pages():
    for length, num_tokens in ([[29, 0, 13], [2, 1, 0]], [[3, 1], [1, 1]]):
        (out, pages), (want, want_pages) = on_members(length, num_tokens)
        np.testing.assert_allclose(out, want, atol=1e-5)
        np.testing.assert_array_equal(pages, want_pages)


def _another_members_page(self, pages, size, whole=Member.own_pages):
    return whole(Member((self.index + 1) % self.count, self.count, self.axis), pages, size)


def _a_wrong_stripe(self, *args, whole=Member.attention, **places):
    return whole(Member(self.index * 0, self.count, self.axis), *args, **places)


def _the_weight_of_another_part(out, x, merge=member_module.merge_attention_parts):
    return merge(out, jnp.roll(x, 1, axis=0))


EACH_ITS_OWN = SimpleNamespace(all_gather=lambda each, axis: jnp.stack([each] * MEMBERS))


@pytest.mark.full
@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (Member, "own_pages", _another_members_page),
        (Member, "attention", _a_wrong_stripe),
        (member_module, "merge_attention_parts", _the_weight_of_another_part),
        (member_module, "lax", EACH_ITS_OWN),
    ],
)
def test_planted_faults_of_members_are_seen(place, name, fault, monkeypatch):
    monkeypatch.setattr(place, name, fault)
    (out, _), (want, _) = on_members([29, 0, 13], [2, 1, 0])
    assert not np.allclose(out, want, atol=1e-3)
