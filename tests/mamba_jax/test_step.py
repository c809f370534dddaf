"""Prefill and decode through the step, against whole sequences; splits, packing, padding, seats."""

import itertools

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.programs import StepPrograms
from tests.support.fleets.step_host import (
    DECODE_ROWS,
    PAGES_PER_ROW,
    PREFILL_ROWS,
    PREFILL_TOKENS,
    TILE,
    TILES,
    Host,
    assert_holds,
    expected_logprobs,
    greedy,
)
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import STEP, VOCAB

PROMPT = tuple(int(t) for t in np.random.default_rng(0).integers(0, VOCAB, 40))


def prompts(*lengths):
    rng = np.random.default_rng(1)
    return [tuple(int(t) for t in rng.integers(0, VOCAB, n)) for n in lengths]


def test_rows_of_odd_lengths_packed_together_equal_each_alone():
    rows = prompts(1, 3, TILE - 1, TILE, TILE + 1, 2 * TILE + 3)
    host = Host()
    out = host.prefill(*({"tokens": tokens, "write": i + 1} for i, tokens in enumerate(rows)))
    for i, tokens in enumerate(rows):
        want = expected_logprobs(tokens)[-1]
        np.testing.assert_allclose(host.logprobs(i + 1), want, atol=1e-4)
        assert out.tokens[i, 0] == want.argmax()
        assert_holds(host, i + 1, tokens)
        assert (out.num_emitted[i], out.kept[i]) == (1, len(tokens))
    np.testing.assert_array_equal(host.rows.length[1:7], [len(tokens) for tokens in rows])
    np.testing.assert_array_equal(host.rows.slot[1:7], range(1, 7))
    np.testing.assert_array_equal(host.rows.last_token[1:7], out.tokens[:, 0])


@pytest.mark.parametrize(
    "cuts", [(8, 16), (1,), (3, 7, 8, 9), (9, 10, 25), (15, 17), tuple(range(5, 29, 5)), (27,)], ids=str
)
def test_any_split_of_a_prompt_equals_one_prefill(cuts):
    """After another row, so that no chunk starts at the beginning of the packed batch."""
    prompt, other = PROMPT[:29], prompts(6)[0]
    host = Host()
    for i, (begin, end) in enumerate(itertools.pairwise((0, *cuts, len(prompt)))):
        chunk = {"row_id": 2, "tokens": prompt[begin:end], "c": begin, "read": 3 + i if begin else 0, "write": 4 + i}
        out = host.prefill({"tokens": other, "write": 1}, chunk)
        assert not out.tag_error
        assert_holds(host, 4 + i, prompt[:end])
        assert_holds(host, 1, other)
    np.testing.assert_allclose(host.logprobs(4 + len(cuts)), expected_logprobs(prompt)[-1], atol=1e-4)


def test_rows_of_every_class_in_one_decode_step():
    """A row that continues, one whose values come from the host, one that only samples, one that must not sample."""
    a, b, c, d = prompts(5, 12, 9, 4)
    host = Host()
    host.prefill(*({"tokens": tokens, "write": i + 1} for i, tokens in enumerate((a, b, c, d))))
    before = host.slot(3)
    out = host.decode(
        {"row_id": 1, "continues": True, "c": 999, "read": 35, "tokens": [1], "writes": [10]},
        {"row_id": 2, "tokens": [3, 4, 5], "c": 12, "read": 2, "writes": [0, 0, 11]},
        {"row_id": 3, "tokens": [], "c": 9, "read": 3, "writes": []},
        {"row_id": 4, "tokens": [6, 7], "c": 4, "read": 4, "writes": [12, 4], "sample": False},
    )
    next_a = greedy(a, 1)
    assert_holds(host, 10, (*a, *next_a))
    assert_holds(host, 11, (*b, 3, 4, 5))
    assert_holds(host, 12, (*d, 6))
    assert_holds(host, 4, (*d, 6, 7))
    for have, want in zip(host.slot(3), before, strict=True):
        np.testing.assert_array_equal(have, want)
    want = [greedy((*a, *next_a), 1)[0], greedy((*b, 3, 4, 5), 1)[0], greedy(c, 1)[0], -1]
    np.testing.assert_array_equal(out.tokens[:4, 0], want)
    assert (out.tokens[:, 1:] == -1).all()
    np.testing.assert_array_equal(out.num_emitted, [1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(out.kept, [1, 3, 0, 2, 0, 0])
    np.testing.assert_array_equal(host.rows.length[1:5], [6, 15, 9, 6])
    np.testing.assert_array_equal(host.rows.slot[1:5], [10, 11, 3, 4])
    np.testing.assert_array_equal(host.rows.last_token[1:4], want[:3])
    assert int(host.rows.length[0]) == int(host.rows.slot[0]) == 0
    assert not out.tag_error
    # The row that only sampled goes on from the same slot.
    host.decode({"row_id": 3, "continues": True, "writes": [20], "table": host.table(2)})
    assert_holds(host, 20, (*c, want[2]))


def test_tags_catch_a_slot_that_holds_something_else():
    host = Host()
    host.prefill({"tokens": PROMPT[:9], "write": 1})
    step = {"tokens": [1], "writes": [2]}
    assert host.decode(step | {"c": 8, "read": 1}).tag_error
    assert host.decode(step | {"c": 9, "read": 3}).tag_error
    assert host.decode(step | {"c": 9, "read": 0}).tag_error
    assert host.prefill({"tokens": [1], "read": 1, "write": 7}).tag_error  # of a row without tokens
    assert host.prefill({"tokens": [1, 2], "c": 8, "read": 1, "write": 2}).tag_error
    assert not host.prefill({"tokens": [1, 2], "c": 9, "read": 1, "write": 2}).tag_error
    assert host.store.tags[2].tolist() == [5, 11]  # written five times, holds eleven tokens
    assert not host.decode(step | {"c": 11, "read": 2}).tag_error


def test_debug_mode_sees_a_slot_that_two_rows_share():
    """No order of rows protects a slot that one reads and another writes, or that two write."""

    def error(step, tokens, *rows):
        host = Host()
        for slot in (1, 2):
            host.prefill({"tokens": PROMPT[:9], "write": slot})
        given = ({"tokens": PROMPT[:tokens], "c": 9, "read": read, "writes": [write]} for read, write in rows)
        return bool(getattr(host, step)(*given).tag_error)

    for step, tokens in (("decode", 1), ("prefill", 3)):
        assert not error(step, tokens, (1, 1), (2, 2))  # a row may write what it reads
        assert not error(step, tokens, (1, 3), (1, 4))  # several rows may read one slot
        for crossed in ([(1, 2), (2, 3)], [(2, 3), (1, 2)], [(1, 1), (1, 3)], [(1, 3), (2, 3)]):
            assert error(step, tokens, *crossed)


def test_penalties_count_what_was_emitted():
    host = Host()
    counts, seen = np.zeros(VOCAB, np.int32), np.zeros(VOCAB, bool)
    seen[list(PROMPT[:6])] = True
    host.seat(1, presence_penalty=1.5, repetition_penalty=1.7, output_counts=counts, prompt_seen=seen)
    tokens = list(PROMPT[:6])
    out = host.prefill({"tokens": tokens, "write": 1}, {"tokens": tokens, "write": 2})
    for _ in range(8):
        # Penalties act on logits, which log-probabilities equal up to a constant; so take the logits themselves.
        logits = np.asarray(long_memory_model(STEP).logits(host.store.hidden[1]))
        factor = np.where(seen | (counts > 0), 1.7, 1.0)
        want = np.where(logits > 0, logits / factor, logits * factor) - 1.5 * (counts > 0)
        token = int(out.tokens[0, 0])
        assert token == want.argmax()
        counts[token] += 1
        np.testing.assert_array_equal(host.rows.output_counts[1], counts)
        assert not host.rows.output_counts[2].any()
        out = host.decode(*({"continues": True, "writes": [i + 1]} for i in range(2)))


def test_a_new_tenant_forgets_the_old_one():
    host = Host()
    ones = np.ones(VOCAB, np.int32)
    host.seat(3, temperature=1.0, seed=5, output_counts=ones, prompt_seen=ones.astype(bool))
    host.prefill({"row_id": 3, "tokens": PROMPT[:9], "write": 1})
    others = jax.tree.map(lambda leaf: np.asarray(leaf[2]), host.rows)
    host.seat(3, top_k=4, output_counts=0 * ones, prompt_seen=np.zeros(VOCAB, bool))
    assert int(host.rows.length[3]) == int(host.rows.slot[3]) == 0
    assert (host.rows.drafts[3] == -1).all()
    assert float(host.rows.sampling.temperature[3]) == 0
    assert int(host.rows.sampling.top_k[3]) == 4
    assert not host.rows.output_counts[3].any()
    assert not host.rows.prompt_seen[3].any()
    jax.tree.map(lambda leaf, was: np.testing.assert_array_equal(leaf[2], was), host.rows, others)


@pytest.mark.parametrize(
    "sampling", [{"temperature": 0.5}, {"logit_bias": {3: 1.0}}, {"presence_penalty": 0.5}], ids=str
)
def test_greedy_programs_refuse_requests_that_sample(sampling):
    host = Host()
    host.programs = StepPrograms(long_memory_model(STEP), tile_size=TILE, greedy=True)
    with pytest.raises(ValueError, match="greedy programs"):
        host.seat(1, **sampling)


def test_programs_update_the_store_in_place_and_compile_once():
    host = Host()
    decode = DecodeBatch.empty(rows=DECODE_ROWS, num_speculative_tokens=3, pages_per_row=PAGES_PER_ROW)
    prefill = PrefillBatch.empty(
        tokens=PREFILL_TOKENS, rows=PREFILL_ROWS, tiles=TILES, pages_per_row=PAGES_PER_ROW, tile_size=TILE
    )
    one = DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=PAGES_PER_ROW)
    for batch in (decode, prefill):
        host.programs.program(host.store, host.rows, batch)
    compiled = host.programs.compilations
    for _ in range(2):
        host.programs.program(host.store, host.rows, one)
    assert host.programs.compilations == compiled + 1
    for batch in (decode, prefill, one):
        host.assert_updated_in_place(batch)
    for _ in range(2):
        host.prefill({"tokens": PROMPT[:9], "write": 1})
        host.decode({"continues": True, "writes": [2]})
    assert host.programs.compilations == compiled + 1
    with pytest.raises(ValueError, match="tiles of 4"):
        host.prefill({"tokens": PROMPT[:9], "write": 1}, tile_size=4)
    for run in (host.prefill, host.decode):
        with pytest.raises(ValueError, match=rf"is {VOCAB}: expected ids from (0|-1) to {VOCAB - 1}"):
            run({"tokens": [VOCAB], "write": 1, "writes": [1]})


def test_batches_without_rows_are_refused():
    with pytest.raises(ValueError, match=r"sizes \(0, 1\): at least 1 of each"):
        DecodeBatch.empty(rows=0, num_speculative_tokens=0)
    with pytest.raises(ValueError, match=r"sizes \(1, 0, 2, 8\): at least 1 of each"):
        PrefillBatch.empty(tokens=0, rows=1, tiles=2, tile_size=8)
