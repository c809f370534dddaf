"""Sampling and experts divided over devices: what one device computes, and no array of the size of what is divided."""

import dataclasses
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mamba_jax.config import MOE, HybridConfig
from mamba_jax.modules.feed_forward import MoE, rows_at_once
from mamba_jax.sampling import choose, count_tokens, largest, report_logprobs
from mamba_jax.sampling.masks import MaskBatch, init_masks, mask_words, write_masks
from mamba_jax.sharding import make_mesh, use_mesh
from mamba_jax.sharding.across import ShardedModule, across
from mamba_jax.sharding.axis import split_last
from mamba_jax.sharding.parameters import mixer_placements
from tests.support.models.random_models import random_module
from tests.support.models.tiny_configs import MOE as TINY
from tests.support.sampling import asked_of, table_of

VOCAB, HEADS = 8 * 40, 3
GREEDY = [{}] * 8
MIXED = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0, 319: 4.0}},
    {"temperature": 0.7, "seed": 4, "top_k": 9, "frequency_penalty": 0.4},
    {"temperature": 1.2, "seed": 5, "top_p": 0.6, "min_p": 0.01},
    {"temperature": 1.0, "seed": 6, "top_k": 40, "top_p": 0.8, "presence_penalty": 0.5},
    {"logprobs": 3},
]


def sample(logits, rows, drafts, counts, seen):
    count = len(rows)
    row_id = jnp.arange(1, count + 1)
    flat = split_last(logits.reshape(-1, VOCAB))
    asked = asked_of(
        table_of(*rows), logits.shape, drafts=drafts, length=jnp.full(count, 9),
        sample=jnp.arange(count) < count - (rows is GREEDY), output_counts=split_last(counts),
        prompt_seen=split_last(seen),
    )  # fmt: skip
    emission = choose(flat.reshape(logits.shape), asked)
    wanted = jnp.repeat(table_of(*rows).logprobs[row_id], HEADS)
    told = report_logprobs(flat, emission.tokens.reshape(-1), wanted)
    seats = jnp.where(emission.tokens >= 0, row_id[:, None], count + 1)
    return emission, told, count_tokens(split_last(counts), seats, emission.tokens)


@pytest.mark.smoke
@pytest.mark.parametrize("shards", [8, 2])
@pytest.mark.parametrize("rows", [GREEDY, MIXED, MIXED[:6]], ids=["greedy", "mixed", "rows that do not divide"])
def test_several_devices_choose_what_one_chooses(rows, shards):
    random, count = np.random.default_rng(5), len(rows)
    # Few different values, so that the largest lies on several devices; one head with a number that is none.
    logits = random.integers(-9, 4, (count, HEADS, VOCAB)).astype(np.float32)
    logits[1, 2, 200] = np.inf
    arguments = (
        jnp.asarray(logits),
        jnp.asarray(np.stack([logits[:, 0].argmax(-1), random.integers(0, VOCAB, count)], axis=1), jnp.int32),
        jnp.asarray(random.integers(0, 3, (count + 1, VOCAB)), jnp.int32),
        jnp.asarray(random.integers(0, 2, (count + 1, VOCAB)), bool),
    )

    def run(shards):
        with use_mesh(make_mesh(shards) if shards > 1 else None):
            chosen = jax.jit(lambda logits, *rest: sample(logits, rows, *rest))(*arguments)
        return jax.tree.map(np.asarray, chosen)

    alone = run(1)
    assert alone[0].count.max() > 1
    np.testing.assert_array_equal(alone[0].finite, np.isfinite(logits).all(-1))
    for ours, theirs in zip(jax.tree.leaves(run(shards)), jax.tree.leaves(alone), strict=True):
        if ours.dtype == np.float32:
            np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
        else:
            np.testing.assert_array_equal(ours, theirs)


def test_each_device_samples_its_share_of_the_rows_with_every_seed():
    """With masks, and with random numbers of many seeds and positions; the devices never collect all logits."""
    random, count = np.random.default_rng(7), len(MIXED)
    counts = jnp.asarray(random.integers(0, 3, (count + 1, VOCAB)), jnp.int32)
    masks = init_masks(count + 1, HEADS, VOCAB)
    bits = jnp.asarray(random.integers(0, 1 << 32, (2, HEADS, mask_words(VOCAB)), np.uint32))
    masks = write_masks(masks, MaskBatch(row_id=jnp.array([2, 5]), bits=bits))

    def chosen(logits, table, length):
        penalties = {"output_counts": split_last(counts), "prompt_seen": split_last(counts > 1)}
        drafts = jnp.full((count, HEADS - 1), 3)
        asked = asked_of(table, logits.shape, drafts=drafts, length=length, masks=masks, **penalties)
        return choose(split_last(logits.reshape(-1, VOCAB)).reshape(logits.shape), asked, supports=True)

    logits = jnp.asarray(random.normal(0, 2, (count, HEADS, VOCAB)).astype(np.float32))
    table, length = table_of(*(row | {"sampling_mask": True} for row in MIXED)), jnp.full(count, 9)
    programs = {}
    for shards in (1, 8):
        with use_mesh(make_mesh(shards) if shards > 1 else None):
            programs[shards] = jax.jit(chosen).lower(logits, table, length).compile()
    text = programs[8].as_text()
    assert "all-to-all(" in text
    assert not re.search(rf"{VOCAB}\]\S* all-gather\(", text)
    seen = set()
    for seed in range(40):
        keys = jnp.asarray(random.integers(0, 1 << 32, table.key.shape, np.uint32))
        seeded = dataclasses.replace(table, key=keys, temperature=jnp.where(jnp.arange(count + 1) % 4 < 3, 1.5, 0.0))
        alone, divided = (
            jax.tree.map(np.asarray, run(logits, seeded, length + seed)) for run in (programs[1], programs[8])
        )
        jax.tree.map(np.testing.assert_array_equal, alone, divided)
        seen |= set(alone.tokens[:, 0])
        assert not (alone.supports[1] & ~np.asarray(bits[0]).view(np.uint8)).any()  # the seat 2 has masks
    assert len(seen) > 40


@pytest.mark.parametrize("shards", [1, 2, 8])
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 3])
def test_tokens_are_counted_where_they_belong(shards, vocab):
    counts = np.random.default_rng(2).integers(0, 5, (4, vocab)).astype(np.int32)
    seat = np.array([[1, 1, 4], [3, 4, 3], [2, 2, 2]], np.int32)  # 4: nowhere
    tokens = np.array([[0, vocab - 1, 5], [40, -1, 39], [160, 160, 160]], np.int32)
    with use_mesh(make_mesh(shards) if shards > 1 else None):
        after = np.asarray(jax.jit(lambda counts, *rest: count_tokens(split_last(counts), *rest))(counts, seat, tokens))
    for row, token in zip(seat.ravel(), tokens.ravel(), strict=True):
        if row < 4:
            counts[row, token] += 1
    np.testing.assert_array_equal(after, counts)


WIDE = 8 * 300  # each of eight devices has more than one block of those that are looked at first


def found(logits, shards):
    with use_mesh(make_mesh(shards) if shards > 1 else None):
        index, finite = jax.jit(lambda logits: largest(split_last(logits)))(jnp.asarray(logits, jnp.float32))
    assert index.dtype == jnp.int32
    return np.asarray(index), np.asarray(finite)


def rows_of_logits():
    """Random ones of few different values, so that most have their largest on several devices; then special ones."""
    rng = np.random.default_rng(1)
    logits = rng.integers(-40, 4, (40, WIDE)).astype(np.float32)
    logits[:8] = rng.normal(size=(8, WIDE))
    logits[8] = 0
    logits[9, ::2] = -0.0  # equal to 0
    logits[9, 1::2] = 0
    logits[10] = -np.inf
    logits[11, 1700] = np.inf
    logits[12, [900, 2300]] = np.nan  # which one is found means nothing, but that they are not finite
    logits[13, [300, 2399]] = np.inf
    logits[14] = 0
    logits[14, [599, 600, 601]] = np.float32(7), np.nextafter(np.float32(7), np.float32(8)), 7  # a tie but for a digit
    logits[15] = -1e-40  # subnormal: it may count as zero, but the same everywhere
    return logits


@pytest.mark.parametrize("shards", [1, 2, 4, 8])
def test_finds_what_numpy_finds(shards):
    logits, part = rows_of_logits(), WIDE // shards
    # The same largest at one place of each of two parts: the first wins, whichever devices they are on.
    pairs = np.full((shards * (shards - 1), WIDE), -3.0, np.float32)
    for row, (i, j) in zip(pairs, itertools.permutations(range(shards), 2), strict=True):
        row[[i * part + 5, j * part + 2]] = 1.5
    logits = np.concatenate([logits, pairs])
    for size in (WIDE, WIDE - 1):  # a vocabulary that divides, and one that does not
        some = logits[:, :size]
        index, finite = found(some, shards)
        numbers = ~np.isnan(some).any(-1)
        np.testing.assert_array_equal(index[numbers], some.argmax(-1)[numbers])
        np.testing.assert_array_equal(finite, np.isfinite(some).all(-1))
        assert numbers.sum() == len(logits) - 1


def test_devices_exchange_only_what_they_have_found():
    with use_mesh(make_mesh(4)):
        run = jax.jit(lambda logits: largest(split_last(logits)))
        text = run.lower(jax.ShapeDtypeStruct((16, WIDE), jnp.float32)).compile().as_text()
    exchanged = [line for line in text.splitlines() if " all-gather(" in line or " all-reduce(" in line]
    assert len(exchanged) == 1
    assert "s32[4,3,16]" in exchanged[0] or "s32[12,16]" in exchanged[0]


HIDDEN, TOKENS, DEVICES = 16, 1100, 8
CONFIGS = {
    "latent": dataclasses.replace(TINY, num_experts=16, experts_per_token=4, shared_size=16, intermediate_size=8),
    "gated": dataclasses.replace(
        TINY, num_experts=8, experts_per_token=4, router="softmax", num_groups=1, top_groups=1,
        latent_size=None, gated=True, activation="silu", shared_size=0,
    ),
}  # fmt: skip


class Valid(NamedTuple):
    """All that experts ask of a layout."""

    valid: Any
    adapter: Any = None


def made(name, bias=None):
    """A layer and its model. `bias` is added to the router's scores of experts."""
    config = HybridConfig(family="t", vocab_size=64, hidden_size=HIDDEN, pattern=MOE, norm_eps=1e-5, moe=CONFIGS[name])
    moe, _ = random_module(lambda: MoE(config.moe, HIDDEN, rngs=nnx.Rngs(0), dtype=jnp.float32), scale=0.3)
    if bias is not None:
        moe.router.correction_bias[...] = jnp.asarray(bias, jnp.float32)
    return moe, config


def run(moe, config, x, valid, mesh):
    divided = ShardedModule(moe, mixer_placements(config, MOE, 0))
    graph, state = nnx.split(moe)

    def layer(state, x, valid):
        modules = {"moe": dataclasses.replace(divided, module=nnx.merge(graph, state))}
        return across(config, modules, lambda m, layout, s, x: m["moe"](x, layout, s), Valid(valid), None, x)[0]

    with use_mesh(mesh):
        return jax.jit(layer).lower(state, x, valid).compile(), (state, x, valid)


@pytest.mark.smoke("name")
@pytest.mark.parametrize("lot", ["one has all", "even", "two have most"])
@pytest.mark.parametrize("name", CONFIGS)
def test_divided_experts_give_what_all_give(name, lot):
    """However the tokens choose: with all on one device, that one takes all of them piece by piece."""
    config = CONFIGS[name]
    share = config.num_experts // DEVICES
    bias = None
    if config.router == "sigmoid" and lot != "even":
        liked = 2 * share if lot == "two have most" else share
        bias = np.where(np.arange(config.num_experts) < liked, 10.0, 0.0)
    moe, model = made(name, bias)
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(TOKENS, HIDDEN)), jnp.float32)
    if config.router == "softmax" and lot != "even":
        x = jnp.asarray(np.tile(x[:1] if lot == "one has all" else x[:2], (TOKENS, 1))[:TOKENS])
    valid = jnp.arange(TOKENS) < TOKENS - 60
    rows = TOKENS * config.experts_per_token
    assert rows_at_once(rows, share, config.num_experts) < rows // 2
    program, arguments = run(moe, model, x, valid, make_mesh(DEVICES))
    expected, same = run(moe, model, x, valid, None)
    got, whole = (np.asarray(p(*a))[:-60] for p, a in ((program, arguments), (expected, same)))
    np.testing.assert_allclose(got, whole, atol=3e-5 * np.abs(whole).max())
    text = program.as_text()
    assert text.count(" all-reduce(") + text.count(" all-reduce-start(") == 1


def test_no_piece_is_larger_than_what_it_replaces():
    for rows in (64, 5000, 20480, 45056):
        for experts in (8, 72, 512):
            for devices in (1, 2, 4, 8):
                at_once = rows_at_once(rows, experts // devices, experts)
                assert at_once == rows or (2 * at_once <= rows and at_once * devices >= 1.5 * rows)
    assert rows_at_once(20480, 64, 512) == 3840
    assert rows_at_once(640, 64, 512) == 640
