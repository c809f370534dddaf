"""Drafts of EAGLE-3 against its formulas in numpy, through prefill and decode steps."""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.drafts import MTPDrafts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from tests.support.drafters import EAGLE, EAGLE_NORMED, eagle, features, states_of, weights, with_tokens
from tests.support.random_models import decisive_model
from tests.support.step_host import DECODE_ROWS, PAGE, PAGES_PER_ROW, Host
from tests.support.tiny_configs import STEP

PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
CONFIGS = {"plain": STEP.with_drafter(EAGLE), "normed": STEP.with_drafter(EAGLE_NORMED)}


@functools.cache
def model_of(name: str) -> HybridModel:
    """The cached model of `decisive_model`, from which `Host` makes its programs: with a draft vocabulary."""
    return with_tokens(CONFIGS[name], decisive_model(CONFIGS[name]))


def read_by_drafter(name, tokens):
    """What the drafter reads of each token, by the whole-sequence form of the target."""
    config = CONFIGS[name].drafter
    return features(drafter_weights(name), config, [states_of(model_of(name), tokens)[at] for at in config.places])


def drafter_weights(name):
    return weights({path: leaf[...] for path, leaf in parameters(model_of(name)).items()})


def assert_drafts(host, name, seat, tokens, table):
    """The drafts after `tokens` (whose last one has not been fed), and the keys and values of the tokens before."""
    w, config = drafter_weights(name), CONFIGS[name].drafter
    pairs = list(zip(read_by_drafter(name, tokens[:-1]), tokens[1:], strict=True))
    out, logits, cache = eagle(w, config, pairs)
    for layer, (keys, values) in enumerate(cache):
        kv = np.asarray(host.store.kv[STEP.num_attention_uses + layer])
        for index in range(1, len(tokens)):
            page = kv[table[index // PAGE], index % PAGE]
            np.testing.assert_allclose(page[0::2], keys[index - 1], atol=2e-4)
            np.testing.assert_allclose(page[1::2], values[index - 1], atol=2e-4)
    for draft in np.asarray(host.rows.drafts[seat]).tolist():
        place = np.flatnonzero(w["tokens"] == draft)
        assert len(place) == 1, "a draft that is not in the draft vocabulary"
        assert logits[-1].max() - logits[-1][place[0]] < 1e-3
        pairs.append((out[-1], draft))
        out, logits, _ = eagle(w, config, pairs)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_definition(name):
    model, tokens = model_of(name), np.array(PROMPT)
    layout = SequenceLayout.of(1, len(PROMPT))
    hidden, _ = model.hidden(tokens, layout, None)
    read = np.asarray(model.draft_input(hidden))
    np.testing.assert_allclose(read, read_by_drafter(name, PROMPT), atol=1e-4)
    previous = np.concatenate([np.full((1, read.shape[1]), 1e3, np.float32), read[:-1]])
    ours = model.draft_logits(model.draft(tokens, previous, layout, None)[0])
    pairs = list(zip(read, PROMPT[1:], strict=False))
    np.testing.assert_allclose(ours[1:], eagle(drafter_weights(name), CONFIGS[name].drafter, pairs)[1], atol=1e-3)


def test_the_target_computes_what_it_does_without_a_drafter():
    model = model_of("plain")
    tokens = np.array([PROMPT])
    values = {path: leaf[...] for path, leaf in parameters(model).items() if not path.startswith("drafter.")}
    alone = HybridModel.from_parameters(STEP, values)
    np.testing.assert_array_equal(model(tokens), alone(tokens))


@pytest.mark.parametrize("name", ["plain", pytest.param("normed", marks=pytest.mark.full)])
def test_drafts_and_what_they_leave_behind(name):
    """Prompts in chunks, alone and packed; drafts right and wrong; a prompt's end found in the cache."""
    model_of(name)
    host = Host(CONFIGS[name], source=MTPDrafts())
    other = PROMPT[4:9]
    for seat in (1, 2, 3):
        host.seat(seat)
    host.prefill({"row_id": 1, "tokens": PROMPT[:5], "write": 1, "sample": False})
    assert (np.asarray(host.rows.drafts) == -1).all()
    out = host.prefill(
        {"row_id": 1, "tokens": PROMPT[5:], "c": 5, "read": 1, "write": 2}, {"row_id": 2, "tokens": other, "write": 8}
    )
    rows = {1: [*PROMPT, int(out.tokens[0, 0])], 2: [*other, int(out.tokens[1, 0])]}
    for seat in rows:
        assert_drafts(host, name, seat, rows[seat], host.table(seat - 1))
    # Row 3 samples from the cached end of the first prompt; its pages are copies.
    copies = host.table(2).copy()
    copies[:3] = host.table(0)[:3]
    out = host.decode(
        {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
        {"row_id": 2, "continues": True, "drafts": 2, "writes": [8, 9, 10]},
        {"row_id": 3, "c": 13, "read": 2, "tokens": [], "writes": [], "table": copies}
        | {"page_copy": (host.table(0)[3], copies[3])},
    )
    for seat in (1, 2):
        rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
    rows[3] = [*PROMPT, int(out.tokens[2, 0])]
    assert rows[3] == rows[1][:14]
    for seat, table in ((1, host.table(0)), (2, host.table(1)), (3, copies)):
        assert_drafts(host, name, seat, rows[seat], table)
    out = host.decode(
        {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
        {"row_id": 2, "continues": True, "drafts": 3, "writes": [8, 9, 10, 11]},
    )
    for seat in (1, 2):
        rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
        assert_drafts(host, name, seat, rows[seat], host.table(seat - 1))


def _without_features(store, table):
    return dataclasses.replace(store, hidden=store.hidden.at[1, STEP.hidden_size :].set(0))


def _without_a_key(store, table):
    kv = store.kv[-1].at[table[0], 2].set(0)
    return dataclasses.replace(store, kv=(*store.kv[:-1], kv))


@pytest.mark.parametrize("spoil", [None, _without_features, _without_a_key])
def test_what_is_kept_between_steps_matters(spoil):
    """A slot without what the drafter reads, and a page without one of its keys, show in the next step."""
    model_of("plain")
    host = Host(CONFIGS["plain"], source=MTPDrafts())
    host.seat(1)
    host.prefill({"row_id": 1, "tokens": PROMPT[:5], "write": 1, "sample": False})
    if spoil is not None:
        host.store = spoil(host.store, host.table(0))
    out = host.prefill({"row_id": 1, "tokens": PROMPT[5:], "c": 5, "read": 1, "write": 2})
    with nullcontext() if spoil is None else pytest.raises(AssertionError):
        assert_drafts(host, "plain", 1, [*PROMPT, int(out.tokens[0, 0])], host.table(0))


@pytest.mark.full
def test_the_drafter_updates_the_store_in_place():
    model_of("plain")
    host = Host(CONFIGS["plain"], source=MTPDrafts())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves((host.store, host.rows)))
    batch = DecodeBatch.empty(rows=DECODE_ROWS, num_speculative_tokens=3, pages_per_row=PAGES_PER_ROW)
    memory = host.programs.program(host.store, host.rows, batch).memory_analysis()
    assert memory.alias_size_in_bytes >= size
    assert memory.temp_size_in_bytes < size / 10
