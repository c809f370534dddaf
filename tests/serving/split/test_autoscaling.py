"""How many replicas are asked for; Ray is not needed."""

from types import SimpleNamespace

import pytest

from serving.config import ConfigError
from serving.split.ray.autoscaling import replicas, wanted


def context(reported, target=4.0, now=2):
    return SimpleNamespace(
        aggregated_metrics=reported, target_num_replicas=now, config=SimpleNamespace(target_ongoing_requests=target)
    )


@pytest.mark.parametrize(
    ("reported", "count"),
    [({"a": 4.0, "b": 4.0}, 2), ({"a": 9.0, "b": 0.0}, 3), ({"a": 0.0, "b": 0.0}, 1), ({"a": 0.5}, 1)],
)
def test_as_many_as_the_requests_take(reported, count):
    assert wanted(context({"requests": reported})) == (count, {})


@pytest.mark.parametrize("reported", [None, {}, {"requests": {}}])
def test_nothing_is_known_before_the_first_report(reported):
    assert wanted(context(reported, now=3)) == (3, {})


def test_numbers_of_replicas():
    assert replicas("decode", "2", {}) == replicas("prefill", 2, {}) == {"num_replicas": 2}
    found = replicas("decode", "1-4", {"max_num_seqs": "16"})["autoscaling_config"]
    assert (found["min_replicas"], found["max_replicas"], found["target_ongoing_requests"]) == (1, 4, 12.0)
    assert replicas("prefill", "1-4", {})["autoscaling_config"]["target_ongoing_requests"] == 2.0
    assert replicas("decode", "1-2", {})["autoscaling_config"]["policy"] == {
        "policy_function": "serving.split.ray.autoscaling:wanted"
    }


@pytest.mark.parametrize("asked", ["0", "4-1", "some", "-1", "1-", ""])
def test_other_numbers_are_one_line(asked):
    with pytest.raises(ConfigError, match="such as 1-4"):
        replicas("prefill", asked, {})
