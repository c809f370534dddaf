"""What of a GPU's memory JAX gives out."""

from types import SimpleNamespace

import pytest

from serving.config import ConfigError, EngineConfig
from serving.engine.gpu_memory import jax_share, share_notices
from serving.engine.sizing import store_memory


def test_three_quarters_unless_told_otherwise():
    assert jax_share("gpu", {}) == 0.75
    assert jax_share("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}) == 0.95
    assert jax_share("gpu", {"XLA_CLIENT_MEM_FRACTION": "0.5", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".95"}) == 0.5
    assert jax_share("tpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.5"}) == 1


@pytest.mark.parametrize("text", ["0", "1.5", "most"])
def test_refuses_what_is_no_part(text):
    with pytest.raises(ConfigError, match="a number above 0 and up to 1"):
        jax_share("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": text})


def test_says_so_to_those_who_have_not_chosen():
    (notice,) = share_notices("gpu", {})
    assert "75%" in notice
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" in notice
    assert share_notices("gpu", {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.9"}) == ()
    assert share_notices("cpu", {}) == ()


def test_a_gpu_that_tells_nothing_is_not_sized_by_the_hosts_memory():
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory"):
        store_memory(EngineConfig(model="m"), workspace=0, devices=[silent])
