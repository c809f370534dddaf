"""The comparison of kernels with plain forms: every fault planted in a kernel is found, and a sound one passes."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints.load import Checkpoint, load_config
from kernels_pallas.dispatch import Implementation
from mamba_jax.kernel_check.calls import NAMES, Sizes, calls_of, with_kernels
from mamba_jax.kernel_check.compare import compiled_comparison, compiled_timings
from mamba_jax.kernel_check.compiling import Compiler
from mamba_jax.kernel_check.values import Values
from mamba_jax.modules.quantized import quantized_weights
from tests.support.selection import slow

SIZES = Sizes(rows=(4,), steps=(1,), tokens=(128,), context=64, page_size=16, tile_size=32, intervals=(1, 16))


@pytest.fixture(scope="module")
def calls():
    config = dataclasses.replace(load_config("demo"), pattern="M-M*-")
    return calls_of(config, "gpu", SIZES, dtype=jnp.float32)


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


@pytest.mark.full
def test_members_check_the_kernel_that_they_run():
    """Of divided pages: the values of its part, and the logarithms of the sums."""
    config = dataclasses.replace(load_config("demo"), pattern="*-", mtp_pattern="")
    found = calls_of(config, "gpu", dataclasses.replace(SIZES, members=2, intervals=(1,)), dtype=jnp.float32)
    calls = [call for call in found if "paged_attention" in call.operation]
    assert {call.operation for call in calls} == {"paged_attention_part"}
    for call, kernel in with_kernels(calls, "cpu", interpreted=True):
        assert not compiled_comparison(call, kernel, Compiler())().wrong
    assert compare(calls, "paged_attention_part", lambda out, lse, args: (out, lse[0].at[0].mul(1.1)))


@pytest.mark.full
def test_members_check_the_scan_of_their_heads():
    """A divided step scans half of the heads by itself, where an undivided one has a kernel that also convolves."""
    found = calls_of(load_config("demo"), "tpu", dataclasses.replace(SIZES, members=2), dtype=jnp.float32)
    scans = {
        (call.operation, call.arguments["store"].shape[1], call.inner)
        for call in found if call.phase == "divided prefill of 128 tokens" and "store" in call.arguments
    }  # fmt: skip
    heads = load_config("demo").mamba.num_heads
    assert scans == {("recurrence_scan", heads // 2, False)}
    assert "gated_scan" in {call.operation for call in found if call.phase == "prefill of 128 tokens"}
    for call, kernel in with_kernels([call for call in found if "divided" in call.phase], "cpu", interpreted=True):
        assert not compiled_comparison(call, kernel, Compiler())().wrong


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


# Published models on sizes that kernels take and an interpreter can run.
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 64, "vocab_size": 64}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
DELTA = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
SMALL = {
    "qwen3-next-80b-a3b": HEADS | EXPERTS | DELTA | {"shared_expert_intermediate_size": 32},
    "falcon-mamba-7b": {"hidden_size": 32, "intermediate_size": 64, "state_size": 16, "vocab_size": 64},
    "bamba-9b": HEADS | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "intermediate_size": 64},
}


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "dtype", "quantization", "types"),
    [
        ("falcon-mamba-7b", "float32", None, {"ssm_dtype": jnp.bfloat16, "tokens": ()}),
        slow("bamba-9b", "bfloat16", "int4", {}),
        slow("qwen3-next-80b-a3b", "bfloat16", "int8", {"kv_dtype": jnp.float8_e4m3fn}),
    ],
)
def test_sound_kernels_raise_no_alarm(model, dtype, quantization, types, pytestconfig):
    """Interpreted ones, with the floats of a few seeds, and of 200 with --slow."""
    seeds = range(200 if pytestconfig.option.slow else 5)
    checkpoint = Checkpoint(model, dtype=dtype, quantization=quantization, hf_overrides=SMALL[model])
    weights, sizes = quantized_weights(checkpoint.shapes()), dataclasses.replace(SIZES, **types)
    calls = calls_of(checkpoint.config, "gpu", sizes, dtype=dtype, weights=weights)
    for call, kernel in with_kernels(calls, "cpu", interpreted=True):
        compare = compiled_comparison(call, kernel, Compiler())
        wrong = {seed: why for seed in seeds if (why := compare(seed).wrong)}
        assert not wrong, (call.label, kernel, wrong)


@pytest.mark.smoke
@pytest.mark.parametrize(("quantization", "narrow"), [("int8", "int8"), ("nvfp4", "float4_e2m1fn")])
def test_weights_and_states_have_the_dtypes_of_the_engine(quantization, narrow):
    few = {"hybrid_override_pattern": "ME*", "num_hidden_layers": 3}
    checkpoint = Checkpoint("nemotron-3-nano-30b-a3b", dtype="bfloat16", quantization=quantization, hf_overrides=few)
    sizes = dataclasses.replace(SIZES, intervals=(1,), ssm_dtype=jnp.bfloat16, kv_dtype=jnp.float8_e4m3fn)
    weights = quantized_weights(checkpoint.shapes())
    found = {call.operation: call for call in calls_of(checkpoint.config, "gpu", sizes, weights=weights)}
    products = [found["quantized_linear"], found["quantized_grouped_matmul"]]
    assert {call.arguments["weight"].values.dtype.name for call in products} == {narrow}
    assert found["recurrence_update"].arguments["store"].dtype == jnp.bfloat16
    assert found["paged_attention"].arguments["kv"].dtype == jnp.float8_e4m3fn


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    ["nemotron-h-8b", "nemotron-3-nano-30b-a3b", "qwen3-next-80b-a3b", "falcon-mamba-7b", "kimi-linear-48b-a3b"],
)
@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_every_kernel_of_a_model_can_be_compared(model, platform):
    """Each call has numbers: their shapes are those of the call."""
    cases = with_kernels(calls_of(load_config(model), platform, SIZES), platform)
    assert {"decode", "prefill"} <= {call.phase.split()[0] for call, _ in cases}
    for call, _ in cases:
        assert call.operation in NAMES
        for classes in (False, True):
            made = jax.eval_shape(Values(call, classes=classes).make, 0)
            assert [(v.shape, v.dtype) for v in made] == [(v.shape, v.dtype) for v in call.arrays]
