"""Drafts of the multi-token-prediction layer against an independent one in numpy, through prefill and decode steps."""

import dataclasses

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.config import need
from mamba_jax.drafts import MTPDrafts
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import parameters
from mamba_jax.step import step as run_step
from tests.support.engines.draft_traces import assert_updated_in_place, check_draft_traces
from tests.support.fleets.step_host import PAGE, PAGES_PER_ROW, Host
from tests.support.models.random_models import decisive_model
from tests.support.models.tiny_configs import STEP

WITH_MTP = dataclasses.replace(STEP, mtp_pattern="*-")
WITH_TABLES = dataclasses.replace(WITH_MTP, own_mtp_embedding=True, own_mtp_head=True)
PROMPT = [int(t) for t in np.random.default_rng(2).integers(0, STEP.vocab_size, 13)]
MAIN = WITH_MTP.num_attention_uses
LONGEST = 32


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + WITH_MTP.norm_eps) * weight


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def layer(pairs, config=WITH_MTP):
    """The draft layer over pairs (hidden state, next token), all at once: outputs, keys, values and the head."""
    w = {name: np.asarray(value[...], np.float64) for name, value in parameters(decisive_model(config)).items()}
    attention = need(WITH_MTP.attention)
    heads, groups, size = attention.num_heads, attention.num_kv_heads, attention.head_dim
    hidden = np.array([h for h, _ in pairs], np.float64)
    embedded = w["mtp.embed.weight" if config.own_mtp_embedding else "embed.weight"][[t for _, t in pairs]]
    both = np.concatenate([norm(embedded, w["mtp.enorm.weight"]), norm(hidden, w["mtp.hnorm.weight"])], axis=1)
    x = both @ w["mtp.eh_proj.weight"].T
    at = "mtp.blocks.0.mixer."
    y = norm(x, w["mtp.blocks.0.norm.weight"])
    q, k, v = (
        (y @ w[f"{at}{name}_proj.weight"].T).reshape(len(pairs), count, size)
        for name, count in (("q", heads), ("k", groups), ("v", groups))
    )
    mixed = np.zeros((len(pairs), heads, size))
    for head in range(heads):
        scores = attention.scale * q[:, head] @ k[:, head * groups // heads].T
        scores[np.triu_indices(len(pairs), 1)] = -np.inf
        mixed[:, head] = softmax(scores) @ v[:, head * groups // heads]
    x = x + mixed.reshape(len(pairs), -1) @ w[f"{at}o_proj.weight"].T
    up = norm(x, w["mtp.blocks.1.norm.weight"]) @ w["mtp.blocks.1.mixer.up_proj.weight"].T
    x = x + up / (1 + np.exp(-up)) @ w["mtp.blocks.1.mixer.down_proj.weight"].T
    head = w["mtp.lm_head.weight" if config.own_mtp_head else "lm_head.weight"]
    return norm(x, w["mtp.final_norm.weight"]), k, v, head


def hidden_of(tokens, config=WITH_MTP):
    """The model's final hidden states, by the whole-sequence form."""
    padded = np.zeros(LONGEST, np.int64)  # one length for all: each would be compiled anew
    padded[: len(tokens)] = tokens
    return np.asarray(decisive_model(config).run(padded, SequenceLayout.of(1, LONGEST), None)[0])[: len(tokens)]


def assert_drafts(host, seat, tokens, table, config=WITH_MTP):
    """The drafts for what follows `tokens` (whose last one has not been fed), and the keys and values before them."""
    hidden = hidden_of(tokens[:-1], config)
    pairs = list(zip(hidden, tokens[1:], strict=True))
    out, keys, values, head = layer(pairs, config)
    kv = np.asarray(host.store.kv[MAIN])
    for index in range(1, len(tokens)):
        page = kv[table[index // PAGE], index % PAGE]
        np.testing.assert_allclose(page[0::2], keys[index - 1], atol=1e-4)
        np.testing.assert_allclose(page[1::2], values[index - 1], atol=1e-4)
    for draft in np.asarray(host.rows.drafts[seat]).tolist():
        logits = head @ out[-1]
        assert draft >= 0
        assert logits.max() - logits[draft] < 1e-4
        pairs.append((out[-1], draft))
        out, *_ = layer(pairs, config)


@pytest.mark.parametrize("config", [WITH_MTP, WITH_TABLES], ids=["the model's tables", "its own tables"])
def test_logits_equal_those_of_the_definition(config):
    model, tokens = decisive_model(config), np.array(PROMPT)
    hidden = np.asarray(model.run(tokens, SequenceLayout.of(1, 13), None)[0])
    previous = np.concatenate([np.full((1, hidden.shape[1]), 1e3, np.float32), hidden[:-1]])
    ours = model.draft_logits(model.draft(tokens, previous, SequenceLayout.of(1, 13), None)[0])
    out, _, _, head = layer(list(zip(hidden, PROMPT[1:], strict=False)), config)
    np.testing.assert_allclose(ours[1:], out @ head.T, atol=1e-4)


@pytest.mark.full
def test_drafts_and_what_they_leave_behind():
    check_draft_traces(Host(WITH_MTP, source=MTPDrafts()), PROMPT, assert_drafts, steps=2)


@pytest.mark.full
def test_drafts_of_a_layer_with_tables_of_its_own():
    host = Host(WITH_TABLES, source=MTPDrafts())
    host.seat(1)
    out = host.prefill({"row_id": 1, "tokens": PROMPT, "write": 1})
    tokens = [*PROMPT, int(out.tokens[0, 0])]
    assert_drafts(host, 1, tokens, host.table(0), WITH_TABLES)


@pytest.mark.parametrize("drafts", [3, 0], ids=["wide", "narrow"])
def test_the_draft_layer_updates_the_store_in_place(drafts):
    assert_updated_in_place(Host(WITH_MTP, source=MTPDrafts()), drafts)


def test_without_drafts_a_step_is_what_it_would_be_without_a_draft_layer():
    """K = 0: the same program, whether or not a model has the layer."""
    texts = []
    for config in (STEP, WITH_MTP):
        host = Host(STEP, num_drafts=0)
        model = decisive_model(config)
        step = jax.jit(lambda store, rows, batch, model=model: run_step(model, store, rows, batch))
        batch = DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=PAGES_PER_ROW)
        texts.append(step.lower(host.store, host.rows, batch).as_text())
    assert texts[0] == texts[1]
