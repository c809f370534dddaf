"""Structured outputs through a router: the decode worker applies the mask, on all paths of the prompt."""

import re

import httpx
import pytest

from tests.support.processes import router, worker


@pytest.mark.slow
def test_a_form_behind_the_split(tmp_path):
    sides = [worker(role, tmp_path) for role in ("prefill", "decode")]
    front = router(sides[:1], sides[1:], tmp_path)
    try:
        for each in (*sides, front):
            each.wait_until_ready()
        for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 4}):
            form = {"structured_outputs": {"regex": "[0-9]{3}-[a-f]{2}"}, "max_tokens": 20}
            body = {"model": "demo", "prompt": "word " * 60} | form | fields
            answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=240)
            assert answer.status_code == 200, answer.text
            assert re.fullmatch("[0-9]{3}-[a-f]{2}", answer.json()["choices"][0]["text"])
        wrong = httpx.post(
            f"{front.url}/v1/completions", json=body | {"structured_outputs": {"regex": "("}}, timeout=60
        )
        assert wrong.status_code == 400
        assert all(each.idle() for each in sides)
    finally:
        for each in (front, *sides):
            each.close()
