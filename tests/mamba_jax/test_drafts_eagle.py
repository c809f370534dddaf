"""Drafts of EAGLE-3 against its formulas in numpy, through prefill and decode steps."""

import dataclasses
import functools
from contextlib import nullcontext

import numpy as np
import pytest

from mamba_jax.drafts import MTPDrafts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from tests.support.engines.draft_traces import assert_updated_in_place, check_draft_traces
from tests.support.fleets.step_host import PAGE, Host
from tests.support.models.drafters import EAGLE, EAGLE_NORMED, eagle, features, states_of, weights, with_tokens
from tests.support.models.random_models import decisive_model
from tests.support.models.tiny_configs import STEP

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


def assert_drafts(name, host, seat, tokens, table):
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


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_those_of_the_definition(name):
    model, tokens = model_of(name), np.array(PROMPT)
    layout = SequenceLayout.of(1, len(PROMPT))
    hidden, _ = model.run(tokens, layout, None)
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
    model_of(name)
    check_draft_traces(Host(CONFIGS[name], source=MTPDrafts()), PROMPT, functools.partial(assert_drafts, name))


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
        assert_drafts("plain", host, 1, [*PROMPT, int(out.tokens[0, 0])], host.table(0))


@pytest.mark.full
def test_the_drafter_updates_the_store_in_place():
    model_of("plain")
    host = Host(CONFIGS["plain"], source=MTPDrafts())
    assert_updated_in_place(host, 3)
