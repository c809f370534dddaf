"""Step programs compiled by XLA's compiler for an H200 that is not at hand: in place, lean, and without the host; mixed
steps and steps with LoRA adapters also for a TPU.

A few layers of each kind of some published sizes by default, more sizes with --slow. It needs the packages of the extra
`plan-gpu` and no GPU. Library kernels are chosen without measuring, so nothing here tells a time.
"""

from functools import partial
from importlib.metadata import version

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from checkpoints.load import load_config
from checkpoints.presets import PRESETS
from kernels_pallas.grouped_matmul import grouped_matmul
from mamba_jax.batch import DecodeBatch, MixedBatch, PrefillBatch
from mamba_jax.sharding import Partition
from mamba_jax.store import Replay
from serving.capacity.compiling import slice_mesh
from serving.capacity.targets import target
from tests.support.compiled_programs import compilable, compile_step, few_layers, narrow_parameters
from tests.support.selection import slow

pytestmark = [pytest.mark.gpu_compile, pytest.mark.full]

STORE = {"num_slots": 2000, "num_pages": 33_000, "page_size": 64}
ROWS, TOKENS, TILE = 64, 2048, 128
DECODE = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=0, pages_per_row=64)
PREFILL = PrefillBatch.empty(tokens=TOKENS, rows=2, tiles=TOKENS // TILE + 2, pages_per_row=64, tile_size=TILE)
MOST = 500e6
"""Temporaries. Caches, states and experts' weights of one layer are each larger, so none of them is copied."""

ONE_GRAPH = {"kCommandBuffer": 1}
"""The host launches one CUDA graph for a step, and nothing else."""

FEW = [
    ("nemotron-h-8b", "M*-", "h200-1", 3),
    ("nemotron-h-8b", "M-", "h200-2", 0),
    ("nemotron-3-nano-30b-a3b", "ME*", "h200-1", 0),
    ("qwen3.5-27b", "D-*", "h200-1", 3),
    ("kimi-linear-48b-a3b", "DL-", "h200-1", 0),
]
OTHER_MACHINES = [
    ("nemotron-3-nano-30b-a3b", "ME*", "h200-4", 3),
    ("bamba-9b", "M*-", "h100-2", 0),
    ("qwen3-next-80b-a3b", "DE*", "h200-2", 3),
    ("nemotron-h-8b", "M*-", "b200-1", 0),
]


def one_of_each(name):
    """A pattern with one layer of each kind that a published size has, in its order; shared blocks in both forms."""
    return "".join(dict.fromkeys(load_config(name).pattern)).replace("Z", "ZZ")


EVERY = [(name, one_of_each(name), "h200-1", drafts) for name in PRESETS for drafts in (0, 3)]
REST = [slow(*case) for case in (*OTHER_MACHINES, *EVERY) if case not in FEW]
SAMPLING, EXPERTS = FEW[0], FEW[2]
"""One model's steps also sample. A decode step of the other one samples from its whole vocabulary, and a mixed step has
its prefill."""


def compiled_for(model, pattern, topology, drafts, batch, vocab_size=1024, kind=None, replay=None, **options):
    """The program, the bytes of its store, and how operations run."""
    config = few_layers(model, pattern, vocab_size)
    narrow = kind and narrow_parameters(config, Partition.of(config, target(topology).count), kind)
    store = STORE | {"replay": replay, "num_tails": 0 if replay is None else ROWS + 1}
    seats = {"max_num_seqs": ROWS, "num_speculative_tokens": drafts, "replay": replay is not None}
    seats["adapters"] = "lora" in options
    step = compile_step(config, topology, batch, store=store, seats=seats, parameters=narrow, tile_size=TILE, **options)
    return step.program, step.states + step.pages, step.kernels


def check(program, store):
    """The store is updated in place, with little other memory."""
    assert program.aliased >= store
    assert program.temporaries < min(store / 20, MOST)


@pytest.mark.parametrize(("model", "pattern", "topology", "drafts"), [*FEW, *REST])
def test_decode_is_lean(model, pattern, topology, drafts):
    batch = DecodeBatch.empty(rows=ROWS, num_speculative_tokens=drafts, pages_per_row=64)
    case = model, pattern, topology, drafts
    sizes = {"vocab_size": load_config(model).vocab_size} if case == EXPERTS else {}
    greedy = case not in (SAMPLING, EXPERTS)
    program, store, kernels = compiled_for(*case, batch, greedy=greedy, **sizes)
    check(program, store)
    if sizes:  # logits, their copy, and those of the heads that are searched at a time
        assert program.temporaries < 2.5 * 4 * ROWS * sizes["vocab_size"]
    by_xla = (" recurrence_update by xla", "paged_attention by xla")
    assert not [by for by in by_xla if by in kernels]
    assert program.launches == ONE_GRAPH
    if "E" in pattern and topology[:4] in ("h100", "h200"):
        assert "grouped_matmul by pallas_gpu" in kernels


@pytest.mark.parametrize(
    ("model", "pattern", "topology", "drafts"), [*(case for case in FEW if case != EXPERTS), slow(*EXPERTS), *REST]
)
def test_prefill_is_lean(model, pattern, topology, drafts):
    greedy = (model, pattern, topology, drafts) != SAMPLING
    program, store, kernels = compiled_for(model, pattern, topology, drafts, PREFILL, greedy=greedy)
    check(program, store)
    by_xla = ("recurrence_scan by xla", "paged_attention by xla")
    assert not [by for by in by_xla if by in kernels]
    # The loop over log-probabilities of prompts slices the head's weight, which XLA does not put into a graph.
    assert program.launches["kCommandBuffer"] <= 2
    assert program.launches["kWhile"] == 1
    assert set(program.launches) <= {"kCommandBuffer", "kWhile", "kCopy"}


@pytest.mark.parametrize("batch", [DECODE, PREFILL], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("model", "topology", "kind", "weight"),
    [
        ("nemotron-3-nano-30b-a3b", "h200-1", "int8", 128 * 1856 * 2688),
        slow("nemotron-3-super-120b-a12b", "h200-2", "nvfp4", 512 * 2688 * 1024),
    ],
)
def test_narrow_experts_are_not_widened_in_memory(model, topology, kind, weight, batch):
    """And tokens are not masked for each expert, as XLA's own grouped product would: 64 GB for a prefill of Super."""
    program, _, kernels = compiled_for(model, "ME", topology, 0, batch, kind=kind)
    assert "quantized_grouped_matmul by pallas_gpu" in kernels
    # A prefill of 2,048 tokens holds its products; a wide copy of one weight would be twice `weight`.
    assert program.temporaries < weight / target(topology).count


@pytest.mark.parametrize(
    ("model", "layer", "rows", "most", "drafts"),
    [
        ("nemotron-h-8b", "M", 64, 7, 3),
        ("nemotron-3-nano-30b-a3b", "E", 8, 9, None),
        slow("nemotron-h-8b", "M", 64, 7, None),
        slow("qwen3.5-27b", "D", 64, 8, None),
        slow("qwen3.5-27b", "D", 8, 8, 3),
        slow("nemotron-3-nano-30b-a3b", "E", 64, 15, None),
        slow("qwen3-next-80b-a3b", "E", 8, 9, None),
        slow("qwen3-next-80b-a3b", "D", 8, 8, None),
        slow("kimi-linear-48b-a3b", "D", 8, 12, None),
    ],
)
def test_kernels_of_a_layer(model, layer, rows, most, drafts):
    """What one more layer adds to a decode step, products and the update among them. With drafts, rows are replayed."""
    replay, drafts = None if drafts is None else Replay(interval=16, num_drafts=drafts), drafts or 0
    sizes = {"num_speculative_tokens": drafts, "pages_per_row": 1, "replay": replay is not None}
    batch = DecodeBatch.empty(rows=rows, **sizes)
    first = "M" if model.startswith("nemotron") else "D"  # a step has some state
    programs = (compiled_for(model, first + n * layer, "h200-1", drafts, batch, replay=replay)[0] for n in (1, 2))
    one, two = (program.kernels for program in programs)
    # XLA of JAX 0.12 merges fewer products of one input.
    assert 0 < two - one <= most + (not version("jaxlib").startswith("0.10."))


@pytest.mark.parametrize(("model", "pattern"), [("nemotron-h-8b", "M*-"), slow("kimi-linear-48b-a3b", "DL-")])
def test_no_product_of_one_token_is_added_up_within_a_copy(model, pattern):
    batch = DecodeBatch.empty(rows=1, num_speculative_tokens=0, pages_per_row=64)
    program, *_ = compiled_for(model, pattern, "h200-1", 0, batch)
    assert program.sums_in_copies == 0


@pytest.mark.parametrize(
    ("model", "outputs", "inputs"), [("qwen3-next-80b-a3b", 12_352, 2048), ("kimi-linear-48b-a3b", 12_544, 2304)]
)
def test_weights_of_a_delta_net_are_not_copied(model, outputs, inputs):
    """XLA merges products of one input. Of the first, two have 32 outputs, no multiple of its tiles; of the second,
    two have the 128 channels of gates of low rank.
    """
    batch = DecodeBatch.empty(rows=8, num_speculative_tokens=0, pages_per_row=1)
    program, *_ = compiled_for(model, "D", "h200-1", 0, batch)
    assert program.temporaries < 2 * outputs * inputs / 10


EXPERT_SIZES = {
    "granite-4.0-h-tiny gate and up": (64, 1024, 1536),
    "granite-4.0-h-tiny down": (64, 512, 1536),
    "granite-4.0-h-small gate and up": (72, 1536, 4096),
    "granite-4.0-h-small down": (72, 768, 4096),
}
"""Experts, channels of each and width of the token."""


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [384, 12288])
@pytest.mark.parametrize("name", EXPERT_SIZES)
def test_experts_of_published_sizes(name, tokens):
    """Weights of both orientations: nothing but the kernel touches them. Those of Nemotron-3 are larger than all that
    its steps may hold."""
    mesh = slice_mesh(compilable("h200-1"))
    experts, *sizes = EXPERT_SIZES[name]
    described = partial(jax.ShapeDtypeStruct, dtype=jnp.bfloat16, sharding=SingleDeviceSharding(mesh.devices.flat[0]))
    groups = jax.ShapeDtypeStruct((experts,), jnp.int32, sharding=SingleDeviceSharding(mesh.devices.flat[0]))
    for outputs, inputs in (sizes, sizes[::-1]):
        run = jax.jit(partial(grouped_matmul, implementation="pallas_gpu"))
        lowered = run.lower(described((tokens, inputs)), described((experts, outputs, inputs)), groups)
        memory = lowered.compile({"xla_gpu_autotune_level": 0}).memory_analysis()
        assert memory.temp_size_in_bytes < 2 * (4 * tokens * (inputs + outputs))


MIXED = "nemotron-3-nano-30b-a3b", "ME*"


@pytest.mark.slow
def test_a_mixed_step_reads_weights_once_on_tpu():
    alone = [compiled_for(*MIXED, "v6e-1", 0, batch)[0] for batch in (DECODE, PREFILL)]
    program, store, _ = compiled_for(*MIXED, "v6e-1", 0, MixedBatch(DECODE, PREFILL))
    print([(each.weights, each.traffic.total()) for each in (*alone, program)])
    assert program.aliased >= store
    assert program.temporaries < 2 * max(each.temporaries for each in alone)
    assert program.weights <= 1.1 * max(each.weights for each in alone)
    assert program.traffic.total() <= 0.75 * sum(each.traffic.total() for each in alone)


def test_a_mixed_step_is_lean_on_gpu():
    program, store, kernels = compiled_for(*MIXED, "h200-1", 0, MixedBatch(DECODE, PREFILL))
    check(program, store)
    # As of prefill: the loop over log-probabilities of prompts is no part of a graph.
    assert program.launches["kWhile"] == 1
    assert set(program.launches) <= {"kCommandBuffer", "kWhile", "kCopy"}
    assert not [by for by in (" recurrence_update by xla", " recurrence_scan by xla") if by in kernels]


ADAPTED = "nemotron-h-8b", "M*-"
LORAS = [(1, 16), (4, 16)]


@pytest.mark.slow
def test_adapters_are_read_once_on_tpu():
    plain, store, _ = compiled_for(*ADAPTED, "v6e-1", 0, DECODE)
    for lora in LORAS:
        program, _, _ = compiled_for(*ADAPTED, "v6e-1", 0, DECODE, lora=lora)
        print(lora, [(each.weights, each.traffic.total(), each.temporaries) for each in (plain, program)])
        assert program.aliased >= store
        assert program.weights <= 1.1 * plain.weights
        assert program.traffic.total() <= 1.1 * plain.traffic.total()


@pytest.mark.parametrize("lora", [slow(LORAS[0]), LORAS[1]], ids=str)
def test_decode_with_adapters_is_lean_on_gpu(lora):
    program, store, _ = compiled_for(*ADAPTED, "h200-1", 0, DECODE, lora=lora)
    check(program, store)
    assert program.launches == ONE_GRAPH
