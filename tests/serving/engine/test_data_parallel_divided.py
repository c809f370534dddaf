"""Replicas that each take several devices: each engine has its own mesh."""

import itertools
import threading

import pytest

from serving import LLM, RequestError, SamplingParams
from serving.core.tiers.tiers import FetchCosts
from tests.serving.engine.test_tensor_parallel import FLAGS, assert_greedy
from tests.support.engines.engines import finish
from tests.support.engines.replicas import admitted, check_idle
from tests.support.engines.small_tiers import tier_mover
from tests.support.models.divisible_checkpoints import FAMILIES, write_checkpoint

pytestmark = pytest.mark.full


def test_two_replicas_of_two_devices(tmp_path, monkeypatch, quick_compilation):
    monkeypatch.setattr(FetchCosts, "worth_fetching", lambda *_: True)  # computing a few tokens takes less time
    case = FAMILIES["nemotronh-moe"]
    directory = write_checkpoint(tmp_path, case)
    flags = FLAGS | {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    flags |= {"host_cache_gib": 0.05, "disk_cache": str(tmp_path / "disk"), "disk_cache_gib": 0.05}
    llm = LLM(directory, data_parallel_size=2, tensor_parallel_size=2, speculative_method=case.drafts, **flags)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=2)
    prompts = [{"prompt_token_ids": [7 + i, 8, 9] * 14} for i in range(4)]
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert_greedy(outputs, directory)
    assert all(output.num_cached_tokens > 0 for output in outputs)
    devices = [[device.id for device in engine.loop.programs.devices] for engine in llm.engines]
    assert devices == [[0, 1], [2, 3]]
    assert admitted(llm.engines) == [4, 4]
    # The rest of what an `LLM` can do.
    streamed = list(llm.stream(prompts[0], params))
    assert streamed[-1].finished
    assert streamed[-1].outputs[0].token_ids == outputs[0].outputs[0].token_ids
    side_by_side = list(itertools.zip_longest(*(llm.stream(prompt, params) for prompt in prompts[:2])))
    assert [output.outputs[0].token_ids for output in side_by_side[0]] == [o.outputs[0].token_ids for o in outputs[:2]]
    for hold, release in ((llm.sleep, llm.wake_up), (llm.pause, llm.resume)):
        hold()
        with pytest.raises(RequestError, match="the engine"):
            llm.generate(prompts, params, use_tqdm=False)
        release()
    assert_greedy(llm.generate(prompts, params, use_tqdm=False), directory)
    check_idle(llm.engines)
    # What one mesh held comes back to the other one.
    one, other = llm.engines
    while one.loop.scheduler.index.evict_state():
        pass
    tier_mover(one).copy_out(one.loop.store)
    while other.loop.scheduler.index.evict_state():  # what it has of its own
        pass
    tier_mover(other).copy_out(other.loop.store)
    again = [other.add_request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts)]
    finish(other)
    assert_greedy(again, directory)
    tiers = other.stats()["tiers"]
    assert sum(tier["arrived"] for tier in tiers.values()) >= 2, tiers
    assert all(output.num_cached_tokens > 0 for output in again)
    check_idle(llm.engines)
    llm.close()
    assert list((tmp_path / "disk").rglob("*.safetensors"))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("tier-")]
