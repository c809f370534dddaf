"""A prefill step whose tokens are divided over members gives what it gives on one device: outputs, states and pages."""

import dataclasses
import re
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels_pallas import fixed_order, native
from kernels_pallas.dispatch import KernelChoice
from mamba_jax.config import MambaConfig
from mamba_jax.config.channel_recurrence import RGLRUConfig
from mamba_jax.layout import PrefillLayout, ShareLayout, pairs, shares
from mamba_jax.layout.base import Span
from mamba_jax.layout.member import Member
from mamba_jax.layout.pairs import exchanges_less, is_less_work
from mamba_jax.modules.conv import convolution
from mamba_jax.modules.linear_recurrence import Mamba
from mamba_jax.modules.recurrence import LINEAR, RecurrentMixer, recurrence
from mamba_jax.modules.selective import RGLRU, SELECTIVE
from mamba_jax.sharding import CONTEXT, make_mesh
from mamba_jax.sharding.across import this_member
from tests.support.engines.engines import OPTIMIZED
from tests.support.hlo_traffic import Traffic, count_collectives

MEMBERS, TOKENS, TILE, SLOTS = 4, 32, 4, 12
SPEC = jax.sharding.PartitionSpec
# Ends inside of tiles, a row on two members and then a fresh one on three, an empty one, and two that read one slot.
LENGTH, NUM_TOKENS, READ = [6, 0, 3, 5, 2], [11, 15, 0, 2, 2], [3, 0, 5, 5, 5]
# The first row also writes the slot that it has read; the tiles of slots 4, 7 and 8 begin on one member and end on the
# next one; the last two tiles are padding.
WRITE = [0, 0, 4, 3, 0, 7, 1, 8, 6, 10, 0, 9]
MOST_WRITES = 8
PAGE, EACH = 4, 6


def layout(page_table):
    return PrefillLayout.of(
        num_packed=TOKENS, tile_size=TILE, length=jnp.array(LENGTH), num_tokens=jnp.array(NUM_TOKENS),
        read_slot=jnp.array(READ), tile_write_slot=jnp.array(WRITE), page_table=page_table, most_writes=MOST_WRITES,
    )  # fmt: skip


def by_members(run, of_state, count, *, divided=True, slow=False):
    """`run(layout, inputs, state)` by members, each with its share of `count` inputs or with all of them, jitted."""
    share = SPEC(CONTEXT) if divided else SPEC()

    def on_each_device(table, state, *inputs):
        member = this_member(MEMBERS)
        whole = dataclasses.replace(layout(table).on_member(member), slow_links=slow)
        return run(ShareLayout(whole, member) if divided else whole, inputs, state)

    return jax.jit(
        jax.shard_map(
            on_each_device, mesh=make_mesh(1, members=MEMBERS), check_vma=False,
            in_specs=(SPEC(), of_state, *[share] * count), out_specs=(share, of_state),
        ),
        compiler_options=options(),
    )  # fmt: skip


def options():
    """Bits are promised for programs as users compile them."""
    return OPTIMIZED | fixed_order.COMPILER_OPTIONS if fixed_order.is_fixed() else None


NO_PAGES = jnp.zeros((len(LENGTH), 0), jnp.int32)


def both(run, state, *inputs, table=NO_PAGES, of_state=None, slow=False):
    """(y, state) of `run(layout, inputs, state)` by members and on one device; in a fixed order, in which members merge
    parts of attention, by members with all tokens.

    Slot 0, and the first page of each member, are NaN.
    """
    nulls = slice(0, 1) if of_state is None else slice(None, None, EACH)
    state = jax.tree.map(lambda each: each.at[nulls].set(jnp.nan), state)
    whole = jax.jit(lambda table, state, *inputs: run(layout(table), inputs, state), compiler_options=options())
    if of_state is not None and fixed_order.is_fixed():
        whole = by_members(run, of_state, len(inputs), divided=False)
    divided = by_members(run, of_state or SPEC(), len(inputs), slow=slow)
    return [jax.tree.map(np.asarray, form(table, state, *inputs)) for form in (divided, whole)]


def exchanged(run, state, *inputs, slow=False):
    """Bytes of floats that members exchange, by kind."""
    text = by_members(run, SPEC(), len(inputs), slow=slow).lower(NO_PAGES, state, *inputs).compile().as_text()
    return {kind: Traffic(text).received(kind) for kind in count_collectives(text)}


def by_pairs(run, *args, **options):
    """The step of this file has so many rows, and so few tokens, that pairs would not pay."""
    with pytest.MonkeyPatch.context() as patch:
        for rule in ("is_less_work", "exchanges_less"):
            patch.setattr(shares, rule, lambda *_: True)
        return run(*args, **options)


def arrays(*shapes):
    random = np.random.default_rng(1)
    return [jnp.array(random.normal(size=shape), jnp.float32) for shape in shapes]


def convolved(use=both):
    state, x, weight, bias = arrays((SLOTS, 3, 8), (TOKENS, 8), (8, 4), (8,))
    return use(lambda layout, x, state: layout.run(convolution("silu", "w"), x, (weight, bias), state), state, x)


def scanned(heads=8, groups=8, erase=False, divisible=True, by_channel=False, dtype=jnp.float32, use=both):
    vectors, values = (TOKENS, groups, 4), (TOKENS, heads, 5)
    state, query, key, value, decay, strength, skip = arrays(
        (SLOTS, heads, 5, 4), vectors, vectors, values, (TOKENS, heads, 4) if by_channel else values[:2], values[:2],
        (heads,),
    )  # fmt: skip
    state, decay = state.astype(dtype), decay / 4  # remembers several shares
    inputs = query, key / 4, value, -jnp.abs(decay), jax.nn.sigmoid(strength)
    parameters = {"skip": None if erase else skip}
    operation = recurrence("ssm", LINEAR[erase])
    if not divisible:
        operation = dataclasses.replace(operation, divisible=None)
    return use(lambda layout, inputs, state: layout.run(operation, inputs, parameters, state), state, *inputs)


def mixed(heads=8, groups=4, use=both):
    """What a mixer with two convolutions runs between its projections."""
    config = MambaConfig(num_heads=heads, head_dim=4, state_size=4, num_groups=groups, conv_width=4)
    mixer = Mamba(config, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    state = dict(zip(config.arrays, arrays(*((SLOTS, *each.shape) for each in config.state()[:3])), strict=True))
    inputs = arrays((TOKENS, 2, config.inner_size), (TOKENS, 2, config.key_size), (TOKENS, heads))
    return use(lambda layout, inputs, state: mixer.between(inputs, layout, state), state, *inputs)


def gated(use=both):
    """A mixer with an RG-LRU."""
    config = RGLRUConfig(channels=8, conv_width=4, num_heads=4, activation="gelu")
    mixer = RGLRU(config, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    window, state, x = arrays((SLOTS, 3, 8), (SLOTS, 1, 8), (TOKENS, 8))
    run = lambda layout, inputs, state: mixer(*inputs, layout, state)  # noqa: E731
    return use(run, {"conv_x": window, "selective": state}, x)


def selected(size=4, channels=8, use=both):
    """With a state of one number: as the RG-LRU has it, all of whose B and C are 1."""
    vectors, values = (TOKENS, size), (TOKENS, channels)
    shapes = (SLOTS, size, channels), values, vectors, vectors, values, (size, channels), (channels,)
    state, x, b, c, dt, a, d = arrays(*shapes)
    if size == 1:
        b = c = jnp.ones(vectors)
    parameters = {"a": -jnp.abs(a), "d": d}
    run = lambda layout, inputs, state: layout.run(SELECTIVE, inputs, parameters, state)  # noqa: E731
    return use(run, state, x, b, c, jnp.abs(dt) / 8)


def attended(latent=False):
    kv, q, k, v = arrays(
        (MEMBERS * EACH, PAGE, 1 if latent else 4, 8), (TOKENS, 6, 8), (TOKENS, 1 + (not latent), 8), (TOKENS, 2, 8)
    )
    table = np.zeros((len(LENGTH), 7), np.int32)
    free = [[member * EACH + i for i in (2, 1, 5, 3, 4)] for member in range(MEMBERS)]
    for row, pages in enumerate((5, 4, 0, 2, 1)):
        table[row, :pages] = [free[i % MEMBERS].pop() for i in range(pages)]
    inputs = (q, k) if latent else (q, k, v)
    return both(
        lambda layout, given, kv: layout.attend(*given, *[None] * latent, kv, Span(0.3, window=None if latent else 15)),
        kv, *inputs, table=jnp.array(table), of_state=SPEC(CONTEXT),
    )  # fmt: skip


SLOW = partial(both, slow=True)
FORMS = {
    "convolution": convolved,
    "groups divide": scanned,
    "a mixer": mixed,
    "members share a group": lambda: mixed(groups=2),
    "heads of a mixer do not divide": lambda: by_pairs(mixed, heads=6, groups=2),
    "delta": lambda: scanned(erase=True),
    "pairs": lambda: by_pairs(scanned, heads=6, groups=2),
    "pairs, delta": lambda: by_pairs(scanned, heads=2, groups=1, erase=True),
    "pairs, delta by channel": lambda: by_pairs(scanned, heads=1, groups=1, erase=True, by_channel=True),
    "pairs, selective": lambda: by_pairs(selected, channels=6),
    "a convolution over slow links": lambda: by_pairs(convolved, use=SLOW),
    "a mixer over slow links": lambda: by_pairs(mixed, use=SLOW),
    "delta over slow links": lambda: by_pairs(scanned, erase=True, use=SLOW),
    "selective over slow links": lambda: by_pairs(selected, use=SLOW),
    "a gated mixer over slow links": lambda: by_pairs(gated, use=SLOW),
    "rounded states over slow links": lambda: by_pairs(scanned, dtype=jnp.bfloat16, use=SLOW),
    "rounded states": lambda: by_pairs(scanned, heads=6, groups=2, dtype=jnp.bfloat16),
    "not declared": lambda: scanned(divisible=False),
    "selective": selected,
    "gated linear unit": lambda: selected(size=1),
    "a gated mixer": gated,
    "attention": attended,
    "latents": lambda: attended(latent=True),
}


PAIRS = ["pairs", "pairs, delta"]


def assert_same(found, *, exact=False):
    (y, state), (want, want_state) = found
    real = sum(NUM_TOKENS)
    of_state, of_y = ({"rtol": 0 if exact else 1e-7, "atol": 0 if exact else atol} for atol in (1e-6, 1e-5))
    np.testing.assert_allclose(y[:real], want[:real], **of_y)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one[1:], other[1:], **of_state), state, want_state)


# Forms of which other forms have each part.
ALIKE = "convolution|members .*|(pairs, )?delta|selective|groups divide|heads .*|(a )?gated .*|rounded .*|.* slow links"
MARKED = [pytest.param(form, marks=[pytest.mark.full] * bool(re.fullmatch(ALIKE, form))) for form in FORMS]


@pytest.mark.parametrize("form", MARKED)
def test_a_divided_step(form):
    assert_same(FORMS[form]())


NEEDS_NATIVE = pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")


@pytest.mark.full
@NEEDS_NATIVE
@pytest.mark.parametrize("form", FORMS)
def test_a_divided_step_has_the_same_bits_in_a_fixed_order(form):
    with KernelChoice(named=fixed_order.NAME).applied():
        assert_same(FORMS[form](), exact=True)


@pytest.mark.full
@NEEDS_NATIVE
def test_another_order_of_merging_is_seen(monkeypatch):
    merge = shares.merge_attention_parts
    monkeypatch.setattr(shares, "merge_attention_parts", lambda out, lse: merge(out[::-1], lse[::-1]))
    with KernelChoice(named=fixed_order.NAME).applied(), pytest.raises(AssertionError):
        assert_same(attended(), exact=True)


@pytest.mark.smoke
@pytest.mark.parametrize("form", ["members share a group", "convolution", "groups divide", "selective", "pairs"])
def test_states_written_one_by_one_as_on_tpu(form, monkeypatch):
    """Without outputs, whose exchange a CPU may run in another order on each device."""
    monkeypatch.setattr(ShareLayout, "_write_at_once", ShareLayout._write_each)
    run = ShareLayout.by_heads

    def without_outputs(*args):
        y, state = run(*args)
        return jnp.zeros_like(y), state

    monkeypatch.setattr(ShareLayout, "by_heads", without_outputs)
    (_, state), (y, want) = FORMS[form]()
    assert_same(((y, state), (y, want)))


@pytest.mark.parametrize(("erase", "of_transition"), [(False, 6), (True, 6 * 4 * 4)])
def test_pairs_exchange_no_tokens(erase, of_transition):
    """In floats: a transition and a state of each member, and the state after each tile."""
    found, state = by_pairs(scanned, heads=6, groups=2, erase=erase, use=exchanged), 6 * 5 * 4
    assert found == {"all-gather": 4 * MEMBERS * (of_transition + state), "all-reduce": 4 * MOST_WRITES * state}


@pytest.mark.full
def test_over_slow_links_a_mixer_exchanges_no_tokens():
    """In floats: of each member a decay for each head, a state and two windows, and these after as many tiles as are
    written."""
    state = 8 * 4 * 4 + 3 * (8 * 4) + 3 * (2 * 4 * 4)
    found = by_pairs(mixed, use=partial(exchanged, slow=True))
    assert found == {"all-gather": 4 * MEMBERS * (8 + state), "all-reduce": 4 * MOST_WRITES * state}
    by_heads = by_pairs(mixed, use=exchanged)
    assert by_heads["all-to-all"] == 4 * TOKENS // MEMBERS * (32 + 32 + 8 + 32)
    assert by_heads["all-gather"] == 4 * MOST_WRITES * state


@pytest.mark.parametrize(("tokens", "writes", "less"), [(32_768, 18, True), (65_536, 275, False), (16_384, 18, False)])
def test_pairs_are_used_over_slow_links_where_they_exchange_less(tokens, writes, less):
    """Nemotron-3-Nano's states of 2.1 MB, 8 members; with prefix caching by chunks' ends, and by blocks."""
    share, float_ = tokens // 8, partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    inputs = jax.ShapeDtypeStruct((share, 4096 + 2048), jnp.bfloat16), float_((share, 64)), float_((share, 64))
    state, whole = float_((400, 64, 64, 128)), SimpleNamespace(written=range(writes))
    assert exchanges_less(LINEAR[False].divisible.transition, inputs, state, whole, 8) == less


@pytest.mark.parametrize(
    ("rows", "members", "decays", "erases"),
    [(2, 2, False, False), (2, 4, True, True), (4, 4, True, False), (16, 8, False, False)],
)
def test_pairs_are_used_where_they_scan_fewer_tiles(rows, members, decays, erases):
    """4,096 tokens; by hand, one scan is of 34, 34, 36 and 48 tiles, those of a share of 19, 11, 15 and 35 pieces."""
    whole = PrefillLayout.of(
        num_packed=4096, tile_size=128, length=jnp.zeros(rows, int), num_tokens=jnp.zeros(rows, int),
        read_slot=jnp.zeros(rows, int), tile_write_slot=jnp.zeros(32 + rows, int), page_table=jnp.zeros((rows, 0), int),
    )  # fmt: skip
    found = [is_less_work(LINEAR[erase].divisible.transition, whole, members) for erase in (False, True)]
    assert found == [decays, erases]


def test_with_many_rows_inputs_are_gathered():
    inputs = 2 * 2 * 4 + 6 * 5 + 6 + 6  # queries and keys of groups; values, decays and strengths of heads
    assert scanned(heads=6, groups=2, use=exchanged) == {"all-gather": 4 * TOKENS * inputs}


def test_what_works_per_token_sees_its_share():
    run = lambda one, inputs, state: (jnp.stack([one.positions, one.valid], axis=1), state)  # noqa: E731
    (found, _), (want, _) = both(run, jnp.zeros(1))
    np.testing.assert_array_equal(found, want)


def _no_exchange(member, x, *, split, concat):
    return jnp.concatenate([jnp.split(x, member.count, split)[0]] * member.count, concat)


def _of_the_first_member(member, x, axis=0):
    return jnp.split(x, member.count, axis)[0]


def _own_instead(member, x, axis=0):
    return jnp.concatenate([x] * member.count, axis)


def _in_reverse(member, x, axis=0):
    return jnp.concatenate(jax.lax.all_gather(x, member.axis)[::-1], axis)


def _of_the_row_before(layout, state, along, own_states=ShareLayout._own_states):
    places, own = own_states(layout, state, along)
    return places, jax.tree.map(lambda each: jnp.roll(each, 1, axis=0), own)


def _of_the_last_tile(layout, state, after, with_states=ShareLayout._with_states):
    packed, target = layout.whole.packed, layout.whole.packed.tiles.write_slot
    last = jnp.arange(len(target)) == jnp.max(jnp.where(target > 0, jnp.arange(len(target)), 0))
    tiles = dataclasses.replace(packed.tiles, write_slot=jnp.where(last, target, 0))
    whole = dataclasses.replace(layout.whole, packed=dataclasses.replace(packed, tiles=tiles))
    return with_states(dataclasses.replace(layout, whole=whole), state, after)


def _ends_of_the_first_member(whole, member, own_tiles=pairs.own_tiles):
    own, piece = own_tiles(whole, member)
    return own, jnp.where(member.index == 0, jnp.maximum(piece, 0), -1)


def _heads_of_the_first_member(mixer, v, heads, first, own_groups=RecurrentMixer._own_groups):
    return own_groups(mixer, v, heads, None if first is None else 0)


EXCHANGING = ["convolution", "a mixer", "selective"]
FAULTS = [
    ((Member, "exchange"), _no_exchange, [*EXCHANGING, "attention"]),
    ((Member, "own"), _of_the_first_member, EXCHANGING),
    ((Member, "gather"), _in_reverse, ["members share a group", "not declared", "attention", *PAIRS]),
    ((Member, "gather"), _own_instead, [*PAIRS, "a mixer over slow links"]),
    ((pairs, "own_tiles"), _ends_of_the_first_member, PAIRS),
    ((ShareLayout, "_own_states"), _of_the_row_before, EXCHANGING),
    ((ShareLayout, "_with_states"), _of_the_last_tile, [*EXCHANGING, *PAIRS]),
    ((RecurrentMixer, "_own_groups"), _heads_of_the_first_member, ["members share a group"]),
]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("place", "fault", "form"),
    [
        pytest.param(place, fault, form, id=f"{place[1]}, {fault.__name__}, {form}")
        for place, fault, forms in FAULTS
        for form in forms
    ],
)
def test_planted_faults_are_seen(place, fault, form, monkeypatch):
    monkeypatch.setattr(*place, fault)
    with pytest.raises(AssertionError):
        assert_same(FORMS[form]())
