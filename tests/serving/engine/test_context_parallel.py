"""A model whose members divide pages and prompts by tokens says what it says on one device."""

import dataclasses
import itertools
import random
from functools import partial

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from mamba_jax.config import ModelConfigError
from mamba_jax.drafts import mtp
from mamba_jax.sharding import CONTEXT, TENSOR, Partition, make_mesh, replica_meshes, use_mesh
from mamba_jax.sharding.axis import as_first_member
from mamba_jax.step import run as step_module
from serving import SamplingParams
from serving.config import ConfigError
from serving.engine.assembly import build
from tests.golden.recipes import RECIPES
from tests.support.engines.divided_engines import GREEDY, answers, divided_llm
from tests.support.engines.step_programs import own_programs
from tests.support.exchanged_bytes import exchanged_bytes
from tests.support.hlo_traffic import Traffic, count_collectives
from tests.support.models.divisible_checkpoints import EIGHT, FAMILIES, GOLDEN, MORE, Case, write_checkpoint
from tests.support.models.golden_case import NAMES, assert_greedy
from tests.support.selection import slow

pytestmark = pytest.mark.usefixtures("quick_compilation", "few_tokens_are_divided")

QUICK = {("kimi", 4), ("mamba2", 8), ("qwen3next", 4), ("zamba2", 8)}
"""Of the full tier. A model without attention has no pages: its members divide the steps of a prompt only."""
BY_TWO = {
    "falcon-mamba", "falconh1-norm-first", "granite-dense", "jamba", "lfm2", "lfm2-moe", "lfm3", "mamba",
    "mamba2-plain", "minimax", "nemotronh-latent", "nemotronh-old", "zamba2-nope",
}  # fmt: skip
DIVISIBLE = {1: set(NAMES), 2: BY_TWO, 4: BY_TWO - {"minimax"}}
"""The golden models whose heads divide over so many devices, padded if need be."""


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "members"), [each if each in QUICK else slow(*each) for each in itertools.product(NAMES, (8, 4, 2))]
)
def test_every_golden_model_with_divided_pages(name, members, tmp_path):
    """Where its heads do not divide, it is refused, and one like it with other sizes is divided."""
    shards, flags = 8 // members, {"dtype": "float32", "context_parallel_size": members}
    case, directory = Case(name, {}, "mtp" if RECIPES[name].mtp else "ngram"), GOLDEN / name
    if name not in DIVISIBLE[shards]:
        with pytest.raises(ConfigError, match=rf"tensor_parallel_size {shards} .* \d [\w -]+: use a divisor"):
            divided_llm(directory, case, shards, **flags)
        case = (FAMILIES | MORE)[name]
        directory = write_checkpoint(tmp_path, case)
    llm = divided_llm(directory, case, shards, **flags)
    assert_greedy(answers(llm), directory)
    assert_pages_divided(llm, members)


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
    one, llm = (divided_llm(tmp_path, case, *devices) for devices in ((1,), (2,)))
    divided = divided_llm(tmp_path, case, 2, context_parallel_size=4)
    assert_greedy(answers(one), tmp_path)
    for each in (llm, divided):
        assert_greedy(answers(each), tmp_path)
        assert each.engine.stats()["drafts"] == one.engine.stats()["drafts"]
        layer = each.model.mtp
        for weight in (layer.embed.weight[...], layer.lm_head.weight[...]):
            assert weight.sharding.shard_shape(weight.shape) == (table.shape[0] // 2, table.shape[1])


@pytest.mark.full
@pytest.mark.parametrize(("members", "shards", "recurrent_heads"), [(8, 1, 16), (2, 4, 16), (8, 1, 4)])
def test_divided_pages_under_load(members, shards, recurrent_heads, tmp_path):
    """Decode next to prefill, hits at every checkpoint, and preemption: each member has pages for one sequence."""
    case = dataclasses.replace(EIGHT, changes=EIGHT.changes | {"mamba_num_heads": recurrent_heads})
    directory = write_checkpoint(tmp_path, case)
    flags = {"max_num_seqs": 3, "num_slots": 40, "page_size": 4, "num_pages": 32, "context_parallel_size": members}
    llm = divided_llm(directory, case, shards, replay_interval=8, **flags)
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
    if shards == 1 and recurrent_heads % members == 0:
        assert_exchanges(llm, members)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "members"), [("eight", 8), ("qwen3next", 2), *(slow(name, 2) for name in ("jamba", "recurrent-gemma"))]
)
def test_pairs_over_slow_links(name, members, monkeypatch, tmp_path):
    """Heads divide by members."""
    monkeypatch.setattr(build, "StepPrograms", partial(own_programs, slow_links=True))
    case = (FAMILIES | MORE | {"eight": EIGHT})[name]
    directory = write_checkpoint(tmp_path, case)
    llm = divided_llm(directory, case, 1, context_parallel_size=members)
    assert_greedy(answers(llm), directory)
    if name == "eight":
        assert_exchanges(llm, members, slow=True)


def assert_exchanges(llm, members, **links):
    """What a prefill step receives from the other members."""
    config, programs, (shape,) = llm.model.config, llm.engine.loop.programs, llm.engine.loop.batches.prefill_shapes
    partition = Partition.of(config, 1, members)
    writes = llm.engine.loop.batches.empty_prefill(shape).most_writes
    expected = exchanged_bytes(config, partition, shape.tokens, item=4, state_item=4, tiles=writes, **links)
    prefills = [Traffic(compiled.as_text()) for name, compiled in programs.cache if name == "PrefillBatch"]
    assert prefills
    for each in prefills:
        assert (each.received("all-to-all"), each.received("all-gather")) == expected


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

    choose, best = step_module.choose, mtp._best
    if place == "tokens":
        monkeypatch.setattr(step_module, "choose", choose_apart)
    else:
        monkeypatch.setattr(mtp, "_best", lambda *args: apart(best(*args)))
    case = FAMILIES["qwen3next"]
    directory = write_checkpoint(tmp_path, case)
    llm = divided_llm(directory, case, 2, context_parallel_size=4)
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
    with pytest.raises(ModelConfigError, match=r"data_parallel_size 5 .* takes 10 devices: JAX sees 8 cpu"):
        replica_meshes(5, 2)
