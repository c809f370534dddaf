"""Drafts of DFlash, DFlash 2 and DSpark against their formulas in numpy, through prefill and decode steps."""

import functools

import numpy as np
import pytest

from mamba_jax.drafts import BlockDrafts
from mamba_jax.model import HybridModel, parameters
from tests.support.engines.draft_traces import check_draft_traces
from tests.support.fleets.step_host import PAGE, Host
from tests.support.models.drafters import (
    FLASH,
    FLASH2,
    SPARK,
    block,
    context,
    features,
    following,
    states_of,
    weights,
    with_tokens,
)
from tests.support.models.random_models import decisive_model
from tests.support.models.tiny_configs import STEP

PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
CONFIGS = {name: STEP.with_drafter(one) for name, one in (("dflash", FLASH), ("dflash2", FLASH2), ("dspark", SPARK))}
LEAST_CHANCE = 0.2


@functools.cache
def model_of(name: str) -> HybridModel:
    """The cached model of `decisive_model`, from which `Host` makes its programs: with a draft vocabulary."""
    model = decisive_model(CONFIGS[name])
    return with_tokens(CONFIGS[name], model) if CONFIGS[name].drafter.maps_vocabulary else model


def host_of(name: str) -> Host:
    model_of(name)
    drafter = CONFIGS[name].drafter
    return Host(CONFIGS[name], source=BlockDrafts(drafter.mask_token, drafter.from_newest, LEAST_CHANCE))


def assert_drafts(name, host, seat, tokens, table, count=3):
    """The drafts after `tokens` (whose last one has not been fed), and the keys and values of the tokens before."""
    config, model = CONFIGS[name].drafter, model_of(name)
    values = {path: np.asarray(leaf[...], np.float64) for path, leaf in parameters(model).items()}
    w = weights(values)
    read = features(w, config, [states_of(model, tokens[:-1])[place] for place in config.places])
    for layer, (keys, kept) in enumerate(context(w, config, read)):
        kv = np.asarray(host.store.kv[STEP.num_attention_uses + layer])
        for index in range(len(tokens) - 1):
            page = kv[table[index // PAGE], index % PAGE]
            np.testing.assert_allclose(page[0::2], keys[index], atol=2e-4)
            np.testing.assert_allclose(page[1::2], kept[index], atol=2e-4)
    embed = w.get("embed.weight", values["embed.weight"])
    head = w.get("lm_head.weight", values["lm_head.weight"])
    drafts, before, chance = np.asarray(host.rows.drafts[seat]).tolist(), tokens[-1], 1.0
    assert drafts[count:] == [-1] * (len(drafts) - count)
    for hidden, at, draft in zip(*block(w, config, read, tokens[-1], count, embed, head), drafts[:count], strict=True):
        at, right = following(w, config, at, hidden, before)
        chance *= right
        if draft < 0:
            ENDED.append(chance)
            assert chance < LEAST_CHANCE + 1e-4
            break
        assert chance > LEAST_CHANCE - 1e-4
        places = np.flatnonzero(w["tokens"] == draft) if config.maps_vocabulary else [draft]
        assert len(places) == 1, "a draft that is not in the draft vocabulary"
        assert at.max() - at[places[0]] < 1e-3
        before = draft


ENDED = []
"""Chances of drafts that were not made."""


@pytest.mark.full
@pytest.mark.smoke
@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_and_what_they_leave_behind(name):
    ENDED.clear()
    check_draft_traces(host_of(name), PROMPT, functools.partial(assert_drafts, name))
    assert bool(ENDED) == (name == "dspark")
