"""Odd messages to a worker's endpoints for other workers get an answer below 500, or that a worker is unreachable."""

import json

import httpx
import pytest

from serving.split.http import routes
from serving.split.settings import SplitSettings
from tests.serving.split.test_routing_events import demo, start  # noqa: F401

pytestmark = pytest.mark.full

NUMBERS = (-1, 0, 1 << 31, 1 << 63, 1 << 70, 1.5, float("inf"), float("nan"), "1", None, True, [], {})
TEXTS = ("", "x" * 100_000, "\ud800", 5, None)
LISTS = ([], [-1], [1 << 31], [1 << 70], [1.5], [[1]], "123", None)
URLS = (
    "http://", "http://[", "http://a:99999", "http://\ud800", "http://" + "a" * 2000, "http://" + "a" * 70_000,
    "ftp://a", "file:///etc/passwd", "http://127.0.0.1:9/../x?y#z", "http://a b",
)  # fmt: skip
BODIES = (
    [], {}, 5, {"prompt": []}, {"prompt": ["a", "b"]}, {"prompt": [1 << 70]}, {"prompt": [999_999_999]},
    {"prompt": "x", "model": "no"}, {"prompt": "x", "priority": 1 << 70}, {"prompt": "\ud800"}, {"prompt": "x " * 5000},
)  # fmt: skip
TICKET = {"id": "t", "worker": "http://127.0.0.1:9", "handoff": "full", "prompt_token_ids": [1, 2, 3], "position": 3}
OFFER = {"id": "x", "start": 0, "unit": 32, "layers": 1, "transport": "tcp", "manifest": "m"}
PREFILL = {"kind": "completions", "body": {"prompt": [1, 2, 3]}, "handoff": "full", "seconds": 5.0}


def changed(message, **fields):
    """The message, each time with another value of one of its fields."""
    return [message | {name: value} for name, values in fields.items() for value in values]


MESSAGES = {
    "/split/expect": changed(
        TICKET, position=NUMBERS, lease=NUMBERS, patience=NUMBERS, cached_tokens=NUMBERS, shared=NUMBERS,
        prompt_token_ids=LISTS, worker=(*TEXTS, *URLS), id=TEXTS, salt=TEXTS, adapter=TEXTS, adapter_name=TEXTS,
        manifest=TEXTS, handoff=TEXTS,
    ),
    "/split/offer": changed(
        OFFER, start=NUMBERS, unit=NUMBERS, layers=NUMBERS, checksum=NUMBERS, id=TEXTS, transport=TEXTS, manifest=TEXTS,
    ),
    "/split/share": changed({"tokens": [1, 2]}, tokens=LISTS, beyond=NUMBERS, salt=TEXTS, adapter=TEXTS),
    "/split/prefill": changed(PREFILL, seconds=NUMBERS, kind=TEXTS, handoff=TEXTS, body=BODIES),
    "/split/renew": changed({}, ids=(*LISTS, ["x"] * 9000, ["\ud800"])),
    "/split/release": changed({"id": "x", "wanted": True}, id=TEXTS, wanted=NUMBERS),
    "/split/hello": changed({}, manifest=(*NUMBERS, {"protocol": 1})),
    "/internal/tokens": changed({"kind": "completions", "body": {"prompt": "x"}}, kind=TEXTS, body=BODIES),
}  # fmt: skip


@pytest.mark.parametrize(("role", "share"), [("prefill", False), ("decode", True)])
def test_odd_messages(start, role, share, monkeypatch):  # noqa: F811
    monkeypatch.setattr(routes, "_MAX_PEERS", 4)
    worker = start(SplitSettings.create(role=role, share=share, transport="tcp", fetch_timeout=1.0, lease=1.0))
    with httpx.Client(base_url=worker.url, headers={"content-type": "application/json"}, timeout=60) as client:
        for path, message in ((path, message) for path, messages in MESSAGES.items() for message in messages):
            answer = client.post(path, content=json.dumps(message))
            assert answer.status_code < 500 or answer.status_code == 503, (path, str(message)[:300], answer.text)
    worker.assert_idle()
