"""Drafts of DFlash and DSpark against their formulas in numpy, through prefill and decode steps."""

import functools

import numpy as np
import pytest

from mamba_jax.drafts import BlockDrafts
from mamba_jax.model import HybridModel, parameters
from tests.support.drafters import FLASH, SPARK, block, context, features, states_of, weights, with_tokens
from tests.support.random_models import decisive_model
from tests.support.step_host import PAGE, Host
from tests.support.tiny_configs import STEP

PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
CONFIGS = {"dflash": STEP.with_drafter(FLASH), "dspark": STEP.with_drafter(SPARK)}


@functools.cache
def model_of(name: str) -> HybridModel:
    """The cached model of `decisive_model`, from which `Host` makes its programs: with a draft vocabulary."""
    model = decisive_model(CONFIGS[name])
    return with_tokens(CONFIGS[name], model) if CONFIGS[name].drafter.maps_vocabulary else model


def host_of(name: str) -> Host:
    model_of(name)
    drafter = CONFIGS[name].drafter
    return Host(CONFIGS[name], source=BlockDrafts(drafter.mask_token, drafter.from_newest))


def assert_drafts(host, name, seat, tokens, table, count=3):
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
    logits = block(w, config, read, tokens[-1], count, embed, head)
    drafts, before = np.asarray(host.rows.drafts[seat]).tolist(), tokens[-1]
    assert drafts[count:] == [-1] * (len(drafts) - count)
    for at, draft in zip(logits, drafts[:count], strict=True):
        if config.markov_rank:
            at = at + w["markov_after.weight"] @ w["markov_before.weight"][before]
        places = np.flatnonzero(w["tokens"] == draft) if config.maps_vocabulary else [draft]
        assert len(places) == 1, "a draft that is not in the draft vocabulary"
        assert at.max() - at[places[0]] < 1e-3
        before = draft


@pytest.mark.parametrize("name", CONFIGS)
def test_drafts_and_what_they_leave_behind(name):
    """Prompts in chunks, alone and packed; drafts right and wrong; a prompt's end found in the cache."""
    host = host_of(name)
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
