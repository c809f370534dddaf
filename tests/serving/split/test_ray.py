"""The fleet on a local Ray."""

import time

import httpx
import pytest

pytestmark = pytest.mark.slow


def test_an_application_answers():
    ray = pytest.importorskip("ray")
    serve = pytest.importorskip("ray.serve")
    from serving.split.ray.app import application
    from tests.support.processes import ENGINE, free_port

    port = free_port()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(ENGINE | {"prefill": 1, "decode": 2, "warmup": False}), route_prefix="/")
        url = f"http://127.0.0.1:{port}"
        end = time.monotonic() + 240
        while time.monotonic() < end:
            found = httpx.get(f"{url}/status", timeout=30).json()
            if (len(found["prefill"]), len(found["decode"])) == (1, 2):
                break
            time.sleep(1)
        body = {"model": "demo", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=300).json()
        assert answer["usage"]["completion_tokens"] >= 1, answer
        assert httpx.get(f"{url}/status", timeout=30).json()["relay"]["split"] == 1
    finally:
        serve.shutdown()
        ray.shutdown()
