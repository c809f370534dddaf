"""The Ray Serve application: its arguments and numbers of replicas, and, with Ray, a fleet on this machine."""

import re
import time
from types import SimpleNamespace

import httpx
import pytest

from serving.api.http.settings import resolve_settings
from serving.config import ConfigError
from serving.split.ray.app import Arguments, replicas, wanted
from serving.split.settings import RouterSettings, SplitSettings

KEY = "of the clients"


@pytest.mark.slow
def test_an_application_answers():
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from serving.split.ray.app import application
    from tests.support.fleets.processes import ENGINE, free_port

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        own = {"prefill": 1, "decode": 2, "warmup": False, "api_key": KEY, "lease": 20.0}
        serve.run(application(ENGINE | own), route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 240
        while time.monotonic() < end:
            found = httpx.get(f"{url}/status", timeout=30).json()
            if (len(found["prefill"]), len(found["decode"])) == (1, 2):
                break
            time.sleep(1)
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        known = {"Authorization": f"Bearer {KEY}"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=known, timeout=300).json()
        assert answer["usage"]["completion_tokens"] >= 1, answer
        assert httpx.get(f"{url}/status", timeout=30).json()["relay"]["split"] == 1
        form = {"structured_outputs": {"regex": "[0-9]{3}"}}
        answer = httpx.post(f"{url}/v1/completions", json=body | form, headers=known, timeout=300).json()
        assert re.fullmatch("[0-9]{3}", answer["choices"][0]["text"])
        # Routers and workers require the key, and workers also require the fleet's secret.
        assert httpx.post(f"{url}/v1/completions", json=body, timeout=30).status_code == 401
        for worker in (*found["prefill"], *found["decode"]):
            assert httpx.get(f"{worker['url']}/split/manifest", timeout=30).status_code == 401
            answer = httpx.get(f"{worker['url']}/split/manifest", headers=known, timeout=30)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "not_sealed")
    finally:
        serve.shutdown()
        ray.shutdown()


def test_settings_go_to_all_who_have_them():
    found = Arguments.of({
        "model": "demo", "prefill": "1-4", "decode": 2, "resources": {"TPU": 4}, "lease": 7.0, "on_failure": "fail",
        "handoff": "recompute-last", "api_key": "for-clients", "max_body_bytes": 2048, "max_num_seqs": 3,
        "drain_timeout": 4.0,
    })  # fmt: skip
    both = {"api_key": "for-clients", "max_body_bytes": 2048, "drain_timeout": 4.0}
    secret = found.split["split_secret"]
    assert len(secret) >= 32
    assert found.split == {"lease": 7.0, "on_failure": "fail", "split_secret": secret}
    assert found.server == both
    assert found.routing == both | {"handoff": "recompute-last", "on_failure": "fail", "split_secret": secret}
    assert found.engine == {"model": "demo", "max_num_seqs": 3}
    assert RouterSettings.create(**found.routing).api_key == ("for-clients",)
    assert SplitSettings.create(role="prefill", **found.split).lease == 7.0
    assert Arguments.of({}).split["split_secret"] != secret, "another application is another fleet"


def test_workers_are_set_up_as_servers_are():
    found = Arguments.of({"model": "demo", "api_key": "k", "transport": "tcp"})
    role = SplitSettings.create(role="prefill", **found.split)
    settings, config = resolve_settings(role.engine_flags | found.server | found.engine, {"host": "127.0.0.1"})
    served, usual = resolve_settings({"model": "demo"}, {})
    assert settings.api_key == ("k",)
    assert settings.default_sampling == served.default_sampling
    assert settings.served_model_name == served.served_model_name
    assert config == usual.model_copy(update={"keep_draft_kv": True, "reserved_bytes": role.max_transfer_bytes})
    assert (config.enable_structured_outputs, config.max_num_waiting) == (True, 4096)
    assert role.transport == ("tcp",)


@pytest.mark.parametrize("wrong", [{"leese": 3}, {"lease": -1}, {"max_body_bytes": 1}, {"handoff": "half"}])
def test_mistakes_show_before_anything_starts(wrong):
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        Arguments.of(wrong)


@pytest.mark.parametrize(
    ("reported", "count"),
    [
        *(({"requests": sums}, count) for sums, count in (
            ({"a": 4.0, "b": 4.0}, 2), ({"a": 9.0, "b": 0.0}, 3), ({"a": 0.0, "b": 0.0}, 1), ({"a": 0.5}, 1),
        )),
        *((none, 5) for none in (None, {}, {"requests": {}})),  # nothing is known before the first report
    ],
)  # fmt: skip
def test_as_many_as_the_requests_take(reported, count):
    config = SimpleNamespace(target_ongoing_requests=4.0)
    assert wanted(SimpleNamespace(aggregated_metrics=reported, target_num_replicas=5, config=config)) == (count, {})


def test_numbers_of_replicas():
    assert replicas("decode", "2", {}) == replicas("prefill", 2, {}) == {"num_replicas": 2}
    found = replicas("decode", "1-4", {"max_num_seqs": "16"})["autoscaling_config"]
    assert (found["min_replicas"], found["max_replicas"], found["target_ongoing_requests"]) == (1, 4, 12.0)
    assert replicas("prefill", "1-4", {})["autoscaling_config"]["target_ongoing_requests"] == 2.0
    assert replicas("decode", "1-2", {})["autoscaling_config"]["policy"] == {
        "policy_function": "serving.split.ray.app:wanted"
    }


@pytest.mark.parametrize("asked", ["0", "4-1", "some", "-1", "1-", ""])
def test_other_numbers_are_one_line(asked):
    with pytest.raises(ConfigError, match="such as 1-4"):
        replicas("prefill", asked, {})
