"""A mixed step computes what a decode step and then a prefill step compute."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from mamba_jax.drafts import MTPDrafts, NGramDrafts
from mamba_jax.rows import init_rows
from mamba_jax.step import step
from mamba_jax.store import init_store
from tests.support.fleets.step_host import TILE, Host
from tests.support.models.tiny_configs import FOR_ENGINES, STEP
from tests.support.selection import slow

RNG = np.random.default_rng(3)
PROMPTS = [tuple(int(t) for t in RNG.integers(0, 60, n)) for n in (13, TILE, 2 * TILE + 3, 9)]
CONFIGS = {"step": STEP, **FOR_ENGINES}


def start(config, source, interval):
    """Rows 1 and 2 have been prefilled and have sampled a token; row 3 has fed the first tile of its prompt."""
    host = Host(config, source=source, interval=interval)
    for row_id, prompt in enumerate(PROMPTS, 1):
        host.seat(row_id, tokens=prompt if source is not None and source.sees_tokens else None, logprobs=2)
    host.prefill(
        {"tokens": PROMPTS[0], "write": 1},
        {"tokens": PROMPTS[1], "write": 2},
        {"tokens": PROMPTS[2][:TILE], "write": 3, "sample": False},
    )
    return host


@pytest.mark.parametrize(
    ("name", "source", "interval"),
    [
        ("step", None, None),  # its programs also sample
        *(pytest.param("joined", None, interval, marks=pytest.mark.full) for interval in (None, 8)),
        pytest.param("smallest", MTPDrafts(), 8, marks=pytest.mark.full),
        pytest.param("smallest", NGramDrafts(1, 4), None, marks=pytest.mark.full),
        pytest.param("selective", None, None, marks=pytest.mark.full),
        slow("kimi", None, None),
        *(slow(name, None, 8) for name in ("step", "kimi", "selective")),
    ],
    ids=str,
)
def test_a_mixed_step_is_a_decode_step_and_a_prefill_step(name, source, interval):
    config, width = CONFIGS[name], 4 if interval is None else 1
    one, two = start(config, source, interval), start(config, source, interval)
    end_of_third = {"row_id": 3, "tokens": PROMPTS[2][TILE:], "c": TILE, "read": 3, "write": 4}
    for spare, prefill in ((10, end_of_third), (30, {"row_id": 4, "tokens": PROMPTS[3], "write": 5})):
        decode = [
            {"continues": True, "drafts": 3, "writes": range(spare, spare + width)},
            {"continues": True, "drafts": 3, "writes": range(spare + 4, spare + 4 + width)},
        ]
        prefill |= {"table": one.table(prefill["row_id"] - 1)}
        apart = [two.decode(*decode), two.prefill(prefill)]
        for mixed, alone in zip(one.mixed(decode, [prefill]), apart, strict=True):
            np.testing.assert_array_equal(mixed.tokens, alone.tokens)
            assert not mixed.tag_error
            for have, want in zip(jax.tree.leaves(mixed), jax.tree.leaves(alone), strict=True):
                np.testing.assert_allclose(have, want, atol=1e-4, rtol=1e-4)
        assert apart[0].num_emitted[:2].min() > 0
        for a, b in zip(jax.tree.leaves((one.store, one.rows)), jax.tree.leaves((two.store, two.rows)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-4, rtol=1e-4)


@dataclasses.dataclass
class AdapterReporter:
    """A model whose most likely token after each token is the number of the token's adapter."""

    config = STEP

    def run(self, tokens, layout, store):
        return jnp.zeros((len(tokens), STEP.hidden_size)).at[:, 0].set(layout.adapter), store

    def divided_logits(self, hidden, adapter):
        # Rows of the batch that are padding have no tokens.
        return jax.nn.one_hot(jnp.where(hidden[..., 0] == adapter, adapter, -1), STEP.vocab_size)

    logits = divided_logits


def test_each_row_of_a_mixed_step_has_its_own_adapter():
    entries = np.array([0, 4, 2, 6, 1, 5, 3], np.int32)  # of each seat
    rows = dataclasses.replace(
        init_rows(STEP, max_num_seqs=6, num_speculative_tokens=1, adapters=True), adapter=entries
    )
    store = init_store(STEP, num_slots=9, num_pages=5, page_size=8, dtype=jnp.float32)
    decode = DecodeBatch.empty(rows=3, num_speculative_tokens=1, pages_per_row=1)
    decode.row_id[:2], decode.length[:2], decode.read_slot[:2], decode.sample[:2] = (5, 2), 4, (1, 2), True
    # The draft of the first row is what the model says next.
    decode.tokens[0], decode.num_tokens[:2], decode.num_drafts[:2] = (7, entries[5]), (2, 1), (1, 0)
    decode.write_slot[:2] = [[3, 4], [5, 0]]
    prefill = PrefillBatch.empty(tokens=8, rows=3, tiles=2, pages_per_row=1, tile_size=8)
    prefill.row_id[:2], prefill.num_tokens[:2], prefill.sample[:2] = (6, 1), (3, 4), True
    prefill.tile_write_slot[:] = 6, 7
    run = jax.jit(functools.partial(step, AdapterReporter(), greedy=True))
    _, _, (decoded, prefilled) = run(store, rows, MixedBatch(decode, prefill))
    assert decoded.tokens.tolist() == [[entries[5], entries[5]], [entries[2], -1], [-1, -1]]
    assert prefilled.tokens[:, 0].tolist() == [entries[6], entries[1], -1]
