"""Kernels compiled by the TPU's own compiler at the sizes of real models: it takes them (so VMEM suffices), they update
the store in place, and allocate nothing of the store's size.

One by default, a few of each operation with --full; all with --slow.
"""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compile_cases import ATTENDING, FALCON, NEMOTRON, ON_TPU, divided
from jax.experimental.layout import Format, Layout
from jax.sharding import AxisType, Mesh, SingleDeviceSharding
from model_calls import BF16, F32, FORMS, SLOTS, call_of, nbytes, program, published, shape
from model_shapes import CONVOLUTIONS
from topology import SLICES, compile_for_tpu, described_device

from checkpoints import load_config
from checkpoints.presets import PRESETS
from kernels_pallas.grouped_matmul import grouped_matmul
from kernels_pallas.linear import linear
from kernels_pallas.quantized import Quantized, bits_of
from kernels_pallas.windows import read_windows, write_windows
from mamba_jax.config import MOE
from mamba_jax.kernel_check.values import Values
from mamba_jax.sharding import TENSOR, Partition
from tests.support.hlo_traffic import Traffic
from tests.support.selection import slow

pytestmark = pytest.mark.tpu_compile


@pytest.mark.parametrize(("chip", "operation", "model", "dtype", "store"), ON_TPU)
def test_kernel(chip, operation, model, dtype, store):
    call = call_of(operation, model, dtype, store)
    stores, others = call.apart(call.arrays)
    compiled = compile_for_tpu(chip, program(call, "pallas_tpu"), stores, others, donate=0)
    memory, text = compiled.memory_analysis(), compiled.as_text()
    assert memory.alias_size_in_bytes >= nbytes(stores)
    # Besides the kernel there is only what brings its inputs into its form.
    assert memory.temp_size_in_bytes <= most_temporaries(operation, call, model)
    assert "tpu_custom_call" in text
    if (most := most_moved(operation, call, model)) is not None:
        assert Traffic(text).total() <= most


def most_temporaries(operation, call, model):
    """Bytes that the program of a call may allocate."""
    match operation:
        case "gated_scan":  # its inputs come as [tokens, 2, inner], and are laid out flat; a layer's product is flat
            return 1.1 * nbytes(call.arguments["zx"])
        case "recurrence_scan" if model.tiles == 256:  # XLA would copy an operand whose layout it did not like
            return 2 * nbytes(call.arguments["entry"].value)
        case "selective_scan":  # B and C without padding's values, in float32
            return model.tiles * model.tile_size * 128 * 4 * 4
        case "selective_update":  # the step sizes at most, in another layout: a fraction of the rows' states
            return model.steps * model.rows * model.inner * 4 + (1 << 20)
        case "paged_attention" | "paged_attention_part":
            return max(8 * nbytes(call.arguments["x"]), 1 << 20)
        case _:
            return max(4 * nbytes(call.apart(call.arrays)[1]), 2 << 20 if "replay" in operation else 1 << 20)


def most_moved(operation, call, model):
    """Bytes to and from memory; None where nothing is known."""
    if operation == "recurrence_update":  # the states, once in and once out for each step
        return 1.1 * Values(call, classes=False).moved + (1 << 20)
    if "replay" in operation and model.rows >= 64:
        # States read once, and written once in an interval; what is valid of a tail, read; new tokens'.
        store, tail = call.arguments["store"], call.arguments["tail"]
        slot, ring = nbytes(store) // store.shape[0], nbytes(tail) // tail[0].shape[0]
        moved = model.rows * (slot * (1 + model.steps / model.interval) + ring * (1 + model.steps / model.entries))
        return 1.15 * (moved + nbytes(call.arguments["entry"], call.arguments["entry"].value))
    return None


@pytest.mark.full
@pytest.mark.parametrize("operation", ["selective_scan", "selective_update", "selective_replay", "recurrence_scan"])
def test_operations_by_xla(operation):
    """No array of all tokens' or of the tails' states: a few states of each row, or of a few tokens at a time."""
    model = dataclasses.replace(FALCON, rows=64, steps=4, tiles=16, interval=16)
    if operation == "recurrence_scan":
        model = dataclasses.replace(NEMOTRON, tiles=16)
    call = call_of(operation, model)
    stores, others = call.apart(call.arrays)
    memory = compile_for_tpu("v6e", program(call, "xla"), stores, others, donate=0).memory_analysis()
    assert memory.alias_size_in_bytes >= nbytes(stores)
    state = 4 * math.prod(model.state_shape)
    scans = {"selective_scan": model.tiles * model.tile_size / 8, "recurrence_scan": SLOTS / 4}
    tokens = scans.get(operation, (model.steps + 3) * model.rows)
    assert memory.temp_size_in_bytes < tokens * state


@pytest.mark.full
@pytest.mark.parametrize(
    ("page_size", "context", "tiles", "calls"),
    [(128, 1 << 18, 0, 1), slow(32, 1 << 18, 0, 3), slow(128, 1 << 20, 0, 3), (128, 1 << 20, 256, 1)],
)
def test_paged_attention_with_tables_of_long_contexts(page_size, context, tiles, calls):
    """64 rows: the default page size on TPU holds 262,144 tokens in one call, other sizes take more. Two rows of
    prefill, or up to 28, take one for a million tokens."""
    rows = {"rows": 2, "blocks_of_row": tiles, "q_len": 128} if tiles else {"rows": 64}
    model = dataclasses.replace(divided(ATTENDING[0], 8), page_size=page_size, context=context + 1, **rows)
    call = call_of("paged_attention", model)
    text = compile_for_tpu("v6e", program(call, "pallas_tpu"), *call.apart(call.arrays)).as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == calls


@pytest.mark.full
def test_convolution_copies_no_store():
    call = call_of("causal_conv1d_update", CONVOLUTIONS[0])
    compiled = compile_for_tpu("v5e", program(call), *call.apart(call.arrays), donate=0)
    assert compiled.memory_analysis().alias_size_in_bytes == nbytes(call.arguments["windows"])
    sizes = ",".join(map(str, call.arguments["windows"].shape))
    assert not re.findall(rf"\w+\[{sizes}\]\S* (?:copy|convert|transpose|bitcast-convert)\(", compiled.as_text())


WINDOWS = [("v5e", 890, 3, 1024, 64, BF16), ("v6e", 300, 3, 8192, 256, BF16)]
EVERY_WINDOWS = [
    (chip, 600, rows, channels, count, dtype)
    for chip in SLICES
    for rows, channels in ((3, 256), (3, 1024), (2, 2048), (1, 128), (5, 512), (8, 1024))
    for count, dtype in ((1, BF16), (48, BF16), (512, BF16), (64, F32))
]


@pytest.mark.full
@pytest.mark.parametrize(
    ("chip", "slots", "rows", "channels", "count", "dtype"), [*WINDOWS, *(slow(*each) for each in EVERY_WINDOWS)]
)
def test_only_the_named_windows_move(chip, slots, rows, channels, count, dtype):
    device = described_device(chip)
    place = SingleDeviceSharding(device)
    by_slots = Format(Layout((0, 1, 2)), place)
    store = jax.ShapeDtypeStruct((slots, rows, channels), dtype, sharding=by_slots)
    index = jax.ShapeDtypeStruct((count,), jnp.int32, sharding=place)

    def turn(store, read, write):
        found = read_windows(store, read, implementation="pallas_tpu")
        # In a tuple, as steps give it: a program that gives nothing but the store does not compile.
        return write_windows(store, jnp.roll(2 * found, 1, axis=0), write, implementation="pallas_tpu"), read + 1

    with jax.set_mesh(Mesh(np.array([device]), ("device",), axis_types=(AxisType.Auto,))):
        run = jax.jit(turn, donate_argnums=0, out_shardings=(by_slots, None))
        compiled = run.lower(store, index, index).compile()
    memory, window = compiled.memory_analysis(), nbytes(shape(rows, channels, dtype=dtype))
    assert slots * window <= memory.alias_size_in_bytes <= 2 * slots * window  # a few rows are padded
    # Read once and written once, and on the way at most a few times more, where they do not fit on the chip.
    padded = window * memory.alias_size_in_bytes / (slots * window)
    assert memory.temp_size_in_bytes <= max(4 * count * padded, 1 << 20)
    assert Traffic(compiled.as_text()).total() <= (2.1 if count <= 64 else 8) * count * padded + 1e5


# Products: nothing but the kernel touches the weights, and no wide copy of a weight is written to memory.

NARROW = [("v5e", "int8"), ("v6e", "int4"), ("tpu7x", "fp8"), ("tpu7x", "nvfp4")]


def narrow_bytes(weight):
    return weight.values.size * bits_of(weight.values.dtype) // 8


def temporaries_of_products(chip, tokens, weight, implementation):
    """Bytes that a product of tokens with one weight, or with those of experts, allocates."""
    values = weight.values if isinstance(weight, Quantized) else weight
    operation, experts = (grouped_matmul, values.shape[:1]) if len(values.shape) == 3 else (linear, ())
    run = functools.partial(operation, implementation=implementation)
    sizes = [shape(*experts, dtype=jnp.int32)] * len(experts)
    compiled = compile_for_tpu(chip, run, shape(tokens, values.shape[-1], dtype=BF16), weight, *sizes)
    assert operation is linear or "tpu_custom_call" in compiled.as_text()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(21504, 4096), (128, 1856, 2688), slow((128, 2688, 1856))])
@pytest.mark.parametrize(("chip", "form"), NARROW)
def test_quantized_weights(chip, form, sizes):
    """A dense one of Nemotron-H-8B, and experts of Nemotron-3-Nano."""
    weight, dense = published(form, *sizes), len(sizes) == 2
    implementation = "xla" if dense and "group" not in FORMS[form] else "pallas_tpu"
    most = narrow_bytes(weight) / (8 if dense else 7)
    assert temporaries_of_products(chip, 64 if dense else 384, weight, implementation) < most


@pytest.mark.full
def test_4_bit_floats_on_older_tpus():
    weight = published("nvfp4", 128, 1856, 2688)
    # The values may be copied as they are: never wide.
    assert temporaries_of_products("v6e", 384, weight, "pallas_tpu_codes") < 1.1 * narrow_bytes(weight)
    assert nbytes(weight.group_scale) < narrow_bytes(weight)


def products(name, devices):
    """The shapes [experts, outputs, inputs] of the two products of a layer on one device."""
    config = load_config(name)
    moe, layer = config.moe, f"blocks.{config.pattern.index(MOE)}.mixer.experts"
    width, partition = moe.latent_size or config.hidden_size, Partition.of(config, devices)
    sizes = {
        "up": (moe.num_experts, *([2] if moe.gated else []), moe.intermediate_size, width),
        "down": (moe.num_experts, width, moe.intermediate_size),
    }
    for which, whole in sizes.items():
        spec = partition.parameter(f"{layer}.{which}")
        axes = [*spec, *[None] * (len(whole) - len(spec))]
        experts, *outputs, inputs = (
            size // devices if axis == TENSOR else size for size, axis in zip(whole, axes, strict=True)
        )
        yield experts, functools.reduce(int.__mul__, outputs), inputs


EXPERTS = [
    ("v5e", "nemotron-3-nano-30b-a3b", 1),
    ("v6e", "nemotron-3-nano-30b-a3b", 8),
    ("tpu7x", "granite-4.0-h-small", 4),
]
EVERY_EXPERTS = itertools.product(SLICES, (name for name in PRESETS if load_config(name).moe is not None), (1, 4, 8))


@pytest.mark.full
@pytest.mark.parametrize(
    ("chip", "name", "devices"), [*EXPERTS, *(slow(*each) for each in EVERY_EXPERTS if each not in EXPERTS)]
)
@pytest.mark.parametrize("tokens", [384, slow(12288)])
def test_only_the_kernel_touches_the_weights_of_experts(chip, name, devices, tokens):
    """Of every published size, whole and divided over 4 and 8 devices."""
    for experts, outputs, inputs in products(name, devices):
        # A prompt's tokens may be brought into whole blocks, on their way in and out.
        moved = 4 * tokens * (inputs + outputs) if tokens > 384 else 0
        weight = shape(experts, outputs, inputs, dtype=BF16)
        assert temporaries_of_products(chip, tokens, weight, "pallas_tpu") < 10e6 + moved
