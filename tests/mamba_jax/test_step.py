"""Prefill and decode through the step, against whole sequences; splits, packing, padding, seats."""

import dataclasses

import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.programs import StepPrograms
from mamba_jax.store import store_bytes
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
NO_ATTENTION = dataclasses.replace(STEP, pattern="M-M", attention=None)


@pytest.mark.smoke
@pytest.mark.parametrize(("config", "num_drafts"), [(STEP, 3), (NO_ATTENTION, 0)], ids=["hybrid", "no attention"])
def test_prefill_then_decode_by_hand(config, num_drafts):
    """What the library's user does: prefill a prompt, then decode token by token."""
    host = Host(config, num_drafts=num_drafts)
    prompt, want = list(PROMPT[:11]), greedy(PROMPT[:11], 6, config)
    host.seat(1, logprobs=3)
    out = host.prefill({"tokens": prompt, "write": 1})
    tokens, logprobs = [int(out.tokens[0, 0])], [float(out.logprobs[0, 0])]
    for step in range(5):
        # The read slot is written at once: its row reads first.
        out = host.decode({"tokens": tokens[-1:], "c": 11 + step, "read": 1, "writes": [1]})
        tokens.append(int(out.tokens[0, 0]))
        logprobs.append(float(out.logprobs[0, 0]))
    assert tokens == want
    expected = expected_logprobs(prompt + want, config)[10:-1]
    np.testing.assert_allclose(logprobs, expected[np.arange(6), want], atol=1e-4)
    assert_holds(host, 1, prompt + want[:-1])


def test_tags_catch_a_slot_that_holds_something_else():
    host = Host()
    host.prefill({"tokens": PROMPT[:9], "write": 1})
    step = {"tokens": [1], "writes": [2]}
    assert host.decode(step | {"c": 8, "read": 1}).tag_error
    assert host.decode(step | {"c": 9, "read": 3}).tag_error
    assert host.decode(step | {"c": 9, "read": 0}).tag_error
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


def test_prompt_logprobs_over_chunks():
    host = Host()
    prompt = PROMPT[:20]
    want = expected_logprobs(prompt)
    ids = {1: [3, 8], 2: [5, 1, 12]}
    host.seat(1, prompt_logprobs=0, prompt_logprob_ids=ids[1])
    host.seat(2, prompt_logprobs=5, prompt_logprob_ids=ids[2])
    for i, (begin, end) in enumerate(((0, 11), (11, 12), (12, 20))):
        out = host.prefill(
            {"tokens": PROMPT[:7], "write": 1},
            {"tokens": prompt[begin:end], "c": begin, "read": 2 + i if begin else 0, "write": 3 + i},
        )
        got = out.prompt_logprobs
        # Of the row's own ids: the first row has the same first tokens.
        np.testing.assert_allclose(got.of_ids[1:7, :2], want[:6, ids[1]], atol=1e-4)
        for t in range(begin, end):
            if t == 0:
                continue  # the first token has no probability
            at = 7 + t - begin
            np.testing.assert_allclose(got.token[at], want[t - 1, prompt[t]], atol=1e-4)
            best = np.argsort(-want[t - 1])[:20]
            np.testing.assert_array_equal(got.top_ids[at], best)
            np.testing.assert_allclose(got.top[at], want[t - 1, best], atol=1e-4)
            np.testing.assert_allclose(got.of_ids[at, :3], want[t - 1, ids[2]], atol=1e-4)


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
    size = store_bytes(host.store) + store_bytes(host.rows)
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
        memory = host.programs.program(host.store, host.rows, batch).memory_analysis()
        assert memory.alias_size_in_bytes >= size
        assert memory.temp_size_in_bytes < size / 10
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
