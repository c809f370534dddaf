"""The experts in outputs are those of a forward pass over the whole sequence, however the tokens were computed."""

import base64
import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load_model
from mamba_jax.modules.feed_forward import Router
from serving import LLM, SamplingParams
from tests.support.engines.engines import leave_pages
from tests.support.models import golden_case
from tests.support.models.divisible_checkpoints import FAMILIES, write_checkpoint
from tests.support.models.golden_case import FIXTURES
from tests.support.selection import slow
from tests.support.servers.live_server import LiveServer

pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = golden_case.FLAGS | {"enable_return_routed_experts": True}
MODEL = FIXTURES / "nemotronh-moe"
LONGEST = 160


def experts_by(model):
    """Returns a function that gives the experts of tokens [tokens, layers, chosen], by a pass without a store."""

    @jax.jit
    def all_experts(tokens, length):
        found, sound = [], Router.__call__

        def recorded(self, *args, **kwargs):
            choice = sound(self, *args, **kwargs)
            found.append(choice.chosen)
            return choice

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Router, "__call__", recorded)
            model(tokens[None], length[None])
        return jnp.stack(found, axis=1)

    def of(tokens):
        padded = np.array([*tokens, *[0] * (LONGEST - len(tokens))], np.int32)
        return np.asarray(all_experts(padded, np.array(len(tokens))))[: len(tokens)]

    return of


@pytest.fixture(scope="module")
def experts_of():
    return experts_by(load_model(MODEL, dtype="float32", progress=False))


def prompts(seed=4, count=4):
    rng = np.random.default_rng(seed)
    shared = rng.integers(0, 250, 70).tolist()
    return [{"prompt_token_ids": shared + rng.integers(0, 250, 3 + 17 * i).tolist()} for i in range(count)]


def check(llm, experts_of, max_tokens=12):
    """Generates twice. Returns the number of prompt tokens that were found in the cache."""
    cached, different = 0, set()
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for _ in range(2):
        for output in llm.generate(prompts(), params):
            (choice,) = output.outputs
            expected = experts_of([*output.prompt_token_ids, *choice.token_ids[:-1]])
            assert choice.routed_experts.shape == expected.shape
            # Their order is that of their scores, in which equal ones may change places.
            np.testing.assert_array_equal(np.sort(choice.routed_experts), np.sort(expected))
            cached += output.num_cached_tokens
            different |= set(expected.flat)
    assert len(different) > 4
    return cached


@pytest.mark.smoke
@pytest.mark.parametrize(
    "flags",
    [
        {"mamba_cache_mode": "all"},
        slow({"mamba_cache_mode": "align", "num_speculative_tokens": 3, "speculative_method": "ngram"}),
        {"mamba_cache_mode": "none", "num_speculative_tokens": 2, "speculative_method": "mtp"},
        {"mamba_cache_mode": "all", "replay_interval": 8, "mixed_steps": True},
    ],
    ids=["all", "ngram", "mtp", "replay"],
)
def test_experts_are_those_of_a_whole_pass(experts_of, flags):
    assert (check(LLM(str(MODEL), **FLAGS, **flags), experts_of) > 0) == (flags["mamba_cache_mode"] != "none")


@pytest.mark.full
def test_preempted_requests_have_their_experts(experts_of):
    llm = LLM(str(MODEL), **FLAGS, mamba_cache_mode="all")
    leave_pages(llm, 13)
    check(llm, experts_of, max_tokens=30)
    assert llm.engine.stats()["preemptions"] > 0


@pytest.mark.full
@pytest.mark.parametrize("devices", [{"tensor_parallel_size": 2}, {"context_parallel_size": 2}])
def test_several_devices_record_the_same(devices, tmp_path, monkeypatch):
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)  # members divide prefill
    model = write_checkpoint(tmp_path, FAMILIES["nemotronh-moe"])
    experts_of = experts_by(load_model(model, dtype="float32", progress=False))
    llm = LLM(str(model), **FLAGS, mamba_cache_mode="all", **devices)
    experts = llm.engine.loop.store.experts
    pages = experts.shape[0] // devices.get("context_parallel_size", 1)
    assert {shard.data.shape for shard in experts.addressable_shards} == {(pages, *experts.shape[1:])}
    check(llm, experts_of)


@pytest.mark.full
def test_the_server_returns_them_with_token_ids(experts_of):
    engine = LLM(str(MODEL), **FLAGS, mamba_cache_mode="all").engine
    with contextlib.closing(LiveServer(engine, prepare=False)) as server:
        server.wait_until_ready()
        body = {"max_tokens": 4, "ignore_eos": True}
        answer = server.complete([5, 6, 7], **body, return_token_ids=True)
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        found = choice["routed_experts"]
        experts = np.frombuffer(base64.b64decode(found["data"]), found["dtype"]).reshape(found["shape"])
        np.testing.assert_array_equal(np.sort(experts), np.sort(experts_of([5, 6, 7, *choice["token_ids"][:-1]])))
        (choice,) = server.complete([5, 6, 7], **body).json()["choices"]
        assert choice.get("routed_experts") is None
