"""Long prompts on a CPU: computed, found again, and fetched from the disk, also by an engine that starts later."""

from dataclasses import replace

import numpy as np
import pytest

from serving.config import EngineConfig
from serving.engine.assembly.build import assemble
from serving.engine.requests.sampling_params import SamplingParams
from tests.support.engines.engines import Continuation, finish, use_widest_steps
from tests.support.models.random_models import long_memory_model
from tests.support.models.tiny_configs import ENGINE_VOCAB, FOR_ENGINES

PAGE = 128
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=2)


def start(model, tokens, folder):
    """An engine with room for one such prompt, and for few states."""
    flags = {"max_model_len": tokens + 64, "max_num_seqs": 2, "num_slots": 12, "num_pages": tokens // PAGE + 64}
    flags |= {"page_size": PAGE, "warmup": False, "mamba_cache_mode": "all", "disk_cache": str(folder)}
    engine = assemble(EngineConfig.create(**flags), model).engine
    use_widest_steps(engine)
    return engine


def ask(engine, name, prompt):
    """What follows a prompt, and how many of its tokens were found."""
    output = engine.add_request(name, {"prompt_token_ids": prompt}, PARAMS)
    finish(engine)
    said = Continuation.of(output.outputs[0])
    return (said.tokens, said.logprobs), output.num_cached_tokens


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "window"), [(1 << 20, 4096), (1 << 17, None)])
def test_a_long_prompt_is_computed_once(tokens, window, tmp_path):
    """Attention to everything before takes a CPU half an hour for a million tokens, hence the window."""
    config = FOR_ENGINES["smallest"]
    attention = replace(config.attention, num_heads=1, num_kv_heads=1, window=window)
    model = long_memory_model(replace(config, attention=attention, mtp_pattern=""))
    engine = start(model, tokens, tmp_path)
    prompt = np.random.default_rng(0).integers(0, ENGINE_VOCAB, tokens - 8).tolist()
    cold, found = ask(engine, "cold", prompt)
    assert found == 0
    assert ask(engine, "hit", prompt) == (cold, len(prompt))
    for length in range(1000, 1020):  # more prompts than there are states
        assert ask(engine, f"{length}", prompt[-length:])[0] != cold
    assert ask(engine, "fetched", prompt) == (cold, len(prompt))
    engine.loop.scheduler.check(idle=True)
    stats = [engine.stats()["tiers"]["disk"]]
    engine.close()
    engine = start(model, tokens, tmp_path)
    assert ask(engine, "fetched by another", prompt) == (cold, len(prompt))
    stats.append(engine.stats()["tiers"]["disk"])
    engine.close()
    assert [(each["arrived"], each["lost"], each["hit_tokens"]) for each in stats] == [(1, 0, len(prompt))] * 2, stats
