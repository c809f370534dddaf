"""Bounds that need no server: values of a body, log lines, headers of the page."""

import json
import logging
import re

import pytest

from serving.api.http.app import page_headers
from serving.api.http.json_values import weight
from serving.api.http.text import characters
from serving.api.logs import JsonFormatter, TextFormatter


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"prompt": "a, [b], {c} \" \\"}, 10 * 3),
        ([1, 2, 3], 10 + 2),
        ([[], {}, "x"], 10 * 4 + 2),
        ({"a": {"b": ["\\\\\"", "c"]}}, 10 * 7 + 1),
    ],
)  # fmt: skip
def test_the_weight_of_values(value, expected):
    assert weight(json.dumps(value).encode(), 10_000) == expected


def test_a_weight_beyond_what_is_allowed():
    assert weight(b'["",' * 10_000, 1000) > 1000
    assert weight(b"[" * 10_000, 1000) > 1000


def test_characters_are_counted_until_there_are_enough():
    assert characters([{"role": "user", "content": "four"}], 1000) == 1 + 2 + len("roleusercontentfour")
    assert characters([["x"] * 1000] * 1000, 50) >= 50


@pytest.mark.parametrize("form", [TextFormatter(), JsonFormatter()])
def test_a_log_line_is_one_line(form):
    record = logging.makeLogRecord({"levelname": "INFO", "msg": "path %s", "args": ("/a\r\n12:00:00 INFO done",)})
    record.fields = {"path": "/b\n\x1b[31m\u2028é\ud800", "status": 200}
    line = form.format(record)
    assert len(line.splitlines()) == 1
    assert "\x1b" not in line
    assert "\\r\\n12:00:00" in line
    assert "é" in line or isinstance(form, JsonFormatter)
    assert isinstance(form, TextFormatter) or json.loads(line)["status"] == 200


def test_the_page_runs_only_its_own_script():
    headers = page_headers("<script>run()</script>")
    assert headers["X-Frame-Options"] == "DENY"
    policy = headers["Content-Security-Policy"]
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", policy)
    assert "frame-ancestors 'none'" in policy
    assert "default-src 'none'" in policy
