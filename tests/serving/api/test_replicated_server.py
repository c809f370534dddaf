"""One server over two replicas: requests, metrics by engine, the status page's numbers, and pauses."""

import re

import pytest

from tests.support.engines.engine_harness import EngineHarness
from tests.support.engines.replicas import ReplicaMaker, admitted, check_idle
from tests.support.engines.small_tiers import tier_mover
from tests.support.models.letter_tokens import letters
from tests.support.servers.live_server import completed, in_process, warmed_up

pytestmark = pytest.mark.full

ADMIN = {"authorization": "Bearer trainer"}


@pytest.fixture(scope="module")
def engines():
    harness = EngineHarness()
    harness.tokenizer = letters()
    return ReplicaMaker(harness).make(fresh=True, enable_structured_outputs=True, host_cache_gib=0.01)


@pytest.fixture(scope="module")
def client(engines):
    with in_process(engines, warmed_up, admin_key="trainer") as client:
        yield client
    check_idle(engines)


def metrics(client) -> dict[str, float]:
    lines = [line for line in client.get("/metrics").text.splitlines() if line.startswith("mamba_jax_")]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_prompts_of_one_request_are_shared_out(engines, client):
    compiled = [engine.loop.programs.compilations for engine in engines]
    assert min(compiled) > 0
    before = [engine.loop.scheduler.stats()["requests"] for engine in engines]
    prompts = [[i + 3, 9, 8] * 10 for i in range(6)]
    first = completed(client, prompts)
    assert first["usage"]["completion_tokens"] == 24
    again = completed(client, prompts)
    assert [c["token_ids"] for c in again["choices"]] == [c["token_ids"] for c in first["choices"]]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * 30
    after = [engine.loop.scheduler.stats()["requests"] for engine in engines]
    assert [b - a for a, b in zip(before, after, strict=True)] == [6, 6]
    assert [engine.loop.programs.compilations for engine in engines] == compiled


def test_metrics_say_which_engine(client):
    completed(client, [5] * 20)
    found = metrics(client)
    for name in ("prompt_tokens_total", "steps_total", "requests_waiting", "compilations_total"):
        assert {f'mamba_jax_{name}{{engine="{i}"}}' for i in range(2)} <= found.keys()
        assert f"mamba_jax_{name}" not in found
    assert 'mamba_jax_slots{engine="1",state="free"}' in found
    assert any(re.match(r'mamba_jax_requests_finished_total\{engine="\d",reason="length"\}', name) for name in found)
    assert found['mamba_jax_model_info{model="tiny"}'] == 1


def test_what_tiers_hold_is_of_all_and_what_is_fetched_of_each(engines, client):
    found = metrics(client)
    tier = tier_mover(engines[0]).memory.tier
    assert found['mamba_jax_tier_capacity_bytes{tier="host"}'] == tier.capacity
    assert found['mamba_jax_tier_checkpoints{tier="host"}'] == len(tier)
    for i in range(2):
        assert f'mamba_jax_tier_fetches_total{{engine="{i}",tier="host"}}' in found


def test_outputs_have_their_form_on_every_replica(engines, client):
    before = admitted(engines)
    answer = completed(client, [[i + 3, 4, 5] for i in range(6)], structured_outputs={"regex": "[abc]{3}"})
    assert all(re.fullmatch("[abc]{3}", choice["text"]) for choice in answer["choices"])
    assert [b - a for a, b in zip(before, admitted(engines), strict=True)] == [3, 3]


def test_the_status_page_shows_all(engines, client):
    status = client.get("/status").json()
    stats = status["stats"]
    assert len(stats["engines"]) == 2
    assert stats["slots"]["total"] == sum(engine.loop.scheduler.cache.pools[0].size - 1 for engine in engines)
    assert len(status["maps"]["slots"]) == stats["slots"]["total"]
    assert client.get("/health").status_code == 200


def test_pause_and_sleep_hold_all(engines, client):
    assert client.post("/pause?mode=wait", headers=ADMIN).json()["paused"] is True
    assert all(engine.control.paused for engine in engines)
    assert client.post("/resume", headers=ADMIN).json()["held"] is None
    assert client.post("/sleep", headers=ADMIN).json()["sleep_level"] == 1
    assert "sleeps" in client.get("/rollout_state", headers=ADMIN).json()["held"]
    assert client.post("/wake_up", headers=ADMIN).json()["held"] is None
    assert completed(client, [5] * 20)["usage"]["completion_tokens"] == 4


def test_weights_that_only_one_has_taken_show(engines, client, monkeypatch):
    monkeypatch.setattr(engines[1].control.weights, "version", "1")
    state = client.get("/rollout_state", headers=ADMIN).json()
    assert (state["weights_version"], state["held"]) == ("0, 1", None)
