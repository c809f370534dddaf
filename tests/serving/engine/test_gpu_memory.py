"""How much of a GPU's memory JAX gives to programs, and how much of that the engine uses."""

import os
from types import SimpleNamespace

import pytest

from serving.cli import main
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly import sizing
from serving.engine.assembly.gpu_memory import reserve_gpu_memory, share_notices, usable_share
from serving.engine.assembly.sizing import store_memory

WHOLE = 100 << 30


def gpu(share, in_use=0):
    """A GPU of which JAX has this share."""
    stats = {"bytes_limit": int(share * WHOLE), "bytes_in_use": in_use}
    return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)


NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("given", "reserved", "share"),
    [({}, {NEW: "0.93"}, 0.9 / 0.93), ({NEW: "0.5"}, {NEW: "0.5"}, 1), ({OLD: "0.5"}, {OLD: "0.5"}, 1)],
)
def test_the_command_line_reserves_what_the_engine_uses_unless_the_user_has_set_a_share(given, reserved, share):
    environment = dict(given)
    reserve_gpu_memory(0.9, environment)
    assert environment == reserved
    assert usable_share("gpu", 0.9, environment) == pytest.approx(share)
    assert share_notices("gpu", environment) == ()


@pytest.mark.parametrize(
    ("platform", "used", "environment", "share"),
    [
        ("gpu", 0.4, {NEW: "0.5"}, 0.8),
        ("gpu", 0.9, {}, 0.9),  # of what JAX takes
        ("cpu", 0.9, {NEW: "0.5"}, 0.9),
        ("tpu", 0.9, {NEW: "0.5"}, 0.9),
    ],
)
def test_the_fraction_is_of_what_jax_takes(platform, used, environment, share):
    assert usable_share(platform, used, environment) == pytest.approx(share)
    notices = " ".join(share_notices(platform, environment))
    assert ("75%" in notices and "XLA_CLIENT_MEM_FRACTION=0.9" in notices) == (platform == "gpu" and not environment)


@pytest.mark.parametrize("text", ["0", "1.5", "most"])
def test_refuses_a_share_that_is_not_a_fraction(text):
    with pytest.raises(
        ConfigError, match=f"XLA_CLIENT_MEM_FRACTION is '{text}'; expected a number above 0 and up to 1"
    ):
        usable_share("gpu", 0.9, {"XLA_CLIENT_MEM_FRACTION": text})


@pytest.mark.parametrize(
    ("environment", "share", "expected"),
    [
        ({}, 0.75, 0.75 * 0.9),
        ({"XLA_CLIENT_MEM_FRACTION": "0.93"}, 0.93, 0.9),
        ({"XLA_CLIENT_MEM_FRACTION": "1"}, 1, 0.9),
    ],
    ids=["application", "command line", "user"],
)
def test_the_store_fills_its_part_of_the_device(environment, share, expected, monkeypatch):
    monkeypatch.setattr(sizing, "usable_share", lambda platform, used: usable_share(platform, used, environment))
    weights, workspace = 30 << 30, 2 << 30
    free = store_memory(EngineConfig(model="m"), workspace=workspace, devices=[gpu(share, in_use=weights)])
    assert free == pytest.approx(expected * WHOLE - weights - workspace, abs=2)


def test_a_gpu_without_memory_statistics_is_not_sized_by_the_hosts_memory():
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory"):
        store_memory(EngineConfig(model="m"), workspace=0, devices=[silent])


@pytest.mark.parametrize(
    ("options", "share"), [({"memory_utilization": 0.6}, "0.63"), ({}, "0.93"), ({"memory_utilization": 0.99}, "1")]
)
def test_a_command_reserves_gpu_memory_before_it_starts(options, share, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    seen = []
    main._after_jax(lambda **_: seen.append(os.environ["XLA_CLIENT_MEM_FRACTION"]))(**options)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    assert seen == [share]
