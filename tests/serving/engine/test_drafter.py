"""Where drafts come from, and what is counted of them. A drafter from a directory of its own changes no token."""

import dataclasses
import json
import re
from functools import partial

import numpy as np
import pytest

from checkpoints.errors import CheckpointError
from checkpoints.load import load_config
from mamba_jax.drafts import MTPDrafts, NGramDrafts
from serving import LLM, SamplingParams
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.config import ConfigError, EngineConfig
from serving.core.errors import RequestError
from serving.engine.assembly.drafting import draft_source
from serving.engine.stats import DraftStats, merged_stats
from tests.support.engines.engine_harness import FLAGS, GOLDEN
from tests.support.models.divisible_checkpoints import EIGHT, write_checkpoint
from tests.support.models.drafters import write_block, write_eagle
from tests.support.selection import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
SIZES = {name: value for name, value in FLAGS.items() if name not in ("num_slots", "num_pages", "replay_interval")}
PARAMS = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True, detokenize=False, logprobs=0)


def prompts():
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 90, 37).tolist()
    return [{"prompt_token_ids": shared[:length]} for length in (37, 5, 33, 37)]


@pytest.fixture(scope="module")
def drafters(tmp_path_factory):
    folder, target = tmp_path_factory.mktemp("drafters"), load_config(GOLDEN)
    blocks = {method: write_block(folder / method, target, method=method) for method in ("dflash", "dflash2", "dspark")}
    return {"eagle3": write_eagle(folder / "eagle3", target), **blocks}


def llm(drafter=None, method="eagle3", **flags):
    if drafter is not None:
        config = {"method": method.rstrip("2"), "model": str(drafter), "num_speculative_tokens": 3}
        flags = {"speculative_config": config, "adaptive_drafts": False} | flags
    return LLM(str(GOLDEN), **(SIZES | flags))


@pytest.fixture(scope="module")
def plain():
    return [each.outputs[0].token_ids for each in llm(enable_prefix_caching=False).generate(prompts(), PARAMS)]


@pytest.mark.parametrize(
    "flags",
    [
        {"mamba_cache_mode": "all"},
        slow({"mamba_cache_mode": "all", "replay_interval": 8}),
        slow({"mamba_cache_mode": "none", "adaptive_drafts": True}),
        slow({"mamba_cache_mode": "align", "method": "dflash"}),
        pytest.param({"mamba_cache_mode": "all", "method": "dflash2"}, marks=pytest.mark.full),
        pytest.param({"mamba_cache_mode": "all", "method": "dspark"}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_tokens_are_those_without_drafts(drafters, plain, flags):
    engine = llm(drafters[flags.get("method", "eagle3")], **flags)
    for _ in range(2):  # the second time from the cache
        outputs = engine.generate(prompts(), PARAMS)
        assert [each.outputs[0].token_ids for each in outputs] == plain
    cached = sum(each.num_cached_tokens for each in outputs)
    assert (cached > 0) == (flags.get("mamba_cache_mode") != "none")
    drafted = sum(each.metrics.drafts.drafted for each in outputs)
    assert drafted > (0 if flags.get("adaptive_drafts") else 20)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"speculative_method": "eagle3"}, "'eagle3' needs speculative_model"),
        ({"speculative_method": "ngram", "speculative_model": "x"}, "speculative_model has no effect with"),
        ({"speculative_model": "DRAFTER", "speculative_method": "dflash"}, "kind eagle3, not dflash"),
    ],
)
def test_flags_that_do_not_fit(drafters, flags, message):
    flags = {name: str(drafters["eagle3"]) if value == "DRAFTER" else value for name, value in flags.items()}
    with pytest.raises((ConfigError, CheckpointError), match=re.escape(message)) as error:
        LLM(str(GOLDEN), **(SIZES | flags))
    assert "\n" not in str(error.value)


@pytest.mark.full
def test_weights_cannot_be_replaced(drafters):
    with pytest.raises(RequestError, match="the engine has a drafter"):
        llm(drafters["eagle3"]).update_weights(str(GOLDEN))


def test_a_plan_counts_the_drafter(tmp_path):
    """Of a drafter of which only config.json is there."""
    size, inner, vocab = 4096, 14_336, 32_000
    fields = {"architectures": ["LlamaForCausalLMEagle3"], "hidden_size": size, "intermediate_size": inner}
    fields |= {"num_attention_heads": 32, "num_key_value_heads": 8, "draft_vocab_size": vocab, "vocab_size": 131_072}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    machine = target("h200-1")
    without, with_drafter = (
        make_plan(EngineConfig.create(model="nemotron-h-8b", **flags), machine, compile=False)
        for flags in ({"speculative_method": "ngram"}, {"speculative_model": str(tmp_path)})
    )
    products = (3 + 2 + 1) * size * size + 2 * 2 * size * 1024 + 3 * size * inner + vocab * size
    norms, tokens = 4 * size, 4 * vocab
    assert with_drafter.weights - without.weights == 2 * (products + norms) + tokens
    # A token's keys and values: 8 heads of 128 in the drafter, in 2 bytes each.
    each = [made.size.bytes_per_page // made.size.page_size for made in (without, with_drafter)]
    assert each[1] - each[0] == 2 * 8 * 128 * 2


@pytest.mark.full
def test_a_model_without_attention_has_pages_for_its_drafter(tmp_path):
    model = GOLDEN.parent / "mamba2"
    folder = write_eagle(tmp_path / "eagle3", load_config(model))
    plain, drafting = LLM(str(model), **SIZES), LLM(str(model), speculative_model=str(folder), **SIZES)
    expected = [each.outputs[0].token_ids for each in plain.generate(prompts(), PARAMS)]
    for _ in range(2):
        outputs = drafting.generate(prompts(), PARAMS)
        assert [each.outputs[0].token_ids for each in outputs] == expected
    assert sum(each.num_cached_tokens for each in outputs) > 0


def first_page(engine):
    """The drafter's keys and values of the first 8 tokens of the first prompt."""
    return np.asarray(engine.engine.loop.store.kv[-1])[1][1:]


@pytest.mark.full
@pytest.mark.parametrize(
    "write",
    [write_eagle, *(slow(partial(write_block, method=method)) for method in ("dflash2", "dspark"))],
    ids=["eagle3", "dflash2", "dspark"],
)
def test_two_devices(write, tmp_path, monkeypatch):
    """Each has its own heads of the drafter, or its own pages."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)  # members divide prefill
    model = write_checkpoint(tmp_path / "model", EIGHT)
    flags = SIZES | {"speculative_model": str(write(tmp_path / "drafter", load_config(model)))}
    expected = None
    for devices in ({}, {"tensor_parallel_size": 2}, {"context_parallel_size": 2}):
        engine = LLM(str(model), adaptive_drafts=False, **flags, **devices)
        found = [each.outputs[0].token_ids for each in engine.generate(prompts(), PARAMS)]
        found.append(engine.engine.loop.stats.drafts.accepted_at)  # the same drafts: as many are right
        expected = expected or (found, first_page(engine))
        assert found == expected[0]
        np.testing.assert_allclose(first_page(engine), expected[1], atol=1e-4)


def test_where_drafts_come_from(harness):
    config = harness.model.config
    with_layer = dataclasses.replace(config, mtp_pattern="*-")
    make = EngineConfig.create
    assert draft_source(make(), with_layer) is None
    assert draft_source(make(num_speculative_tokens=2), config) == NGramDrafts(2, 4)
    assert draft_source(make(num_speculative_tokens=2), with_layer) == MTPDrafts()
    assert draft_source(make(speculative_method="ngram", prompt_lookup_max=3), with_layer) == NGramDrafts(2, 3)
    with pytest.raises(ConfigError, match="has no multi-token-prediction layer; try 'ngram'"):
        draft_source(make(speculative_method="mtp"), config)
    several = dataclasses.replace(config, unused_mtp_layers=2)
    assert draft_source(make(), several) is None
    with pytest.raises(ConfigError, match="has 2 multi-token-prediction layers, of which only a single"):
        draft_source(make(speculative_method="mtp"), several)


def test_counters_of_drafts():
    stats = DraftStats()
    assert stats.mean_acceptance_length == 1
    stats.add([3, 0, 2, 1], np.array([[5, 6, -1, -1], [5, -1, -1, -1], [5, 6, 7, -1], [4, -1, -1, -1]]))
    assert (stats.drafted_at, stats.accepted_at) == ([3, 2, 1], [2, 1, 0])
    assert (stats.drafted, stats.accepted, stats.wasted, stats.steps) == (6, 3, 3, 3)
    assert stats.mean_acceptance_length == 2
    assert stats.acceptance_at == [2 / 3, 1 / 2, 0]
    assert stats.summary() == {
        "steps": 3, "drafted": 6, "accepted": 3, "wasted": 3, "acceptance_at": [2 / 3, 1 / 2, 0],
        "mean_acceptance_length": 2,
    }  # fmt: skip


def test_statistics_of_replicas_are_added():
    def stats(drafts, version):
        loop = {"steps": 5, "drafts": dataclasses.asdict(drafts)}
        weights = {"version": version, "updates": int(version)}
        return {"requests": 3, "loop": loop, "weights": weights, "slots": {"total": 9}, "held": None}

    found = merged_stats([stats(DraftStats(2, [2, 1], [1, 0]), "0"), stats(DraftStats(2, [2], [2]), "1")])
    assert (found["requests"], found["loop"]["steps"], found["slots"]) == (6, 10, {"total": 18})
    assert found["weights"] == {"version": "0, 1", "updates": 1}
    assert found["drafts"] == DraftStats(4, [4, 1], [3, 0]).summary()
    assert len(found["engines"]) == 2
