"""Names of machines."""

import pytest

from serving.capacity.targets import known, larger, target
from serving.config import ConfigError


@pytest.mark.parametrize(
    ("name", "count", "topology"),
    [
        ("v6e-8", 8, "v6e:2x4"),
        ("v5e-1", 1, "v5e:2x2"),  # the compiler knows no smaller slice; one of its devices is used
        ("v5litepod-16", 16, "v5e:4x4"),
        ("V6E:2x4", 8, "v6e:2x4"),
        ("v5p-8", 4, "v5p:2x2x1"),
        ("tpu7x-8", 8, "tpu7x:2x2x1"),
        ("tpu7x:2x2x1", 8, "tpu7x:2x2x1"),
        ("h100", 1, "h100:1x1x1"),
        ("a100-40gb-4", 4, None),
        ("h200-8", 8, "h200:1x1x8"),
        ("4xH100", 4, "h100:1x1x4"),
        ("2xH100", 2, "h100:1x1x2"),
        ("8 x NVIDIA H200", 8, "h200:1x1x8"),
        ("H100-80GB x2", 2, "h100:1x1x2"),
        ("a100-80gb-4", 4, None),
        ("8xv6e", 8, "v6e:2x4"),
    ],
)
def test_names(name, count, topology):
    found = target(name)
    assert (found.count, found.topology) == (count, topology)


def test_every_listed_name_is_one():
    assert all(target(name).count >= 1 for name in known())


@pytest.mark.parametrize("name", ["v6e-7", "h100-3", "v9", "", "tpu"])
def test_unknown_names_list_the_known(name):
    with pytest.raises(ConfigError, match=r"known are v5e-\{1,4,8.*h100-\{1,2,4,8\}"):
        target(name)


@pytest.mark.parametrize(
    ("name", "near"), [("v6-8", "v6e-8"), ("v6e-7", "v6e-8"), ("3xH100", "h100-4"), ("h100-16", "h100-8")]
)
def test_a_near_miss_is_named(name, near):
    with pytest.raises(ConfigError, match=f"did you mean '{near}'"):
        target(name)


def test_larger_ones_of_the_same_kind():
    assert [each.name for each in larger(target("h100-2"))] == ["h100-4", "h100-8"]
    assert larger(target("v5e-1"))[0].name == "v5e-4"
