"""The benchmark of attacks on a bystander: what it sends and how it reports."""

import json

import pytest

from benchmarks.bystander import ATTACKS, Measured, raw, row
from serving import SamplingParams
from serving.engine.request_error import RequestError


@pytest.mark.parametrize("name", ATTACKS)
def test_requests_are_complete_and_differ(name):
    sent = [raw("http://127.0.0.1:1", ATTACKS[name](i)) for i in range(4)]
    assert len(set(sent)) > 1
    for each in sent:
        head, _, body = each.partition(b"\r\n\r\n")
        assert f"content-length: {len(body)}".encode() in head
        assert isinstance(json.loads(body), dict)


def test_stop_texts_are_sent_within_and_above_the_limit():
    SamplingParams(stop=ATTACKS["stop texts"](0)[1]["stop"])
    with pytest.raises(RequestError, match="characters in total"):
        SamplingParams(stop=ATTACKS["stop texts"](1)[1]["stop"])


def test_a_row_compares_with_the_control():
    control = Measured([0.010] * 1000, 100, seconds=10.0)
    during = Measured([0.010] * 900 + [0.025] * 100, 85, seconds=10.0)
    assert row("x", control, during) == "| x | 10.0 | 25.0 | 2.50 | 10.0 | 8.5 | 0.85 | 0 | yes |"
    during.add(Measured([0.040] * 1000, 40, refused=3, seconds=10.0))
    assert row("x", control, during).endswith("| 4.00 | 10.0 | 6.2 | 0.62 | 3 | no |")
