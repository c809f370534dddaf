"""Drafts of EAGLE-3, DFlash, DFlash 2 and DSpark against their formulas in numpy, through prefill and decode steps."""

import dataclasses
import functools
from contextlib import nullcontext

import jax
import numpy as np
import pytest

from mamba_jax.config.drafter import BlockConfig
from mamba_jax.drafts import BlockDrafts, MTPDrafts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from tests.support.engines.draft_traces import assert_updated_in_place, check_draft_traces
from tests.support.fleets.step_host import PAGE, Host
from tests.support.models import drafters
from tests.support.models.drafters import eagle, states_of, with_tokens
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import STEP

PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
EAGLES = {"eagle3": drafters.EAGLE, "eagle3 normed": drafters.EAGLE_NORMED}
BLOCKS = {"dflash": drafters.FLASH, "dflash2": drafters.FLASH2, "dspark": drafters.SPARK}
CONFIGS = {name: STEP.with_drafter(one) for name, one in (EAGLES | BLOCKS).items()}
LEAST_CHANCE = 0.2


@functools.cache
def model_of(name: str) -> HybridModel:
    """The cached model of `long_memory_model`, from which `Host` makes its programs: with a draft vocabulary."""
    model = long_memory_model(CONFIGS[name])
    return with_tokens(CONFIGS[name], model) if CONFIGS[name].drafter.maps_vocabulary else model


def host_of(name: str) -> Host:
    model_of(name)
    drafter = CONFIGS[name].drafter
    by_block = isinstance(drafter, BlockConfig)
    source = BlockDrafts(drafter.mask_token, drafter.from_newest, LEAST_CHANCE) if by_block else MTPDrafts()
    return Host(CONFIGS[name], source=source)


def values_of(name):
    return {path: np.asarray(leaf[...], np.float64) for path, leaf in parameters(model_of(name)).items()}


def read_by_drafter(name, tokens):
    """What the drafter reads of each token, by the whole-sequence form of the target."""
    config, states = CONFIGS[name].drafter, states_of(model_of(name), tokens)
    return drafters.features(drafters.weights(values_of(name)), config, [states[at] for at in config.places])


def assert_holds(host, table, cache, first):
    """Pages hold each layer's keys and values, of tokens from the first on."""
    for layer, kept in enumerate(cache):
        kv = np.asarray(host.store.kv[STEP.num_attention_uses + layer])
        for index, (key, value) in enumerate(zip(*kept, strict=True), start=first):
            page = kv[table[index // PAGE], index % PAGE]
            np.testing.assert_allclose(page[0::2], key, atol=2e-4)
            np.testing.assert_allclose(page[1::2], value, atol=2e-4)


def place_of(w, config, draft):
    """Of a draft in the draft vocabulary."""
    places = np.flatnonzero(w["tokens"] == draft) if config.maps_vocabulary else [draft]
    assert len(places) == 1, "a draft that is not in the draft vocabulary"
    return places[0]


def assert_eagle_drafts(name, host, seat, tokens, table):
    """The drafts after `tokens` (whose last one has not been fed), and the keys and values of the tokens before."""
    w, config = drafters.weights(values_of(name)), CONFIGS[name].drafter
    pairs = list(zip(read_by_drafter(name, tokens[:-1]), tokens[1:], strict=True))
    out, logits, cache = eagle(w, config, pairs)
    assert_holds(host, table, cache, first=1)
    for draft in np.asarray(host.rows.drafts[seat]).tolist():
        assert logits[-1].max() - logits[-1][place_of(w, config, draft)] < 1e-3
        pairs.append((out[-1], draft))
        out, logits, _ = eagle(w, config, pairs)


def assert_block_drafts(name, host, seat, tokens, table, count=3):
    """The same of a drafter of blocks."""
    values, config = values_of(name), CONFIGS[name].drafter
    w, read = drafters.weights(values), read_by_drafter(name, tokens[:-1])
    assert_holds(host, table, drafters.context(w, config, read), first=0)
    embed, head = (w.get(f"{part}.weight", values[f"{part}.weight"]) for part in ("embed", "lm_head"))
    drafts, before, chance = np.asarray(host.rows.drafts[seat]).tolist(), tokens[-1], 1.0
    assert drafts[count:] == [-1] * (len(drafts) - count)
    made = drafters.block(w, config, read, tokens[-1], count, embed, head)
    for hidden, logits, draft in zip(*made, drafts[:count], strict=True):
        logits, right = drafters.following(w, config, logits, hidden, before)
        chance *= right
        if draft < 0:
            ENDED.append(chance)
            assert chance < LEAST_CHANCE + 1e-4
            break
        assert chance > LEAST_CHANCE - 1e-4
        assert logits.max() - logits[place_of(w, config, draft)] < 1e-3
        before = draft


ENDED = []
"""Chances of drafts that were not made."""
DEFAULT = ("eagle3", "dflash")
"""One of each kind; the others run with `--full`."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DEFAULT else pytest.mark.full) for name in CONFIGS]
)
def test_drafts_and_what_they_leave_behind(name):
    ENDED.clear()
    check = assert_eagle_drafts if name in EAGLES else assert_block_drafts
    check_draft_traces(host_of(name), PROMPT, functools.partial(check, name))
    assert bool(ENDED) == (name == "dspark")


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("name", EAGLES)
def test_logits_equal_those_of_the_definition(name):
    model, tokens = model_of(name), np.array(PROMPT)
    layout = SequenceLayout.of(1, len(PROMPT))
    read = np.asarray(jax.jit(lambda model: model.draft_input(model.run(tokens, layout, None)[0]))(model))
    np.testing.assert_allclose(read, read_by_drafter(name, PROMPT), atol=1e-4)
    previous = np.concatenate([np.full((1, read.shape[1]), 1e3, np.float32), read[:-1]])
    ours = jax.jit(lambda model: model.draft_logits(model.draft(tokens, previous, layout, None)[0]))(model)
    pairs = list(zip(read, PROMPT[1:], strict=False))
    expected = eagle(drafters.weights(values_of(name)), CONFIGS[name].drafter, pairs)[1]
    np.testing.assert_allclose(ours[1:], expected, atol=1e-3)


def test_the_target_computes_what_it_does_without_a_drafter():
    model = model_of("eagle3")
    tokens = np.array([PROMPT])
    values = {path: leaf[...] for path, leaf in parameters(model).items() if not path.startswith("drafter.")}
    alone = HybridModel.from_parameters(STEP, values)
    np.testing.assert_array_equal(model(tokens), alone(tokens))


def _without_features(store, table):
    return dataclasses.replace(store, hidden=store.hidden.at[1, STEP.hidden_size :].set(0))


def _without_a_key(store, table):
    kv = store.kv[-1].at[table[0], 2].set(0)
    return dataclasses.replace(store, kv=(*store.kv[:-1], kv))


@pytest.mark.parametrize("spoil", [None, _without_features, _without_a_key])
def test_what_is_kept_between_steps_matters(spoil):
    """A slot without what the drafter reads, and a page without one of its keys, show in the next step."""
    host = host_of("eagle3")
    host.seat(1)
    host.prefill({"row_id": 1, "tokens": PROMPT[:5], "write": 1, "sample": False})
    if spoil is not None:
        host.store = spoil(host.store, host.table(0))
    out = host.prefill({"row_id": 1, "tokens": PROMPT[5:], "c": 5, "read": 1, "write": 2})
    with nullcontext() if spoil is None else pytest.raises(AssertionError):
        assert_eagle_drafts("eagle3", host, 1, [*PROMPT, int(out.tokens[0, 0])], host.table(0))


@pytest.mark.full
def test_the_drafter_updates_the_store_in_place():
    assert_updated_in_place(host_of("eagle3"), 3)
