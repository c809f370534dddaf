"""Calls at the sizes of real models, as shapes only: cases for the compilers of accelerators that are not at hand."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import pytest
from model_calls import BF16, F32, FP8
from model_shapes import ATTENTION, DELTA, EXPERT_MLPS, MAMBA2, SELECTIVE, ExpertMLP, GatedRecurrence, Recurrence
from topology import SLICES

FULL = pytest.mark.full
NEMOTRON, NANO_9B, NANO, BAMBA, GRANITE = MAMBA2[:5]
# Lightning attention has a group for each head.
LIGHTNING = Recurrence("minimax-text-01", 64, 128, 64, 128)
OTHERS = (
    NANO_9B,
    Recurrence("nemotron-h-47b", 256, 64, 8, 256),
    Recurrence("granite-4.0-h-tiny", 48, 64, 1, 128),
    LIGHTNING,
)
NEXT, LARGE, _, OLMO, KIMI = DELTA[:5]
FALCON = SELECTIVE[0]
ATTENDING = [dataclasses.replace(model, page_size=64, context=8192) for model in ATTENTION[:3]]
LATENTS = dataclasses.replace(ATTENTION[3], page_size=64)


def divided(model, devices):
    """The part of an attention layer that one of several devices has."""
    heads = {"q_heads": model.q_heads // devices, "kv_heads": max(1, model.kv_heads // devices)}
    return dataclasses.replace(model, name=f"{model.name}/{devices}", **heads)


def unique(models):
    """Models whose calls differ: some share the sizes of their Mamba layers."""
    return list({(m.heads, m.head_dim, m.groups, m.state): m for m in reversed(models)}.values())


DIVIDED = unique([m.divided(n) for n in (1, 4, 8) for m in (NEMOTRON, NANO, BAMBA, GRANITE)])
DIVIDED_DELTA = [m.divided(n) for n in (1, 4, 8) for m in (NEXT, LARGE)] + [OLMO, OLMO.divided(2)]
DIVIDED_DELTA += [KIMI, KIMI.divided(8)]


def case(operation, model, *, chip=None, marks=(), dtype=BF16, store=F32, **sizes):
    """One case: (chip,) operation, shape, the dtypes of inputs and of states."""
    if operation in ("gated_scan", "gated_update", "gated_replay") and not model.erase:
        model = GatedRecurrence(**dataclasses.asdict(model))
    shape = dataclasses.replace(model, **{"steps": 1, "rows": 64} | sizes if hasattr(model, "steps") else sizes)
    values = (operation, shape, dtype, store)
    told = [*(f"{key}={value}" for key, value in sizes.items()), jnp.dtype(dtype).name, jnp.dtype(store).name]
    name = " ".join([*([chip] if chip else []), operation, model.name, *told])
    return pytest.param(*((chip,) if chip else ()), *values, id=name, marks=marks)


def every(operation, models, *, chips=(None,), store=(F32,), dtype=BF16, **sizes):
    """The cases of an operation with every chip, model and combination of sizes."""
    for chip, model, states, *values in itertools.product(chips, models, store, *sizes.values()):
        yield case(operation, model, chip=chip, store=states, dtype=dtype, **dict(zip(sizes, values, strict=True)))


def few_and_slow(few, everything):
    """The first list, and the cases of the second one that it does not have, as slow ones."""
    known = {one.id for one in few}
    rest = {one.id: one for one in everything if one.id not in known}
    return [*few, *(pytest.param(*one.values, id=one.id, marks=pytest.mark.slow) for one in rest.values())]


ATTENDING_DIVIDED = [divided(model, n) for model in ATTENDING for n in (1, 4, 8)]
FEW_ON_TPU = [
    case("recurrence_update", NEMOTRON, chip="v5e", rows=8, steps=4, marks=FULL),
    case("recurrence_update", BAMBA.divided(4), chip="v6e", rows=256, marks=FULL),
    case("recurrence_update", NANO.divided(8), chip="tpu7x", rows=8, steps=4, store=BF16, marks=FULL),
    case("recurrence_scan", BAMBA.divided(8), chip="v6e", tiles=1, tile_size=128, store=BF16, marks=FULL),
    case("recurrence_scan", NANO.divided(8), chip="tpu7x", tiles=16, marks=FULL),
    case("recurrence_scan", LIGHTNING.divided(8), chip="v6e", tiles=16, marks=FULL),
    case("recurrence_scan", NANO.divided(8), chip="v5e", tiles=256, marks=FULL),
    case("gated_scan", NANO.divided(8), chip="tpu7x", tiles=18, marks=FULL),
    case("recurrence_replay", NEMOTRON, chip="v5e", rows=128, steps=4, marks=FULL),
    case("recurrence_replay", NANO.divided(8), chip="tpu7x", rows=8, steps=4, interval=8, store=BF16, marks=FULL),
    case("recurrence_replay", LIGHTNING.divided(8), chip="v6e", steps=4, marks=FULL),
    case("recurrence_update", NEXT, chip="v5e", steps=4),
    case("recurrence_update", NEXT.divided(8), chip="tpu7x", rows=8, store=BF16, marks=FULL),
    case("recurrence_update", KIMI.divided(8), chip="v6e", steps=4, marks=FULL),
    case("recurrence_scan", NEXT.divided(8), chip="v5e", tiles=16, marks=FULL),
    case("recurrence_scan", LARGE.divided(8), chip="v6e", tiles=16, tile_size=64, marks=FULL),
    case("recurrence_scan", KIMI.divided(8), chip="v6e", tiles=16, marks=FULL),
    case("recurrence_replay", NEXT, chip="v5e", steps=4, marks=FULL),
    case("recurrence_replay", KIMI, chip="v5e", steps=4, marks=FULL),
    case("recurrence_replay", NEXT.divided(8), chip="tpu7x", rows=8, store=BF16, marks=FULL),
    case("selective_scan", FALCON, chip="v6e", inner=8192, tiles=16, marks=FULL),
    case("selective_update", FALCON, chip="v5e", inner=1024, steps=4, marks=FULL),
    case("paged_attention", ATTENDING[1], chip="v5e", rows=64, q_len=4, marks=FULL),
    case("paged_attention", divided(ATTENDING[0], 8), chip="v6e", rows=64, marks=FULL),
    case("paged_attention", divided(ATTENDING[1], 8), chip="tpu7x", rows=4, blocks_of_row=4, q_len=128, marks=FULL),
    case("paged_attention", ATTENDING[0], chip="v5e", rows=64, store=FP8, marks=FULL),
    case("paged_attention_part", ATTENDING[1], chip="v6e", rows=64, context=131_072, marks=FULL),
    case("paged_attention_part", ATTENDING[0], chip="v6e", rows=4, blocks_of_row=4, q_len=128, marks=FULL),
    case("paged_attention_part", ATTENDING[0], chip="v6e", rows=64, q_len=4, store=FP8, marks=FULL),
    case("paged_attention_part", ATTENDING[1], chip="v5e", rows=8, dtype=F32, marks=FULL),
]
each_slice = functools.partial(every, chips=SLICES)
EVERY_ON_TPU = [
    *each_slice("recurrence_update", DIVIDED, rows=(1, 8, 64, 256), steps=(1, 4)),
    *each_slice("recurrence_update", OTHERS, rows=(8,), steps=(1, 4)),
    *each_slice("recurrence_scan", DIVIDED, tiles=(1, 16)),
    *each_slice("recurrence_scan", OTHERS, tiles=(16,)),
    *each_slice("recurrence_scan", [NEMOTRON], tiles=(64,), tile_size=(256,)),
    # Lightning attention has no gated scan.
    *each_slice("gated_scan", [m for m in (*DIVIDED, *OTHERS) if m is not LIGHTNING], tiles=(18,), tile_size=(128,)),
    *each_slice("gated_scan", [BAMBA], tiles=(10,), tile_size=(256,)),
    *each_slice("recurrence_replay", DIVIDED, rows=(1, 64), steps=(1, 4), interval=(16, 64)),
    *each_slice("recurrence_replay", OTHERS, rows=(8,), steps=(1, 4)),
    *each_slice("recurrence_update", DIVIDED_DELTA, rows=(1, 64, 256), steps=(1, 4)),
    *each_slice("recurrence_scan", DIVIDED_DELTA, tiles=(1, 4, 16)),
    *each_slice("recurrence_replay", DIVIDED_DELTA, rows=(1, 64), steps=(1, 4)),
    *each_slice("recurrence_update", DIVIDED, store=(BF16,), steps=(4,)),
    *each_slice("recurrence_scan", DIVIDED, store=(BF16,), tiles=(16,)),
    *each_slice("recurrence_replay", DIVIDED, store=(BF16,), steps=(4,)),
    *each_slice("recurrence_update", DIVIDED_DELTA, store=(BF16,), steps=(4,)),
    *each_slice("recurrence_scan", DIVIDED_DELTA, store=(BF16,), tiles=(16,), tile_size=(64,)),
    *each_slice("recurrence_scan", [NEMOTRON.divided(8), NEXT.divided(8)], dtype=F32, rows=(8,)),
    *each_slice("recurrence_update", [NEMOTRON.divided(8)], dtype=F32, rows=(8,), steps=(4,)),
    *each_slice("selective_scan", [FALCON], store=(F32, BF16), inner=(8192, 1024, 5120, 640), tile_size=(16, 128, 512)),
    *each_slice("selective_update", [FALCON], store=(F32, BF16), inner=(8192, 1024, 5120, 640), steps=(1, 4)),
    *each_slice("paged_attention", ATTENDING_DIVIDED, rows=(1, 256), q_len=(1,)),
    *each_slice("paged_attention", ATTENDING_DIVIDED, rows=(64,), q_len=(4,)),
    *each_slice("paged_attention", ATTENDING_DIVIDED, rows=(4,), blocks_of_row=(4,), q_len=(128,)),
    *each_slice("paged_attention", ATTENDING[:1], store=(FP8,), rows=(64,)),
    *each_slice("paged_attention_part", ATTENDING_DIVIDED, rows=(64,), q_len=(1, 4)),
    *each_slice("paged_attention_part", ATTENDING_DIVIDED, rows=(4,), blocks_of_row=(4,), q_len=(128,)),
]
ON_TPU = few_and_slow(FEW_ON_TPU, EVERY_ON_TPU)

MODELS = (NEMOTRON, NANO, BAMBA, GRANITE)
ODD = dataclasses.replace(OLMO, name="3 groups of 2 heads, keys of 40", heads=6, groups=3, head_dim=24, state=40)
CHOICES = [(8, 128, 6), (8, 512, 10), (1, 128, 6), (64, 128, 6), (16, 512, 10), (8, 512, 22), (3, 72, 10), (128, 16, 2)]


def choice(tokens, experts, count):
    return case("expert_choice", ExpertMLP(f"{count} of {experts}", tokens, experts, count, 0, 0))


FEW_ON_GPU = [
    case("recurrence_update", NEMOTRON),
    case("gated_update", NANO, steps=4),
    case("recurrence_scan", NEMOTRON, tiles=16),
    case("recurrence_replay", BAMBA.divided(8), rows=8, store=BF16),
    case("gated_replay", NANO, rows=8, steps=4),
    case("recurrence_update", NEXT),
    case("recurrence_update", KIMI, steps=4),
    case("gated_update", NEXT),
    case("gated_update", KIMI, steps=4),
    case("gated_update", OLMO, rows=8),
    case("recurrence_scan", NEXT, tiles=16),
    case("recurrence_scan", OLMO, tiles=4, tile_size=64, store=BF16),
    case("recurrence_scan", KIMI, tiles=16),
    case("recurrence_replay", KIMI, steps=4),
    case("gated_replay", NEXT),
    *every("selective_update", [FALCON], inner=(8192,), steps=(1, 4)),
    *every("selective_scan", [FALCON], inner=(8192,), tiles=(16,)),
    case("paged_attention", ATTENDING[1], rows=64, q_len=4),
    case("paged_attention", ATTENDING[0], rows=4, blocks_of_row=4, q_len=128),
    *every("paged_attention", [LATENTS], rows=(64,), context=(262_144,), page_size=(32, 64)),
    *every("paged_attention", [LATENTS], rows=(2,), blocks_of_row=(9,), q_len=(128,), context=(262_144,)),
    # Heads of Zamba2-7B, which are seven pieces of 32, and keys in 8 bits, which the kernel widens.
    case("paged_attention", ATTENDING[1], rows=64, head_dim=224),
    case("paged_attention", ATTENDING[1], rows=64, store=FP8),
    case("paged_attention", ATTENDING[1], rows=64, head_dim=192, store=FP8),
    case("paged_attention_part", ATTENDING[1], rows=64, context=131_072),
    case("paged_attention_part", ATTENDING[0], rows=4, blocks_of_row=4, q_len=128),
    choice(*CHOICES[0]),
    *(
        case("expert_mlp", mlp)
        for mlp in EXPERT_MLPS
        if mlp.name in ("nemotron-3-nano, 8 rows", "qwen3-next-80b-a3b, 8 rows")
    ),
]
EVERY_ON_GPU = [
    *every("recurrence_update", [NANO, *OTHERS], steps=(4,)),
    *every("gated_update", [NEMOTRON, *OTHERS], steps=(4,)),
    *every("recurrence_scan", [NANO, *OTHERS], tiles=(16,)),
    *every("recurrence_replay", [*MODELS, *OTHERS], rows=(64, 128), steps=(1, 4)),
    *every("gated_replay", [*MODELS, *OTHERS], steps=(1, 4)),
    *every("recurrence_update", [LARGE, ODD], rows=(8,), steps=(4,)),
    *every("recurrence_update", DIVIDED_DELTA, rows=(1, 64, 256), steps=(1, 4)),
    *every("recurrence_update", DIVIDED_DELTA, store=(BF16,), steps=(4,)),
    *every("gated_update", DIVIDED_DELTA, steps=(1, 4)),
    *every("recurrence_scan", DIVIDED_DELTA, tiles=(1, 16)),
    *every("recurrence_scan", DIVIDED_DELTA, store=(BF16,), tiles=(16,), tile_size=(64,)),
    case("recurrence_scan", NEXT, tiles=16, dtype=F32),
    *every("recurrence_replay", DIVIDED_DELTA, rows=(1, 64), steps=(1, 4)),
    *every("gated_replay", DIVIDED_DELTA, steps=(1, 4)),
    *every("selective_update", [FALCON], store=(F32, BF16), inner=(8192, 5120, 1024), steps=(1, 4)),
    *every("selective_scan", [FALCON], store=(F32, BF16), inner=(8192, 5120, 1024), tiles=(16,)),
    *every("paged_attention", ATTENDING, rows=(1, 64), q_len=(1,)),
    *every("paged_attention", ATTENDING, rows=(256,), q_len=(4,)),
    *every("paged_attention", ATTENDING, rows=(4,), blocks_of_row=(4,), q_len=(128,)),
    *every("paged_attention", [LATENTS], rows=(1, 64), q_len=(1, 4), context=(262_144,)),
    *every("paged_attention", [LATENTS], q_heads=(4, 64), rows=(64,), context=(262_144,)),
    *every("paged_attention", [LATENTS], store=(FP8,), rows=(64,), context=(262_144,)),
    *every("paged_attention_part", ATTENDING, rows=(1, 64), q_len=(1, 4)),
    *every("paged_attention_part", [LATENTS], rows=(64,), q_len=(1,), context=(262_144,)),
    *(choice(*sizes) for sizes in CHOICES),
    *(case("expert_mlp", mlp, store=narrow) for mlp in EXPERT_MLPS for narrow in (F32, jnp.int8, FP8)),
]
ON_GPU = few_and_slow(FEW_ON_GPU, EVERY_ON_GPU)
