"""The comparison of kernels with plain forms: every fault planted in a kernel is found, and a sound one passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import load_config
from kernels_pallas.dispatch import Implementation
from mamba_jax.kernel_check.calls import NAMES, Sizes, calls_of, with_kernels
from mamba_jax.kernel_check.compare import compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler

SIZES = Sizes(rows=(4,), steps=(1,), tokens=(128,), context=64, page_size=16, tile_size=32, intervals=(1, 16))


@pytest.fixture(scope="module")
def calls():
    return calls_of(load_config("demo"), "gpu", SIZES, dtype=jnp.float32)


def compare(calls, operation, change):
    """Compares the plain form, changed by `change(y, store, arguments)`, with itself."""
    call = next(each for each in calls if each.operation == operation)
    plain = call.candidates[-1]

    def run(*args, **kwargs):
        y, *stores = plain.run(*args, **kwargs)
        return change(y, stores, args)

    call = dataclasses.replace(call, candidates=(Implementation("planted", run), plain))
    return compiled_comparison(call, "planted", Compiler())().wrong


def added(row):
    """A wrong y of one row, and only there."""
    return lambda y, stores, args: (y.at[row].mul(1.01), *stores)


def null_slot(y, stores, args):
    """The fresh row begins with what the null slot holds."""
    return y.at[0].add(args[1][0].sum()), *stores


def neighbor(y, stores, args):
    """A slot that belongs to no row is written."""
    return y, stores[0].at[-2].add(1), *stores[1:]


def differing(y, stores, args):
    noise = jax.pure_callback(
        lambda: np.float32(1e-7 * next(COUNT)), jax.ShapeDtypeStruct((), jnp.float32), vmap_method="sequential"
    )
    return y.at[0].add(noise), *stores


COUNT = iter(range(1, 1000))
UPDATE = "recurrence_update"


@pytest.mark.parametrize(
    ("operation", "change", "found"),
    [
        (UPDATE, lambda y, stores, args: (y, *stores), ""),
        ("recurrence_scan", lambda y, stores, args: (y, *stores), ""),
        ("recurrence_replay", lambda y, stores, args: (y, *stores), ""),
        (UPDATE, added(0), "its result"),
        (UPDATE, added(1), "its result"),
        (UPDATE, added(2), "its result"),
        ("recurrence_scan", added(0), "its result"),
        ("recurrence_replay", added(2), "its result"),
        (UPDATE, null_slot, "its result has nan"),
        (UPDATE, lambda y, stores, args: (y, stores[0].at[1].mul(1.02)), "its states"),
        (UPDATE, neighbor, "it changes a slot that is not its row's"),
        (UPDATE, differing, "two runs differ"),
    ],
    ids=["sound update", "sound scan", "sound replay", "fresh row", "shared slot", "strong decay", "first tile",
         "replayed row", "null slot", "state", "neighbor", "runs differ"],
)  # fmt: skip
def test_planted_faults_are_found(calls, operation, change, found):
    wrong = compare(calls, operation, change)
    assert found in wrong
    assert bool(wrong) == bool(found)


def test_kernels_that_cannot_be_compiled_are_not_hidden(calls):
    def change(y, stores, args):
        raise NotImplementedError("no such block")

    with pytest.raises(NotImplementedError, match="no such block"):
        compare(calls, UPDATE, change)


def test_loops_are_timed(calls):
    for operation in (UPDATE, "paged_attention"):
        call = next(each for each in calls if each.operation == operation)
        found = compiled_timings(call, call.plain, Compiler(), seconds=1e-6, bandwidth=1e9, most=2)[call.plain]
        assert found.seconds(1) > 0
        assert found.moved > 0


@pytest.mark.full
@pytest.mark.smoke("model")
@pytest.mark.parametrize(
    "model",
    ["nemotron-h-8b", "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "falcon-mamba-7b", "kimi-linear-48b-a3b"],
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_kernel_of_a_model_can_be_compared(model, platform):
    """Each call has numbers: their shapes are those of the call."""
    from mamba_jax.kernel_check.values import values_of

    cases = with_kernels(calls_of(load_config(model), platform, SIZES), platform)
    assert {"decode", "prefill"} <= {call.phase.split()[0] for call, _ in cases}
    for call, _ in cases:
        assert call.operation in NAMES
        for classes in (False, True):
            made = jax.eval_shape(values_of(call, classes=classes).make)
            assert [(v.shape, v.dtype) for v in made] == [(v.shape, v.dtype) for v in call.arrays]
