"""Outputs of a given form from a model that is divided over devices, drafts included."""

import json
import re
from functools import partial

import pytest

from mamba_jax.programs import StepPrograms
from serving import LLM, SamplingParams
from serving.engine.structured.grammar_state import StructuredOutputs
from tests.support.engines import QUICK_COMPILE

FLAGS = {
    "tile_size": 16, "state_block_size": 32, "page_size": 16, "max_model_len": 128, "max_num_seqs": 2,
    "max_num_batched_tokens": 32, "num_slots": 20, "num_pages": 30, "enable_structured_outputs": True,
    "num_speculative_tokens": 2, "warmup": False,
}  # fmt: skip
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer", "maximum": 9, "minimum": 0}},
          "required": ["count"], "additionalProperties": False}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_two_devices(monkeypatch, method):
    quick = partial(StepPrograms, compiler_options=QUICK_COMPILE)
    monkeypatch.setattr("serving.engine.assembly.build.StepPrograms", quick)
    llm = LLM("demo", tensor_parallel_size=2, speculative_method=method, **FLAGS)
    for temperature in (0.0, 1.0):
        params = [
            SamplingParams(max_tokens=40, temperature=temperature, seed=3, structured_outputs=form)
            for form in (StructuredOutputs(regex="[0-9]{3}-[a-f]{2}"), StructuredOutputs(json=SCHEMA), None)
        ]
        number, thing, free = llm.generate(["A number:", "A thing:", "A neighbour"], params, use_tqdm=False)
        assert re.fullmatch("[0-9]{3}-[a-f]{2}", number.outputs[0].text)
        assert 0 <= json.loads(thing.outputs[0].text)["count"] <= 9
        assert free.outputs[0].token_ids
    llm.engine.loop.scheduler.check(idle=True)
