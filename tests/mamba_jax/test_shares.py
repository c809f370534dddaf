"""A prefill step whose tokens are divided over members gives what it gives on one device: outputs, states and pages."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import MambaConfig
from mamba_jax.layout import PrefillLayout, ShareLayout
from mamba_jax.layout.base import Span
from mamba_jax.layout.member import Member
from mamba_jax.modules.conv import convolution
from mamba_jax.modules.mamba import Mamba
from mamba_jax.modules.recurrence import LINEAR, RecurrentMixer, recurrence
from mamba_jax.modules.selective import SELECTIVE
from mamba_jax.sharding import CONTEXT, make_mesh
from mamba_jax.sharding.across import this_member

MEMBERS, TOKENS, TILE, SLOTS = 4, 32, 4, 12
SPEC = jax.sharding.PartitionSpec
# Ends inside of tiles, a fresh row, an empty one, and two that read one slot.
LENGTH, NUM_TOKENS, READ = [6, 0, 3, 5, 2], [15, 9, 0, 4, 2], [3, 0, 5, 5, 5]
# The first row also writes the slot that it has read; the last tile is padding.
WRITE = [0, 4, 0, 0, 3, 0, 7, 0, 0, 6, 0, 9]
PAGE, EACH = 4, 6


def layout(page_table):
    return PrefillLayout.of(
        num_packed=TOKENS, tile_size=TILE, length=jnp.array(LENGTH), num_tokens=jnp.array(NUM_TOKENS),
        read_slot=jnp.array(READ), tile_write_slot=jnp.array(WRITE), page_table=page_table,
    )  # fmt: skip


def both(run, state, *inputs, page_table=None, of_state=None):
    """(y, state) of `run(layout, inputs, state)` by members, each with its share of the inputs, and on one device.

    Slot 0, and the first page of each member, are NaN.
    """
    table = jnp.zeros((len(LENGTH), 0), jnp.int32) if page_table is None else page_table
    nulls = slice(0, 1) if of_state is None else slice(None, None, EACH)
    state, of_state = jax.tree.map(lambda each: each.at[nulls].set(jnp.nan), state), of_state or SPEC()

    def on_each_device(table, state, *inputs):
        member = this_member(MEMBERS)
        return run(ShareLayout(layout(table).on_member(member), member), inputs, state)

    divided = jax.shard_map(
        on_each_device, mesh=make_mesh(1, members=MEMBERS), check_vma=False,
        in_specs=(SPEC(), of_state, *[SPEC(CONTEXT)] * len(inputs)), out_specs=(SPEC(CONTEXT), of_state),
    )  # fmt: skip
    whole = jax.jit(lambda table, state, *inputs: run(layout(table), inputs, state))
    return [jax.tree.map(np.asarray, form(table, state, *inputs)) for form in (jax.jit(divided), whole)]


def arrays(*shapes):
    random = np.random.default_rng(1)
    return [jnp.array(random.normal(size=shape), jnp.float32) for shape in shapes]


def convolved():
    state, x, weight, bias = arrays((SLOTS, 3, 8), (TOKENS, 8), (8, 4), (8,))
    return both(lambda layout, x, state: layout.run(convolution("silu", "w"), x, (weight, bias), state), state, x)


def scanned(heads=8, groups=8, erase=False, divisible=True):
    vectors, values = (TOKENS, groups, 4), (TOKENS, heads, 4)
    state, query, key, value, decay, strength, skip = arrays(
        (SLOTS, heads, 4, 4), vectors, vectors, values, values[:2], values[:2], (heads,)
    )
    inputs = query, key / 4, value, -jnp.abs(decay), jax.nn.sigmoid(strength)
    parameters = {"skip": None if erase else skip}
    operation = recurrence("ssm", LINEAR[erase])
    if not divisible:
        operation = dataclasses.replace(operation, divisible=None)
    return both(lambda layout, inputs, state: layout.run(operation, inputs, parameters, state), state, *inputs)


def mixed(heads=8, groups=4):
    """What a mixer with two convolutions runs between its projections."""
    config = MambaConfig(num_heads=heads, head_dim=4, state_size=4, num_groups=groups, conv_width=4)
    mixer = Mamba(config, 8, rngs=nnx.Rngs(0), dtype=jnp.float32)
    state = dict(zip(config.arrays, arrays(*((SLOTS, *each.shape) for each in config.state()[:3])), strict=True))
    inputs = arrays((TOKENS, 2, config.inner_size), (TOKENS, 2, config.key_size), (TOKENS, heads))
    return both(lambda layout, inputs, state: mixer.between(inputs, layout, state), state, *inputs)


def selected(size=4):
    """With a state of one number: as the RG-LRU has it, all of whose B and C are 1."""
    vectors = (TOKENS, size)
    state, x, b, c, dt, a, d = arrays((SLOTS, size, 8), (TOKENS, 8), vectors, vectors, (TOKENS, 8), (size, 8), (8,))
    if size == 1:
        b = c = jnp.ones(vectors)
    parameters = {"a": -jnp.abs(a), "d": d}
    run = lambda layout, inputs, state: layout.run(SELECTIVE, inputs, parameters, state)  # noqa: E731
    return both(run, state, x, b, c, jnp.abs(dt))


def attended(latent=False):
    kv, q, k, v = arrays(
        (MEMBERS * EACH, PAGE, 1 if latent else 4, 8), (TOKENS, 6, 8), (TOKENS, 1 + (not latent), 8), (TOKENS, 2, 8)
    )
    table = np.zeros((len(LENGTH), 7), np.int32)
    free = [[member * EACH + i for i in (2, 1, 5, 3, 4)] for member in range(MEMBERS)]
    for row, pages in enumerate((6, 3, 0, 3, 1)):
        table[row, :pages] = [free[i % MEMBERS].pop() for i in range(pages)]
    inputs = (q, k) if latent else (q, k, v)
    return both(
        lambda layout, given, kv: layout.attend(*given, *[None] * latent, kv, Span(0.3, window=None if latent else 15)),
        kv, *inputs, page_table=jnp.array(table), of_state=SPEC(CONTEXT),
    )  # fmt: skip


FORMS = {
    "convolution": convolved,
    "groups divide": scanned,
    "a mixer": mixed,
    "members share a group": lambda: mixed(groups=2),
    "heads of a mixer do not divide": lambda: mixed(heads=6, groups=2),
    "delta": lambda: scanned(erase=True),
    "heads do not divide": lambda: scanned(heads=6, groups=2),
    "not declared": lambda: scanned(divisible=False),
    "selective": selected,
    "gated linear unit": lambda: selected(size=1),
    "attention": attended,
    "latents": lambda: attended(latent=True),
}


def assert_same(found):
    (y, state), (want, want_state) = found
    real = sum(NUM_TOKENS)
    np.testing.assert_allclose(y[:real], want[:real], atol=1e-5)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one[1:], other[1:], atol=1e-6), state, want_state)


@pytest.mark.parametrize("form", FORMS)
def test_a_divided_step(form):
    assert_same(FORMS[form]())


@pytest.mark.parametrize("form", ["convolution", "groups divide", "members share a group", "selective"])
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


def test_what_works_per_token_sees_its_share():
    run = lambda one, inputs, state: (jnp.stack([one.positions, one.valid], axis=1), state)  # noqa: E731
    (found, _), (want, _) = both(run, jnp.zeros(1))
    np.testing.assert_array_equal(found, want)


def _no_exchange(member, x, *, split, concat):
    return jnp.concatenate([jnp.split(x, member.count, split)[0]] * member.count, concat)


def _of_the_first_member(member, x, axis=0):
    return jnp.split(x, member.count, axis)[0]


def _in_reverse(member, x, axis=0):
    return jnp.concatenate(jax.lax.all_gather(x, member.axis)[::-1], axis)


def _of_the_row_before(layout, state, along, own_states=ShareLayout._own_states):
    places, own = own_states(layout, state, along)
    return places, jax.tree.map(lambda each: jnp.roll(each, 1, axis=0), own)


def _of_the_last_tile(layout, state, own, along, with_states=ShareLayout._with_states):
    packed, slot = layout.whole.packed, layout.whole.packed.tiles.write_slot
    last = jnp.arange(len(slot)) == jnp.max(jnp.where(slot > 0, jnp.arange(len(slot)), 0))
    tiles = dataclasses.replace(packed.tiles, write_slot=jnp.where(last, slot, 0))
    whole = dataclasses.replace(layout.whole, packed=dataclasses.replace(packed, tiles=tiles))
    return with_states(dataclasses.replace(layout, whole=whole), state, own, along)


def _heads_of_the_first_member(mixer, v, heads, first, own_groups=RecurrentMixer._own_groups):
    return own_groups(mixer, v, heads, None if first is None else 0)


EXCHANGING = ["convolution", "a mixer", "selective"]
FAULTS = {
    (Member, "exchange"): (_no_exchange, [*EXCHANGING, "attention"]),
    (Member, "own"): (_of_the_first_member, EXCHANGING),
    (Member, "gather"): (_in_reverse, ["members share a group", "heads do not divide", "attention"]),
    (ShareLayout, "_own_states"): (_of_the_row_before, EXCHANGING),
    (ShareLayout, "_with_states"): (_of_the_last_tile, EXCHANGING),
    (RecurrentMixer, "_own_groups"): (_heads_of_the_first_member, ["members share a group"]),
}


@pytest.mark.parametrize(
    ("place", "fault", "form"),
    [
        pytest.param(place, fault, form, id=f"{place[1]}, {form}")
        for place, (fault, forms) in FAULTS.items()
        for form in forms
    ],
)
def test_planted_faults_are_seen(place, fault, form, monkeypatch):
    monkeypatch.setattr(*place, fault)
    with pytest.raises(AssertionError):
        assert_same(FORMS[form]())
