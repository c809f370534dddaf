"""Decode of an 8B hybrid held by replay, compiled by the TPU's own compiler: in place, and close to the least."""

import dataclasses

import pytest

from serving.capacity import plan as planning
from serving.capacity.plan import make_plan
from serving.capacity.targets import target
from serving.config import EngineConfig


@pytest.fixture
def decode_only(monkeypatch):
    monkeypatch.setattr(planning, "prefill_shapes", lambda batches, full: [])


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e-8", "v6e-8"])
@pytest.mark.parametrize("rows", [64, 128])
@pytest.mark.parametrize("drafts", [0, 3])
def test_whole_programs(topology, rows, drafts, decode_only):
    pytest.importorskip("libtpu")
    flags = {"num_speculative_tokens": drafts, "speculative_method": "ngram"} if drafts else {}
    config = EngineConfig.create(model="nemotron-h-8b", max_num_seqs=rows, replay_interval=16, **flags)
    plan = make_plan(config, target(topology))
    (program,), (step,) = plan.programs, plan.steps
    print(topology, rows, drafts, dataclasses.replace(program), step.without_keys, plan.size)
    print(
        "ratio",
        program.moved / step.without_keys,
        "temps",
        program.temporaries / 2**20,
        "aliased",
        program.aliased,
        plan.store,
        "missing",
        plan.store - program.aliased,
    )
