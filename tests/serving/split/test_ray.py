"""The fleet on a local Ray."""

import re
import time

import httpx
import pytest

pytestmark = pytest.mark.slow
KEY = "of the clients"


def test_an_application_answers():
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from serving.split.ray.app import application
    from tests.support.processes import ENGINE, free_port

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
