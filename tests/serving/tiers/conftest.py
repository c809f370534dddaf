"""Engines with tiers whose programs emit one token for ever and leave the store as it is."""

import threading
from unittest import mock

import pytest


@pytest.fixture
def start(tmp_path):
    """Makes an engine, or several replicas, and closes all of them."""
    from serving.config import EngineConfig
    from serving.engine.assembly import build
    from tests.support.engines.small_tiers import SMALL, Free
    from tests.support.engines.step_programs import NoPrograms
    from tests.support.fleets.split_pair import model

    made = []

    def make(weights=None, *, replicas=1, **flags):
        folder = {"disk_cache": str(tmp_path / "disk")} if "disk_cache_gib" in flags else {}
        flags = SMALL | {"mamba_cache_mode": "all", "data_parallel_size": replicas} | folder | flags
        with mock.patch.object(build, "StepPrograms", return_value=NoPrograms()):
            engines = build.assemble(EngineConfig.create(**flags), weights or model()).engines
        for engine in engines:
            engine.loop.scheduler.tiers.fetch_costs = Free()
            made.append(engine)
        return engines if replicas > 1 else engines[0]

    yield make
    for engine in made:
        engine.close()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tier-")]
