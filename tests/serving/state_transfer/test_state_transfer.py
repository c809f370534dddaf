"""States outside of a store: programs that read and write them, sources, and the digest of weights."""

import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mamba_jax.config import Division, Role, StateArray, StateUnit, UnevenDivision, need
from mamba_jax.model import parameters
from mamba_jax.rounding import NarrowDtype
from mamba_jax.sharding import make_mesh, sharded_store
from mamba_jax.store import StoreShape, init_store, store_bytes
from serving.core.requests.request import RemoteLoad, RemoteState
from serving.state_transfer import source
from serving.state_transfer.identity import array_digest, model_digest
from serving.state_transfer.programs import SIZES, Arrangement, Piece, PointPrograms, common_unit, pieces, state_spec
from serving.state_transfer.source import Arrival
from tests.support.fleets.split_pair import CONFIG, model
from tests.support.hlo_traffic import count_collectives

ONE = Arrangement(StoreShape.of(CONFIG))
FULL = [pytest.param(*devices, marks=pytest.mark.full) for devices in ((1, 2), (2, 2), (3, 2))]
SIZES_OF_STORE = {"num_slots": 5, "num_pages": 9, "dtype": jnp.float32}


def filled(page_size=4, seed=0, **sizes):
    """A store of random numbers, NaN in the null slot and the null page."""
    store = init_store(CONFIG, page_size=page_size, debug_state=True, **(SIZES_OF_STORE | sizes))
    rng = np.random.default_rng(seed)

    def fill(leaf):
        if jnp.issubdtype(leaf.dtype, jnp.integer):
            return leaf
        return jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype).at[0].set(jnp.nan)

    return jax.tree.map(fill, store)


def send(source, target, *, pages, into, position, programs=None, slot=2, cut=None):
    """One point from a slot and `pages` to slot 3 and the pages `into`. `cut`: the pieces in which pages are sent."""
    out, back = programs or (PointPrograms(ONE), PointPrograms(ONE))
    target = back.write_state(target, 3, out.read_state(source, slot), position)
    for piece in cut or pieces(0, position, common_unit(source.page_size, target.page_size)):
        first = piece.start // source.page_size
        from_pages = [*pages, *[0] * 99][first : first + piece.tokens // source.page_size]
        copy = out.read_piece(source, from_pages, position - piece.start, len(target.kv))
        first = piece.start // target.page_size
        to_pages = [*into, *[0] * 99][first : first + piece.tokens // target.page_size]
        target = back.write_piece(target, to_pages, copy)
    return target


def tokens_of(kv, pages, position):
    """Keys and values of a sequence."""
    return np.asarray(kv)[np.asarray(pages)].reshape(-1, *kv.shape[2:])[:position]


@pytest.mark.parametrize(
    ("start", "end", "unit"), [(0, 0, 4), (24, 24, 8), (16, 24, 8), (0, 1, 4), (4, 21, 4), (0, 700, 1), (6, 20, 8)]
)
def test_pieces_cover_what_is_missing(start, end, unit):
    """The whole list is not `list[-0:]` here: nothing missing is nothing sent."""
    found = pieces(start, end, unit)
    covered = [at for piece in found for at in range(piece.start, piece.start + piece.tokens)]
    assert covered == list(range(start // unit * unit, -(-end // unit) * unit))
    assert all(piece.start % unit == 0 and piece.tokens // unit in SIZES for piece in found)


@pytest.mark.parametrize(("there", "here"), [(4, 4), (4, 8), (8, 4), (4, 6)])
def test_a_point_arrives_whole_and_nothing_else_changes(there, here):
    position = 11
    source, target = filled(there, 1), filled(here, 2)
    pages, into = [7, 2, 5, 1, 3][: -(-position // there)], [4, 1, 8][: -(-position // here)]
    before, expected = (jax.tree.map(np.asarray, store) for store in (target, source))
    after = send(source, target, pages=pages, into=into, position=position)
    for old, new, sent in zip(before.slots, after.slots, expected.slots, strict=True):
        for name in old:
            was, now = old[name], np.asarray(new[name])
            np.testing.assert_array_equal(now[3], sent[name][2])
            np.testing.assert_array_equal(np.delete(now, 3, 0), np.delete(was, 3, 0))
    np.testing.assert_array_equal(np.asarray(after.hidden)[3], expected.hidden[2])
    assert np.asarray(after.tags)[3].tolist() == [1, position]
    for old, new, sent in zip(before.kv, after.kv, expected.kv, strict=True):
        np.testing.assert_array_equal(tokens_of(new, into, position), tokens_of(sent, pages, position))
        rest = np.asarray(new)[np.asarray(into)].reshape(-1, *new.shape[2:])[position:]
        assert not rest.any(), "what lies behind the last token is zero"
        np.testing.assert_array_equal(np.delete(np.asarray(new), into, 0), np.delete(old, into, 0))


def test_the_store_is_written_in_place():
    programs, store = PointPrograms(ONE), filled(4)
    programs.warm_up(store, unit=4, layers=len(store.kv), reading=False)
    assert len(programs.cache) == 1 + len(SIZES)
    for name, compiled in programs.cache:
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= store_bytes(store), name
        # What is written passes through; a copy of the store does not.
        assert memory.temp_size_in_bytes < store_bytes(store) / 2 + 65536, name


def test_unrequested_draft_layers_are_not_transferred():
    source = filled(4, 1)
    model_only = len(source.kv) - CONFIG.num_mtp_attention_layers
    piece = PointPrograms(ONE).read_piece(source, [1], 4, model_only)
    assert piece.shape[0] == model_only < len(source.kv)


def test_states_of_another_dtype_are_converted():
    source = filled(4, 1, ssm_dtype=jnp.bfloat16)
    state = PointPrograms(ONE).read_state(source, 2)
    assert state["ssm"].dtype == jnp.bfloat16
    after = PointPrograms(ONE).write_state(filled(4, 2), 3, state, 5).slots[1]["ssm"][3]
    np.testing.assert_array_equal(np.asarray(after), np.asarray(source.slots[1]["ssm"][2]).astype(np.float32))


def test_channels_are_moved_by_name_and_not_by_bytes():
    """Divided by groups, each device has its own [B | C]; heads shared by devices are there once for each."""
    rng = np.random.default_rng(0)
    b, c = rng.standard_normal((2, 3, 8))  # window 3, 4 groups of 2
    logical = np.concatenate([b, c], -1)
    divided = np.concatenate([np.concatenate([x[:, i * 4 : i * 4 + 4] for x in (b, c)], -1) for i in range(2)], -1)
    bc = StateArray("bc", (3, 16), Role.WINDOW, Division(1, 4, "groups", parts=2))
    two = Arrangement(ONE.shape, 2)
    np.testing.assert_array_equal(two.logical(bc, jnp.asarray(divided)), logical.astype(np.float32))
    np.testing.assert_array_equal(two.stored(bc, jnp.asarray(logical)), divided.astype(np.float32))
    assert not np.array_equal(divided, logical)
    kv = rng.standard_normal((5, 4, 8)).astype(np.float32)  # 2 heads: K0 V0 K1 V1
    repeated = Division(0, 2, "heads", otherwise=UnevenDivision.REPEAT)
    heads = StateArray("kv", (4, 8), Role.ACTIVATION, repeated, StateUnit.TOKEN)
    shared = Arrangement(ONE.shape, 4)
    stored = np.concatenate([kv[:, :2], kv[:, :2], kv[:, 2:], kv[:, 2:]], 1)
    np.testing.assert_array_equal(shared.stored(heads, jnp.asarray(kv)), stored)
    np.testing.assert_array_equal(shared.logical(heads, jnp.asarray(stored)), kv)


@pytest.mark.parametrize(("members", "shards"), [(1, 4), (8, 1), *FULL])
def test_numbers_of_devices_may_differ(members, shards):
    """From one device to several and back: the same logical arrays."""
    mesh, each = make_mesh(shards, members=members), 24 // members
    spread = sharded_store(CONFIG, mesh, page_size=4, debug_state=True, **(SIZES_OF_STORE | {"num_pages": 24}))
    arrangement = Arrangement.of(CONFIG, spread)
    assert arrangement.shards == shards
    assert spread.kv[0].shape[2] == 2 * max(shards, need(CONFIG.attention).num_kv_heads)
    programs = PointPrograms(ONE), PointPrograms(arrangement)
    source, position, pages = filled(4, 1), 26, [7, 2, 5, 1, 8, 4, 3]
    into = [i % members * each + 1 + (i // members ^ 1) for i in range(len(pages))]
    expected = jax.tree.map(np.asarray, source)
    spread = send(source, spread, pages=pages, into=into, position=position, programs=programs)
    # Each device has its own channels, so they lie elsewhere than in the logical array,
    assert not any(np.delete(np.asarray(kv), into, 0).any() for kv in spread.kv)
    divided = np.asarray(spread.slots[0]["conv_bc"])[3]
    if not spread.slots[0]["conv_bc"].sharding.is_fully_replicated:
        assert not np.array_equal(divided, expected.slots[0]["conv_bc"][2])
    # and come back as they were. Members exchange pages that are read, and nothing to write.
    cut = Piece(0, 4), *pieces(4, position, 4)  # the second one begins in another member's page
    turned = {"pages": into, "into": pages, "programs": programs[::-1]}
    back = send(spread, filled(4, 5), **turned, position=position, slot=3, cut=cut)
    for got, sent in zip(back.slots, expected.slots, strict=True):
        for name in got:
            np.testing.assert_array_equal(np.asarray(got[name])[3], sent[name][2])
    for got, sent in zip(back.kv, expected.kv, strict=True):
        np.testing.assert_array_equal(tokens_of(got, pages, position), tokens_of(sent, pages, position))
    if shards == 1:
        for (name, *_), compiled in programs[1].cache:
            exchanged = count_collectives(compiled.as_text())
            assert set(exchanged) == ({"all-gather"} if name == "_read_piece" else set()), (name, exchanged)


@pytest.mark.parametrize("kind", [None, "int8", "bfloat16"])
def test_states_may_travel_in_fewer_bits(kind):
    """None: in as many as in the store."""
    narrow = kind and NarrowDtype(kind)
    arrangement = Arrangement(ONE.shape, narrow=narrow)
    programs, source = PointPrograms(arrangement), filled(4, 1)
    expected = source.slots[1]["ssm"][2]
    expected = narrow.rounded(expected) if narrow else expected
    state = programs.read_state(source, 2)
    spec = state_spec(source, arrangement)
    assert {name: (each.shape, each.dtype) for name, each in spec.items()} == {
        name: (state[name].shape, state[name].dtype) for name in spec
    }
    size = sum(each.size * each.dtype.itemsize for each in spec.values())
    assert size == ONE.shape.bytes_per_waiting_state("float32", "float32", narrow)
    assert narrow is None or size < ONE.shape.bytes_per_slot("float32")
    after = programs.write_state(filled(4, 2), 3, state, 5)
    np.testing.assert_array_equal(after.slots[1]["ssm"][3], expected)
    # What was rounded travels as it is.
    again = programs.write_state(filled(4, 2), 1, programs.read_state(after, 3), 5)
    np.testing.assert_array_equal(again.slots[1]["ssm"][1], expected)


def test_only_an_idle_loop_waits_and_only_for_what_is_awaited(monkeypatch):
    monkeypatch.setattr(source, "PATIENCE", 3600.0)
    calls, made = source.Inbox(), []
    calls.take_all(idle=True)
    calls.awaited = 2
    calls.take_all()
    thread = threading.Timer(0.01, calls.post, [lambda: made.append("first")])
    thread.start()
    calls.take_all(idle=True)
    assert made == ["first"], "after the first call, the loop does not wait for another"
    calls.post(lambda: made.append("second"))
    calls.take_all()
    assert made == ["first", "second"]
    thread.join()


def test_pages_that_others_share_are_not_written():
    request, page = SimpleNamespace(transfer=SimpleNamespace(load=None)), 4
    load, kv = RemoteLoad(request, RemoteState(16), 2 * page, 5, [7, 8]), np.zeros((1, 2 * page, 1))
    arrival = Arrival(load, state={}, pieces=[(0, kv), (page, kv), (3 * page, kv)])
    calls, arrived = [], []
    programs = SimpleNamespace(
        write_state=lambda store, slot, state, position: calls.append((slot, position)),
        write_piece=lambda store, *, pages, piece: calls.append(pages),
    )
    scheduler = SimpleNamespace(arrived=arrived.append)
    loop = SimpleNamespace(replace_store=lambda change: change(None), scheduler=scheduler)
    arrival.write(loop, programs, page)
    assert calls == [(5, 16), [0, 7], [8, 0]]
    assert arrived == [load]


DTYPES = ["float32", "bfloat16", "float16", "int8", "uint8", "bool", "float8_e4m3fn", "int4", "float4_e2m1fn"]


def digest(values) -> bytes:
    return np.asarray(array_digest(jnp.asarray(values))).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_value_counts(dtype):
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    values = (np.arange(35) % 2).astype(kind).reshape(5, 7)
    seen = {digest(values)}
    for at in range(values.size):
        changed = values.copy()
        changed.reshape(-1)[at] = 1 - at % 2
        seen.add(digest(changed))
    assert len(seen) == 36


def test_positions_count():
    values = np.arange(40, dtype=np.float32)
    exchanged = values.copy()
    exchanged[[3, 30]] = values[[30, 3]]
    assert len({digest(each) for each in (values, exchanged, values[::-1], np.roll(values, 1))}) == 4
    assert digest(-np.zeros(3)) != digest(np.zeros(3))


def test_a_digest_does_not_depend_on_the_devices():
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs several devices")
    values = np.random.default_rng(0).standard_normal((8, 6), np.float32)
    for axes in (("x",), (None, "x")):
        place = NamedSharding(Mesh(np.array(devices[:2]), ("x",)), PartitionSpec(*axes))
        found = array_digest(jax.device_put(values, place))
        assert found.is_ready()  # a CPU takes few programs at a time whose devices wait for each other
        assert np.asarray(found).tobytes() == digest(values)


def test_rows_between_those_of_a_sample_count():
    """A fourth of the embedding's rows was once changed without another digest."""
    one, other = model(), model()
    before = model_digest(one, CONFIG)
    assert model_digest(other, CONFIG) == before
    table = parameters(other)["embed.weight"]
    rows = table.get_value()
    sampled = max(1, rows.size // 16)
    changed = np.array(rows).reshape(-1)
    changed[1:sampled] += 1.0
    table.set_value(jnp.asarray(changed.reshape(rows.shape)))
    try:
        assert model_digest(other, CONFIG) != before
    finally:
        table.set_value(rows)
