"""Calls at the sizes of real models, as shapes only: cases for the compilers of accelerators that are not at hand."""

import dataclasses
import itertools

import jax.numpy as jnp
import pytest
from model_shapes import ATTENTION, DELTA, MAMBA2, SELECTIVE, GatedRecurrence, Recurrence

BF16, F32 = jnp.bfloat16, jnp.float32

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
LATENTS = dataclasses.replace(ATTENTION[4], page_size=64)


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
