"""Sampling from logits and tables that are divided over devices by the vocabulary: what one device chooses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.sampling import choose, count_tokens, init_sampling_table, report_logprobs, sampling_row
from mamba_jax.sharding import make_mesh
from mamba_jax.sharding.axis import split_last, use_mesh

VOCAB, ROWS, HEADS = 8 * 40, 6, 3
GREEDY = [{}] * ROWS
MIXED = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {5: 4.0, 319: 4.0}},
    {"temperature": 0.7, "seed": 4, "top_k": 9, "frequency_penalty": 0.4},
    {"logprobs": 3},
]


def table_of(rows):
    table = init_sampling_table(len(rows) + 1)
    for i, row in enumerate(rows, 1):
        table = jax.tree.map(lambda column, value, i=i: column.at[i].set(value), table, sampling_row(**row))
    return table


def sample(logits, rows, drafts, counts, seen):
    row_id = jnp.arange(1, ROWS + 1)
    flat = split_last(logits.reshape(-1, VOCAB))
    emission = choose(
        flat.reshape(logits.shape),
        drafts=drafts,
        num_drafts=jnp.full(ROWS, HEADS - 1),
        length=jnp.full(ROWS, 9),
        sample=jnp.arange(ROWS) < ROWS - 1 if rows is GREEDY else jnp.ones(ROWS, bool),
        row_id=row_id,
        table=table_of(rows),
        output_counts=split_last(counts),
        prompt_seen=split_last(seen),
    )
    wanted = jnp.repeat(table_of(rows).logprobs[row_id], HEADS)
    told = report_logprobs(flat, emission.tokens.reshape(-1), wanted)
    seats = jnp.where(emission.tokens >= 0, row_id[:, None], ROWS + 1)
    return emission, told, count_tokens(split_last(counts), seats, emission.tokens)


@pytest.mark.smoke
@pytest.mark.parametrize("rows", [GREEDY, MIXED], ids=["greedy", "mixed"])
def test_several_devices_choose_what_one_chooses(rows):
    random = np.random.default_rng(5)
    # Few different values, so that the largest lies on several devices; one head with a number that is none.
    logits = random.integers(-9, 4, (ROWS, HEADS, VOCAB)).astype(np.float32)
    logits[1, 2, 200] = np.inf
    arguments = (
        jnp.asarray(logits),
        jnp.asarray(np.stack([logits[:, 0].argmax(-1), random.integers(0, VOCAB, ROWS)], axis=1), jnp.int32),
        jnp.asarray(random.integers(0, 3, (ROWS + 1, VOCAB)), jnp.int32),
        jnp.asarray(random.integers(0, 2, (ROWS + 1, VOCAB)), bool),
    )

    def run(shards):
        with use_mesh(make_mesh(shards) if shards > 1 else None):
            chosen = jax.jit(lambda logits, *rest: sample(logits, rows, *rest))(*arguments)
        return jax.tree.map(np.asarray, chosen)

    alone = run(1)
    assert alone[0].count.max() > 1
    np.testing.assert_array_equal(alone[0].finite, np.isfinite(logits).all(-1))
    for shards in (2, 4, 8):
        for ours, theirs in zip(jax.tree.leaves(run(shards)), jax.tree.leaves(alone), strict=True):
            if ours.dtype == np.float32:
                np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
            else:
                np.testing.assert_array_equal(ours, theirs)


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
