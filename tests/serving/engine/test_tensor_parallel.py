"""A model divided over devices says what it says on one, with caching and drafts."""

import dataclasses
import itertools
import math
import random
import re
import threading
from collections import Counter

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints.presets import preset
from mamba_jax.config import ModelConfigError
from mamba_jax.drafts import mtp
from mamba_jax.sharding import CONTEXT, TENSOR, Partition, make_mesh, replica_meshes, use_mesh
from mamba_jax.sharding.axis import as_first_member
from mamba_jax.step import heads
from serving import LLM, RequestError, SamplingParams
from serving.config import ConfigError
from serving.core.tiers.tiers import FetchCosts
from serving.engine.assembly.devices import scheduler_clock
from serving.engine.steps.batching import BatchBuilder, PrefillShape
from tests.support.compiled_programs import least_collectives
from tests.support.engines.engine_harness import SMALL
from tests.support.engines.engines import finish
from tests.support.engines.replicas import admitted, check_idle
from tests.support.engines.small_tiers import tier_mover
from tests.support.hlo_traffic import count_collectives
from tests.support.models.divisible_checkpoints import EIGHT, FAMILIES, MORE, Case, write_checkpoint
from tests.support.models.golden_case import assert_greedy, shared_block
from tests.support.selection import slow

pytestmark = pytest.mark.usefixtures("quick_compilation")
FLAGS = SMALL | {"debug_state": True, "mamba_cache_mode": "all", "num_speculative_tokens": 2, "replay_interval": 1}
GREEDY = SamplingParams(max_tokens=10, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def few_tokens_are_divided(monkeypatch):
    """Prefill divides its tokens over the devices, as it does with many tokens."""
    monkeypatch.setattr("mamba_jax.sharding.axis.LEAST_TOKENS", 4)


def engine(directory, case, shards, **flags):
    return LLM(directory, tensor_parallel_size=shards, speculative_method=case.drafts, **(FLAGS | flags))


def answers(llm):
    """Three prompts in turn: a fresh one, one that shares a block with it, and the first one again."""
    prompts = shared_block()
    outputs = [llm.generate({"prompt_token_ids": ids}, GREEDY, use_tqdm=False)[0] for ids in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 32, len(prompts[0])]
    llm.engine.loop.scheduler.check(idle=True)
    return outputs


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "interval"),
    [
        *((name, 1) for name in FAMILIES),
        *(slow(name, 1) for name in MORE),
        ("qwen3next", 8),
        slow("falcon-mamba", 8),
        slow("kimi", 8),
    ],
)
def test_every_family_on_two_devices(name, interval, tmp_path):
    case = (FAMILIES | MORE)[name]
    directory = write_checkpoint(tmp_path, case)
    llm = engine(directory, case, 2, replay_interval=interval)
    assert_greedy(answers(llm), directory)
    if name in FAMILIES:
        assert_divided(llm, 2)
        assert_lean(llm)


@pytest.mark.full
@pytest.mark.parametrize("interval", [slow(1), 8])
def test_eight_devices_share_heads_groups_and_keys(interval, tmp_path):
    """Also by replay, of whose inputs each device has those of its own heads and of the group that they share."""
    directory = write_checkpoint(tmp_path, EIGHT)
    llm = engine(directory, EIGHT, 8, replay_interval=interval)
    assert_greedy(answers(llm), directory)
    assert_divided(llm, 8)
    assert_lean(llm)


COVERED = {"kimi", "qwen3next", "zamba2"}
"""Families that are tested with several members in any case."""


@pytest.mark.full
@pytest.mark.parametrize("members", [4, slow(8)])
@pytest.mark.parametrize(
    "name", ["kimi", "qwen3next", "zamba2", *(slow(name) for name in sorted((FAMILIES | MORE).keys() - COVERED))]
)
def test_every_family_with_divided_pages(name, members, tmp_path):
    case = (FAMILIES | MORE)[name]
    directory = write_checkpoint(tmp_path, case)
    llm = engine(directory, case, 8 // members, context_parallel_size=members)
    assert_greedy(answers(llm), directory)
    assert_pages_divided(llm, members)


@pytest.mark.full
def test_members_without_pages(tmp_path):
    """A model without attention: members divide the steps of a prompt only."""
    case = (FAMILIES | MORE)["mamba2"]
    directory = write_checkpoint(tmp_path, case)
    llm = engine(directory, case, 1, context_parallel_size=2)
    assert not llm.engine.loop.store.kv
    assert_greedy(llm.generate({"prompt_token_ids": shared_block()[0]}, GREEDY, use_tqdm=False), directory)
    assert_pages_divided(llm, 2)


@pytest.mark.full
def test_a_draft_layer_with_tables_of_its_own(tmp_path):
    """Each device loads its words of them, and accepts the drafts that one device accepts."""
    case = FAMILIES["qwen3next"]
    case = dataclasses.replace(case, changes=case.changes | {"vocab_size": 332})
    stored = write_checkpoint(tmp_path, case) / "model.safetensors"
    tensors, random = load_file(stored), np.random.default_rng(1)
    table = tensors["model.embed_tokens.weight"]
    own = {f"mtp.{name}.weight": random.permutation(table) for name in ("embed_tokens", "lm_head")}
    save_file(tensors | own, stored, {"format": "pt"})
    one, llm = (engine(tmp_path, case, *devices) for devices in ((1,), (2,)))
    divided = engine(tmp_path, case, 2, context_parallel_size=4)
    assert_greedy(answers(one), tmp_path)
    for each in (llm, divided):
        assert_greedy(answers(each), tmp_path)
        assert each.engine.stats()["drafts"] == one.engine.stats()["drafts"]
        layer = each.model.mtp
        for weight in (layer.embed.weight[...], layer.lm_head.weight[...]):
            assert weight.sharding.shard_shape(weight.shape) == (table.shape[0] // 2, table.shape[1])


@pytest.mark.full
@pytest.mark.parametrize(("members", "shards"), [(8, 1), (2, 4)])
def test_divided_pages_under_load(members, shards, tmp_path):
    """Decode next to prefill, hits at every checkpoint, and preemption: each member has pages for one sequence."""
    directory = write_checkpoint(tmp_path, EIGHT)
    flags = {"max_num_seqs": 3, "num_slots": 40, "page_size": 4, "num_pages": 32, "context_parallel_size": members}
    llm = engine(directory, EIGHT, shards, replay_interval=8, **flags)
    rng = random.Random(4)
    shared = [rng.randrange(3, 250) for _ in range(70)]
    prompts = [{"prompt_token_ids": shared[:cut] + [7 + cut] * 3} for cut in (1, 33, 40, 65, 70)]
    for _ in range(2):
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert_greedy(outputs, directory)
        llm.engine.loop.scheduler.check(idle=True)
    assert {output.num_cached_tokens for output in outputs} >= {32, 64}
    others = [{"prompt_token_ids": [rng.randrange(3, 250) for _ in range(30)]} for _ in range(3)]
    longer = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, logprobs=2)
    assert_greedy(llm.generate(others, longer, use_tqdm=False), directory)
    llm.engine.loop.scheduler.check(idle=True)
    assert members == 8 or llm.engine.stats()["preemptions"]  # of 8 sub-pools one limits admission first
    assert_pages_divided(llm, members)
    if shards == 1:
        assert_exchanges(llm, members)


def assert_exchanges(llm, members):
    """What a prefill step receives from the other members: of a Mamba layer and an attention layer, and the results."""
    (slots,), mamba, attention = llm.engine.loop.store.slots, llm.model.config.mamba, llm.model.config.attention
    vectors, of_queries = 2 * mamba.key_size, attention.num_heads * attention.head_dim
    # Both convolutions there and back, values there and outputs back, decays and strengths; results of attention.
    share = 4 * mamba.inner_size + 2 * vectors + 2 * mamba.num_heads
    parts = of_queries + attention.num_heads
    # The groups that several members share, queries, keys, values and hidden states; then what each state holds.
    tokens = vectors + of_queries + 2 * attention.num_kv_heads * attention.head_dim + llm.model.config.hidden_size
    state = sum(array[0].size for array in slots.values())
    (shape,) = llm.engine.loop.batches.prefill_shapes
    prefills = [compiled.as_text() for name, compiled in llm.engine.loop.programs.cache if name == "PrefillBatch"]
    assert prefills
    for text in prefills:
        assert received(text, "all-to-all") == 4 * (64 // members * share + 64 * parts)
        assert received(text, "all-gather") == 4 * (64 * tokens + shape.tiles * state)


def received(text, kind):
    """Bytes of the floats that the operations of a kind return, none of which is in a loop."""
    results = [line.split(f" {kind}(")[0] for line in text.splitlines() if f" {kind}(" in line]
    return sum(
        int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
        for each in results
        for bits, shape in re.findall(r"\bb?f(\d+)\w*\[([\d,]*)\]", each)
    )


@pytest.mark.full
@pytest.mark.parametrize("place", ["tokens", "drafts"])
def test_members_feed_what_the_first_one_chose(place, monkeypatch, tmp_path):
    """If sums differ between members, they may break ties differently; the planted difference is that of a tie."""

    def apart(tokens):
        on_each_device = jax.shard_map(
            lambda tokens: tokens + jax.lax.axis_index(CONTEXT), mesh=jax.sharding.get_abstract_mesh(),
            in_specs=jax.sharding.PartitionSpec(), out_specs=jax.sharding.PartitionSpec(), check_vma=False,
        )  # fmt: skip
        return on_each_device(tokens)

    def choose_apart(*args, **options):
        emission = choose(*args, **options)
        return dataclasses.replace(emission, tokens=apart(emission.tokens))

    choose, best = heads.choose, mtp._best
    if place == "tokens":
        monkeypatch.setattr(heads, "choose", choose_apart)
    else:
        monkeypatch.setattr(mtp, "_best", lambda *args: apart(best(*args)))
    case = FAMILIES["qwen3next"]
    directory = write_checkpoint(tmp_path, case)
    llm = engine(directory, case, 2, context_parallel_size=4)
    assert_greedy(answers(llm), directory)
    rows = llm.engine.loop._rows
    for of_seats in (rows.last_token, rows.drafts):
        first, *others = (np.asarray(shard.data) for shard in of_seats.addressable_shards)
        assert len(others) == 7
        for other in others:
            np.testing.assert_array_equal(other, first)


def assert_pages_divided(llm, members):
    """Each member has its own pages, and no program has a temporary array of the store's size."""
    store, programs = llm.engine.loop.store, llm.engine.loop.programs
    assert not store.kv or "paged_attention_part by xla" in programs.kernels.report()
    for kv in store.kv:
        assert kv.sharding.shard_shape(kv.shape)[0] == kv.shape[0] // members
    assert sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(store)) == llm.size.total_bytes
    for name, compiled in programs.cache:
        if name in ("DecodeBatch", "PrefillBatch"):
            assert compiled.memory_analysis().alias_size_in_bytes >= llm.size.total_bytes
            assert (name == "PrefillBatch") == bool(count_collectives(compiled.as_text()).get("all-to-all"))


def test_one_member_is_no_axis_of_the_mesh():
    one, tokens = make_mesh(2, members=1), np.arange(3)
    assert one.axis_names == (TENSOR,)
    with use_mesh(one):
        assert as_first_member(tokens) is tokens  # no exchange
    meshes = replica_meshes(2, 2, members=2)
    assert [dict(mesh.shape) for mesh in meshes] == [{CONTEXT: 2, TENSOR: 2}] * 2
    assert [device.id for mesh in meshes for device in mesh.devices.flat] == list(range(8))
    with pytest.raises(ModelConfigError, match=r"context_parallel_size 3 with tensor_parallel_size 4: JAX sees 8 cpu"):
        make_mesh(4, members=3)
    assert Partition.of(preset("bamba-9b"), 2, 1) == Partition.of(preset("bamba-9b"), 2)


@pytest.mark.full
def test_one_member_changes_no_program(tmp_path):
    """Whole steps have the same text, byte for byte, with the flag at 1 and without it."""
    directory = write_checkpoint(tmp_path, EIGHT)
    texts = []
    for flags in ({}, {"context_parallel_size": 1}, {"context_parallel_size": 2}):
        llm = engine(directory, EIGHT, 2, **flags)
        loop = llm.engine.loop
        builder = BatchBuilder(loop.scheduler.config)
        batches = builder.empty_decode(1, 2), builder.empty_prefill(PrefillShape(64, 1, 5))
        texts.append([loop.programs.lower(loop.store, loop._rows, batch).as_text() for batch in batches])
    assert texts[0] == texts[1]
    assert "context" not in texts[0][0]
    assert "context" in texts[2][0]


TWENTY = Case(EIGHT.golden, EIGHT.changes | {"num_attention_heads": 20, "num_key_value_heads": 4})


@pytest.mark.full
def test_heads_that_do_not_divide_are_padded(tmp_path, caplog):
    directory = write_checkpoint(tmp_path, TWENTY)
    caplog.set_level("INFO")
    llm = engine(directory, TWENTY, 8)
    assert "20 attention heads are padded with zeros to 24" in caplog.text
    outputs = answers(llm)
    assert_greedy(outputs, directory, atol=2e-4)
    assert_divided(llm, 8)
    with pytest.raises(RequestError, match="weights cannot be replaced: 20 attention heads are padded"):
        llm.update_weights(str(directory))
    with pytest.raises(RequestError, match="weights cannot be replaced: 20 attention heads are padded"):
        llm.sleep(2)
    again = llm.generate({"prompt_token_ids": outputs[0].prompt_token_ids}, GREEDY, use_tqdm=False)
    assert_greedy(again, directory, atol=2e-4)


def test_adapters_with_padded_heads_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"enable_lora does not support padded heads \(20 attention heads"):
        engine(write_checkpoint(tmp_path, TWENTY), TWENTY, 8, enable_lora=True)


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
    flags = FLAGS | {"max_num_seqs": 2, "max_num_batched_tokens": 32}
    flags |= {"host_cache_gib": 0.05, "disk_cache": str(tmp_path / "disk"), "disk_cache_gib": 0.05}
    llm = LLM(directory, data_parallel_size=2, tensor_parallel_size=2, speculative_method=EIGHT.drafts, **flags)
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


def test_the_clock_of_marks_stands_still_if_several_processes_schedule(monkeypatch):
    for processes, led, runs in ((1, False, True), (2, True, True), (2, False, False)):
        monkeypatch.setattr(jax, "process_count", lambda count=processes: count)
        assert (scheduler_clock(led=led)() > 0) == runs
