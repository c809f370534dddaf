"""Drafts of EAGLE-3, DFlash, DFlash 2 and DSpark against their formulas in numpy, through prefill and decode steps.
The multi-token-prediction layer within steps, and n-grams against their definition in plain Python.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from mamba_jax.batch import DecodeBatch
from mamba_jax.config.drafter import BlockConfig
from mamba_jax.drafts import BlockDrafts, MTPDrafts, NGramDrafts
from mamba_jax.drafts.ngram import look_up
from mamba_jax.layout import SequenceLayout
from mamba_jax.model import HybridModel, parameters
from mamba_jax.step import step as run_step
from tests.support.fleets.step_host import DECODE_ROWS, PAGE, PAGES_PER_ROW, Host, greedy
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


# By default, one of each kind.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("eagle3", "dflash") else pytest.mark.full) for name in CONFIGS]
)
def test_drafts_and_what_they_leave_behind(name):
    """Prompts of 13 tokens in chunks, alone and packed; drafts right and wrong; a prompt's end found in the cache."""
    ENDED.clear()
    host = host_of(name)
    check = functools.partial(assert_eagle_drafts if name in EAGLES else assert_block_drafts, name, host)
    other = list(PROMPT[4:9])
    for seat in (1, 2, 3, 4):
        host.seat(seat)
    host.prefill({"row_id": 1, "tokens": PROMPT[:5], "write": 1, "sample": False})
    assert (np.asarray(host.rows.drafts) == -1).all()
    out = host.prefill(
        {"row_id": 1, "tokens": PROMPT[5:], "c": 5, "read": 1, "write": 2}, {"row_id": 2, "tokens": other, "write": 8}
    )
    rows = {1: [*PROMPT, int(out.tokens[0, 0])], 2: [*other, int(out.tokens[1, 0])]}
    for seat in rows:
        check(seat, rows[seat], host.table(seat - 1))
    # Row 3 samples from the cached end of the first prompt; its pages are copies.
    copies = host.sharing(2, 3)
    out = host.decode(
        {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
        {"row_id": 2, "continues": True, "drafts": 2, "writes": [8, 9, 10]},
        {"row_id": 3, "c": 13, "read": 2, "tokens": [], "writes": []} | copies,
        # Row 4 goes on from the middle of it and does not sample.
        {"row_id": 4, "c": 5, "read": 1, "tokens": PROMPT[5:7], "writes": [0, 7], "sample": False} | host.sharing(3, 1),
    )
    for seat in (1, 2):
        rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
    rows[3] = [*PROMPT, int(out.tokens[2, 0])]
    assert rows[3] == rows[1][:14]
    for seat, table in ((1, host.table(0)), (2, host.table(1)), (3, copies["table"])):
        check(seat, rows[seat], table)
    assert (np.asarray(host.rows.drafts[4]) == -1).all()
    out = host.decode(
        {"row_id": 1, "continues": True, "drafts": 3, "writes": [3, 4, 5, 6]},
        {"row_id": 2, "continues": True, "drafts": 3, "writes": [8, 9, 10, 11]},
    )
    for seat in (1, 2):
        rows[seat] += [t for t in out.tokens[seat - 1].tolist() if t >= 0]
        check(seat, rows[seat], host.table(seat - 1))
    assert bool(ENDED) == (name == "dspark")


def test_the_target_computes_what_it_does_without_a_drafter():
    model = model_of("eagle3")
    tokens = np.array([PROMPT])
    values = {path: leaf[...] for path, leaf in parameters(model).items() if not path.startswith("drafter.")}
    alone = HybridModel.from_parameters(STEP, values)
    run = jax.jit(lambda model: model(tokens))
    np.testing.assert_array_equal(run(model), run(alone))


def decode_batch(drafts, rows=DECODE_ROWS):
    return DecodeBatch.empty(rows=rows, num_speculative_tokens=drafts, pages_per_row=PAGES_PER_ROW)


WITH_MTP = dataclasses.replace(STEP, mtp_pattern="*-")
WITH_TABLES = dataclasses.replace(WITH_MTP, own_mtp_embedding=True, own_mtp_head=True)


def test_the_layer_may_have_tables_of_its_own():
    """With the model's values, they change nothing; with others, the logits. Parity tests cover the layer itself."""
    values = {path: leaf[...] for path, leaf in parameters(long_memory_model(WITH_MTP)).items()}
    tables = {"mtp.embed.weight": values["embed.weight"], "mtp.lm_head.weight": values["lm_head.weight"]}
    hidden = np.random.default_rng(3).normal(size=(13, STEP.hidden_size)).astype(np.float32)

    @jax.jit
    def run(model):
        return model.draft_logits(model.draft(np.array(PROMPT), hidden, SequenceLayout.of(1, 13), None)[0])

    expected = run(long_memory_model(WITH_MTP))
    np.testing.assert_array_equal(run(HybridModel.from_parameters(WITH_TABLES, values | tables)), expected)
    for path, table in tables.items():
        other = HybridModel.from_parameters(WITH_TABLES, values | tables | {path: table[::-1]})
        assert np.abs(run(other) - expected)[1:].max() > 0.1


@pytest.mark.smoke
@pytest.mark.parametrize(("source", "drafts"), [("mtp", 3), ("mtp", 0), ("eagle3", 3)])
def test_drafting_updates_the_store_in_place(source, drafts):
    host = Host(WITH_MTP, source=MTPDrafts()) if source == "mtp" else host_of(source)
    host.assert_updated_in_place(decode_batch(drafts))


def test_without_drafts_a_step_is_what_it_would_be_without_a_draft_layer():
    """K = 0: the same program, whether or not a model has the layer."""
    short = dataclasses.replace(STEP, pattern="M*")
    texts, host = [], Host(short, num_drafts=0)
    for config in (short, dataclasses.replace(short, mtp_pattern="*-")):
        model = long_memory_model(config)
        step = jax.jit(lambda store, rows, batch, model=model: run_step(model, store, rows, batch, greedy=True))
        texts.append(step.lower(host.store, host.rows, decode_batch(0, rows=1)).as_text())
    assert texts[0] == texts[1]


WIDTH = 24


def by_definition(tokens, count, min_n, max_n):
    """The longest n first, then the latest occurrence; what follows it, going on with the same period."""
    for n in range(min(max_n, len(tokens)), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                extended = list(tokens)
                for i in range(count):
                    extended.append(extended[end + i])
                return extended[len(tokens) :]
    return [-1] * count


@pytest.mark.parametrize("bounds", [(1, 1), (1, 3), (2, 4), (3, 3)], ids=str)
def test_look_up_equals_the_definition(bounds):
    rng = np.random.default_rng(1)
    rows, lengths = [], []
    for _ in range(300):
        length = int(rng.integers(0, WIDTH + 1))
        row = rng.integers(0, rng.integers(1, 6), WIDTH)
        row[length:] = rng.choice([-1, 0])  # what lies past the end must not matter
        rows.append(row)
        lengths.append(length)
    run = jax.jit(look_up, static_argnames=("count", "min_n", "max_n"))
    ours = run(np.array(rows, np.int32), np.array(lengths), count=4, min_n=bounds[0], max_n=bounds[1])
    for row, length, drafts in zip(rows, lengths, np.asarray(ours).tolist(), strict=True):
        assert drafts == by_definition(row[:length].tolist(), 4, *bounds), (row, length)


def test_bounds_that_cross_are_refused():
    with pytest.raises(ValueError, match="n-grams of 3 to 2 tokens"):
        NGramDrafts(3, 2)


@pytest.mark.full
def test_a_seat_knows_its_tokens_and_steps_add_to_them():
    host = Host(source=NGramDrafts(1, 3))
    want = greedy(PROMPT, 8)
    # What follows is in the prompt's beginning, which is never fed by these steps: it was found in the cache.
    known = [*want[:3], *want[:2], *PROMPT[5:]]
    host.seat(2, tokens=known)
    host.prefill({"row_id": 1, "tokens": PROMPT, "write": 1, "sample": False})
    host.decode({"row_id": 2, "c": 13, "read": 1, "tokens": [], "writes": [], "table": host.table(0)})
    history = np.asarray(host.rows.source[2])
    assert history[:14].tolist() == [*known, want[0]]
    assert (history[14:] == -1).all()
    assert (np.asarray(host.rows.source[1]) == -1).all()
    assert np.asarray(host.rows.drafts[2]).tolist() == by_definition([*known, want[0]], 3, 1, 3)
    made = 0
    emitted = [want[0]]
    for _ in range(3):
        out = host.decode({"row_id": 2, "continues": True, "drafts": 3, "writes": [2, 3, 4, 5], "table": host.table(0)})
        made += int(out.num_drafts[0])
        emitted += [t for t in out.tokens[0].tolist() if t >= 0]
        assert np.asarray(host.rows.source[2])[: 13 + len(emitted)].tolist() == known + emitted
        assert np.asarray(host.rows.drafts[2]).tolist() == by_definition(known + emitted, 3, 1, 3)
    assert emitted == greedy(PROMPT, len(emitted))
    assert made > 0
    # The next tenant starts from nothing.
    host.seat(2, tokens=[4])
    assert (np.asarray(host.rows.source[2])[1:] == -1).all()
