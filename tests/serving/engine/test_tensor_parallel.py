"""A model divided over devices by heads says what it says on one, with caching and drafts."""

import itertools
import re
import threading
from collections import Counter

import jax
import numpy as np
import pytest

from mamba_jax.sharding import TENSOR, Partition
from serving import LLM, RequestError, SamplingParams
from serving.config import ConfigError
from serving.core.tiers.tiers import FetchCosts
from serving.engine.assembly.devices import scheduler_clock
from tests.support.compiled_programs import least_collectives
from tests.support.engines.divided_engines import GREEDY, answers, divided_llm
from tests.support.engines.engines import finish
from tests.support.engines.replicas import admitted, check_idle
from tests.support.engines.small_tiers import tier_mover
from tests.support.hlo_traffic import count_collectives
from tests.support.models.divisible_checkpoints import EIGHT, FAMILIES, MORE, Case, write_checkpoint
from tests.support.models.golden_case import assert_greedy
from tests.support.selection import slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "few_tokens_are_divided")


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "interval", "shards"),
    [
        *((name, 1, 2) for name in FAMILIES),
        *(slow(name, 1, 2) for name in MORE),
        ("qwen3next", 8, 2),
        *(slow(*each) for each in (("falcon-mamba", 8, 2), ("kimi", 8, 2), ("eight", 1, 8))),
        ("eight", 8, 8),
    ],
)
def test_every_family_on_several_devices(name, interval, shards, tmp_path):
    """Eight share heads, groups and keys. Of replay's inputs, each has those of its own heads and of their group."""
    case = (FAMILIES | MORE | {"eight": EIGHT})[name]
    directory = write_checkpoint(tmp_path, case)
    llm = divided_llm(directory, case, shards, replay_interval=interval)
    assert_greedy(answers(llm), directory)
    if name not in MORE:
        assert_divided(llm, shards)
        assert_lean(llm)


TWENTY = Case(EIGHT.golden, EIGHT.changes | {"num_attention_heads": 20, "num_key_value_heads": 4})


@pytest.mark.full
def test_heads_that_do_not_divide_are_padded(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, TWENTY)
    caplog.set_level("INFO")
    llm = divided_llm(directory, TWENTY, 8)
    assert "20 attention heads are padded with zeros to 24" in caplog.text
    outputs = answers(llm)
    assert_greedy(outputs, directory, atol=2e-4)
    assert_divided(llm, 8)
    for replace, given in ((llm.update_weights, str(directory)), (llm.sleep, 2)):
        with pytest.raises(RequestError, match="weights cannot be replaced: 20 attention heads are padded"):
            replace(given)
    again = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, GREEDY, use_tqdm=False)
    assert_greedy(again, directory, atol=2e-4)


def test_adapters_with_padded_heads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"enable_lora does not support padded heads \(20 attention heads"):
        divided_llm(write_checkpoint(tmp_path, TWENTY), TWENTY, 8, enable_lora=True)


def assert_divided(llm, shards):
    """Every device holds its share of the store and of the large weights, and reports its own bytes."""
    store = llm.engine.loop.store
    for slots in store.slots:
        name = next(name for name in ("ssm", "delta", "selective") if name in slots)
        recurrent, axis = slots[name], 2 if name == "selective" else 1  # its channels come last
        assert {piece.data.shape[axis] for piece in recurrent.addressable_shards} == {recurrent.shape[axis] // shards}
        for window in (slots[name] for name in ("conv_x", "conv_v") if name in slots):
            assert window.sharding.shard_shape(window.shape)[2] == window.shape[2] // shards
    for kv in store.kv:
        entries = 1 if kv.shape[2] == 1 else max(2, kv.shape[2] // shards)  # one is a latent, which all devices have
        assert kv.sharding.shard_shape(kv.shape)[2] == entries
    on_first = [leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(store)]
    assert sum(on_first) == llm.size.total_bytes
    for mixer in (block.mixer for block in llm.model.blocks if hasattr(block.mixer, "out_proj")):
        weight = mixer.out_proj.weight[...]
        assert weight.sharding.shard_shape(weight.shape) == (weight.shape[0], weight.shape[1] // shards)


def assert_lean(llm):
    """Devices exchange the least there is, nothing of the store's size is copied, and the store is updated in place."""
    programs = llm.engine.loop.programs
    config, mesh = llm.model.config, programs.mesh
    least = least_collectives(config, Partition.of(config, mesh.shape[TENSOR]))
    steps = [compiled for name, compiled in programs.cache if name == "DecodeBatch"]
    assert steps
    prefills = [compiled.as_text() for name, compiled in programs.cache if name == "PrefillBatch"]
    assert any("reduce-scatter(" in text for text in prefills)
    for compiled in steps:
        text = compiled.as_text()
        found = Counter(count_collectives(text))
        drafting = llm.config.speculative_method == "mtp"
        if not drafting:
            assert found["all-reduce"] == least["sums"] + least["norms"]
            assert found["all-gather"] == least["largest"]
        assert not found.keys() - {"all-reduce", "all-gather"}
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes >= llm.size.total_bytes
        biggest = max(leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(llm.engine.loop.store))
        for shape in re.findall(r"= \w+\[([\d,]+)\]\S* copy\(", text):
            assert np.prod([int(n) for n in shape.split(",")]) < biggest


@pytest.mark.parametrize(
    ("case", "shards", "message"),
    [
        (EIGHT, 3, "tensor_parallel_size 3 does not divide this model's 16 Mamba heads"),
        (EIGHT, 16, "tensor_parallel_size 16 does not divide this model's 136 MLP channels"),
        (Case("mamba2", FAMILIES["mamba2"].changes | {"num_heads": 16, "head_dim": 9}), 16, "JAX sees 8 cpu device"),
    ],
)
def test_what_does_not_divide_is_refused(case, shards, message, tmp_path):
    with pytest.raises(ConfigError, match=re.escape(message)):
        LLM(write_checkpoint(tmp_path, case), tensor_parallel_size=shards)


@pytest.mark.full
def test_two_replicas_of_two_devices(tmp_path, monkeypatch, quick_compilation):
    monkeypatch.setattr(FetchCosts, "worth_fetching", lambda *_: True)  # computing a few tokens takes less time
    directory = write_checkpoint(tmp_path, EIGHT)
    tiers = {"host_cache_gib": 0.05, "disk_cache": str(tmp_path / "disk"), "disk_cache_gib": 0.05}
    llm = divided_llm(directory, EIGHT, 2, data_parallel_size=2, max_num_seqs=2, **tiers)
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
    for each in llm.engines:
        while each.loop.scheduler.index.evict_state():  # of the other one, what it has of its own
            pass
        tier_mover(each).copy_out(each.loop.store)
    other = llm.engines[1]
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


def test_the_clock_of_marks_stands_still_if_several_processes_schedule(monkeypatch):
    for processes, led, runs in ((1, False, True), (2, True, True), (2, False, False)):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        assert (scheduler_clock(led=led)() > 0) == runs
