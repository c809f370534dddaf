"""Step programs compiled by the TPU's own compiler: nothing is copied, and devices exchange the least there is."""

from dataclasses import replace

import jax.numpy as jnp
import pytest

from checkpoints.placing import abstract_parameters
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.config import AttentionConfig, MLPConfig, QKNormConfig, RopeConfig
from mamba_jax.config.drafter import BlockConfig, EagleConfig
from mamba_jax.drafts import BlockDrafts, MTPDrafts
from serving.capacity.count import Counter
from serving.capacity.targets import target
from serving.config import EngineConfig
from serving.core.config import SchedulerConfig
from serving.engine.steps.batching import BatchBuilder
from tests.support.compiled_programs import compile_step, few_layers, least_collectives
from tests.support.exchanged_bytes import exchanged_bytes
from tests.support.selection import slow

pytestmark = pytest.mark.full

TILE = 128
STORE, SEATS = {"num_slots": 400, "num_pages": 4000, "page_size": 32}, {"max_num_seqs": 64}


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("model", "pattern", "topology"),
    [
        ("demo", "M*-", "v5e-1"),  # states of 64 and heads of 32: padded, but in place
        ("nemotron-h-8b", "M*-", "v5e-8"),
        ("qwen3.5-27b", "D-*-", "v6e-8"),
        slow("qwen3-next-80b-a3b", "DE*E", "v6e-8"),
        slow("qwen3-next-80b-a3b", "DE*E", "v5p-8"),
        slow("qwen3.5-27b", "D-*-", "v5p-8"),
        slow("bamba-9b", "M*-", "v6e-4"),
        slow("granite-4.0-h-small", "ME*E", "v6e-8"),
        # Four hosts each.
        slow("nemotron-h-8b", "M*-", "v5e-16"),
        slow("nemotron-h-8b", "M*-", "v6e-16"),
    ],
)
def test_decode_is_lean(model, pattern, topology):
    batch = DecodeBatch.empty(rows=16, num_speculative_tokens=0, pages_per_row=32)
    config = few_layers(model, pattern)
    step = compile_step(config, topology, batch, store=STORE, seats=SEATS, greedy=model != "nemotron-h-8b")
    program, least = step.program, least_collectives(config, step.partition)
    assert " recurrence_update by xla" not in step.kernels
    assert program.aliased >= step.states + step.pages
    assert program.temporaries < min(step.states, step.pages) / 4
    if target(topology).count == 1:
        assert not program.collectives
        return
    assert program.collectives["all-reduce"] == least["sums"] + least["norms"]
    assert program.collectives["all-gather"] == least["largest"]
    if (model, topology) == ("qwen3.5-27b", "v6e-8"):
        # Weights arrive while devices add up; after the last sum come those of the head, which is small here.
        assert min(program.traffic.arriving()[: len(pattern)]) > 1e7


@pytest.mark.tpu_compile
def test_prefill_divides_its_tokens():
    """Sums of a layer go to the device that has the token, and are gathered once the next norm has run."""
    tokens = 1024
    batch = PrefillBatch.empty(tokens=tokens, rows=2, tiles=tokens // TILE + 2, pages_per_row=32, tile_size=TILE)
    config = few_layers("nemotron-h-8b", "M*-")
    step = compile_step(config, "v5e-8", batch, store=STORE, seats=SEATS)
    program, least = step.program, least_collectives(config, step.partition)
    assert program.aliased >= step.states + step.pages
    # Embeddings are added up whole.
    assert program.collectives["all-reduce"] == 1
    assert program.collectives["reduce-scatter"] == least["sums"] - 1
    assert program.collectives["all-gather"] == least["sums"] - 1 + least["largest"]


NANO, NEXT, GRANITE = "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "granite-4.0-h-small"


def on_members(model, pattern, topology, members, phase):
    """A case of the test below; those that take longest are slow."""
    marks = [pytest.mark.gpu_compile if topology == "h200-8" else pytest.mark.tpu_compile]
    quick = pattern == "M*" and members == 4
    return pytest.param(model, pattern, topology, members, phase, marks=marks if quick else [*marks, pytest.mark.slow])


@pytest.mark.parametrize(
    ("model", "pattern", "topology", "members", "phase"),
    [
        on_members(*case, phase)
        for phase in ("decode", "prefill")
        for case in (
            (NANO, "M*", "v6e-8", 4),
            (NANO, "M*", "v6e-64", 8),
            (NANO, "M*", "h200-8", 4),
            (NEXT, "D*", "v6e-8", 4),
            (NEXT, "D*", "v6e-64", 8),  # prefill by pairs
            (NEXT, "D*", "h200-8", 4),
            (NEXT, "D*", "h200-8", 8),  # of 12 heads: prefill by pairs
            (NANO, "E*", "h200-8", 4),  # experts are recorded
        )
    ],
)
def test_members_exchange_what_they_found(model, pattern, topology, members, phase):
    """In decoding, of a layer of attention: the results of each member for all queries, in float32, and no key and no
    value. In prefill, where a member has a share of the tokens: what the table of decision 0042 says."""
    config, rows, on_gpu = few_layers(model, pattern), 64, topology == "h200-8"
    if on_gpu and members == 8:
        config = replace(config, recurrences=(replace(config.mixer("D"), num_heads=12, num_groups=4),))
    # Of 64 devices, each has small states: more of them, so that a copy would be larger than all activations.
    tokens, slots = (4096, 1600) if members == 8 else (1024, 400)
    store = STORE | {"page_size": 64 if on_gpu else 128, "num_pages": 8000, "num_slots": slots}
    store |= {"routed_experts": "E" in pattern}
    pages = 131_072 // store["page_size"]
    batch, seen = DecodeBatch.empty(rows=rows, num_speculative_tokens=0, pages_per_row=pages), rows
    if phase == "prefill":
        tiles = tokens // TILE + 2
        sizes = {"tile_size": TILE, "most_writes": 6}
        batch = PrefillBatch.empty(tokens=tokens, rows=2, tiles=tiles, pages_per_row=pages, **sizes)
        seen = tiles * TILE
    step = compile_step(config, topology, batch, store=store, seats=SEATS, members=members)
    attention = config.attention
    heads, head_dim = attention.num_heads // step.partition.shards, attention.head_dim
    least = 4 * members * heads * head_dim * seen
    exchanged, gathered = map(step.program.traffic.received, ("all-to-all", "all-gather"))
    if phase == "decode":
        assert least <= gathered <= 1.1 * least
    else:
        expected = exchanged_bytes(config, step.partition, tokens, tiles=batch.most_writes if on_gpu else 0)
        assert (exchanged, gathered) == expected
    weights = abstract_parameters(config, jnp.bfloat16)
    once = Counter(config, step.partition, weights, ssm_dtype=jnp.dtype("float32")).weight_bytes
    assert 0.95 * once < step.program.weights < 1.05 * once  # of the embedding a part
    assert f"paged_attention_part by pallas_{'gpu' if on_gpu else 'tpu'}" in step.kernels
    assert step.program.aliased >= step.states + step.pages
    assert step.program.temporaries < step.pages / 4 + 3 * least
    assert step.program.temporaries < step.states / 4 or "E" in pattern  # also where a step writes many of them


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("model", [NEXT, GRANITE])
def test_attention_at_a_models_full_length_runs_by_the_kernel(model):
    """64 rows, the default page size, page tables on the device."""
    config = few_layers(model, "*")
    store = STORE | {"page_size": EngineConfig.create().page_size_on("tpu")}
    settings = SchedulerConfig(**store, max_model_len=config.max_position_embeddings)
    seats = SEATS | {"pages_per_row": settings.pages_per_row}
    step = compile_step(config, "v6e-8", BatchBuilder(settings).empty_decode(64, 0), store=store, seats=seats)
    assert "paged_attention by pallas_tpu" in step.kernels
    # The rows' tables are gathered once, and the seats' are changed in place.
    assert step.program.aliased >= step.states + step.pages + 4 * 65 * settings.pages_per_row
    assert step.program.temporaries < 16 << 20


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e-1", "v6e-1"])
def test_prefill_of_a_mamba_layer_is_lean(topology):
    """Nemotron-H-8B's, 2,048 tokens: weights, activations and states, none of them laid out anew in between."""
    batch = PrefillBatch.empty(tokens=2048, rows=2, tiles=18, pages_per_row=1, tile_size=TILE)
    store = STORE | {"num_pages": 0}
    step = compile_step(few_layers("nemotron-h-8b", "M"), topology, batch, store=store, seats={"max_num_seqs": 16})
    assert "gated_scan by pallas_tpu" in step.kernels
    assert step.program.traffic.total() < 0.9e9
    assert step.program.temporaries < 150e6


@pytest.mark.tpu_compile
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "megabytes", "temporary"), [(NEXT, 700, 30), ("nemotron-3-super-120b-a12b", 2000, 100)]
)
def test_prefill_moves_rows_of_a_devices_own_experts(model, megabytes, temporary):
    """Of 2,048 tokens; with the rows of all experts on every chip it was 2.5 and 7.7 GB, plus 350 and 440 MB."""
    batch = PrefillBatch.empty(tokens=2048, rows=2, tiles=18, pages_per_row=1, tile_size=TILE)
    store = STORE | {"num_pages": 0}
    program = compile_step(few_layers(model, "E"), "v6e-8", batch, store=store, seats=SEATS).program
    assert program.traffic.total() < megabytes * 1e6
    assert program.temporaries < temporary * 1e6
    assert program.collectives["reduce-scatter"] == 1
    assert program.collectives["all-reduce"] == 1  # of embeddings


ATTENTION = AttentionConfig(
    num_heads=16, num_kv_heads=8, head_dim=128, scale=128**-0.5, input_size=1024, rope=RopeConfig(1e4, 128)
)
SIZES = {
    "hidden_size": 1024, "vocab_size": 1024, "places": (1, 2), "mlp": MLPConfig(2048, "silu", gated=True),
    "norm_eps": 1e-6, "own_embedding": True,
}  # fmt: skip
NORMED = replace(ATTENTION, qk_norm=QKNormConfig(1e-6))
DRAFTERS = {
    "eagle3": (EagleConfig(attention=ATTENTION, maps_vocabulary=True, **SIZES), MTPDrafts()),
    "dspark": (
        BlockConfig(attention=NORMED, num_layers=2, markov_rank=256, from_newest=True, **SIZES),
        BlockDrafts(0, from_newest=True),
    ),
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["eagle3", slow("dspark")])
def test_a_drafter_copies_nothing(name):
    drafter, source = DRAFTERS[name]
    config = few_layers("nemotron-h-8b", "M*-").with_drafter(drafter)
    batch = DecodeBatch.empty(rows=16, num_speculative_tokens=3, pages_per_row=16)
    seats = {"max_num_seqs": 16, "num_speculative_tokens": 3, "max_len": 1024}
    store = STORE | {"num_pages": 2000, "page_size": 128}
    step = compile_step(config, "v5e-8", batch, store=store, seats=seats, source=source)
    assert step.program.aliased >= step.states + step.pages
    assert step.program.temporaries < min(step.states, step.pages) / 4
