"""The flag `schedule_invariant` is refused where it cannot keep its promise."""

import dataclasses

import pytest

from kernels_pallas import native
from mamba_jax.config import HybridConfig, MambaConfig
from mamba_jax.config.short_conv import ShortConvConfig
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly import schedule_invariant
from serving.engine.assembly.build import kernel_choice
from serving.engine.assembly.schedule_invariant import check_schedule_invariant, check_weights_invariant
from tests.support.tiny_configs import ATTENTION, FOR_ENGINES, MLP, MOE

WHY_MISSING = native.why_incomplete()
pytestmark = pytest.mark.skipif(WHY_MISSING is not None, reason=f"native operations: {WHY_MISSING}")
MODEL = HybridConfig(
    family="test",
    vocab_size=61,
    hidden_size=20,
    pattern="M*-",
    norm_eps=1e-5,
    mamba=MambaConfig(num_heads=6, head_dim=5, state_size=7, num_groups=3, conv_width=4),
    attention=ATTENTION,
    mlp=MLP,
)


def check(model=MODEL, platform="cpu", **flags):
    check_schedule_invariant(EngineConfig(schedule_invariant=True, **flags), model, platform)


def test_supported_flags():
    check()
    check(dtype="bfloat16", data_parallel_size=2, enable_lora=True, mixed_steps=True)
    short = ShortConvConfig(channels=20, conv_width=4, bias=True)
    check(dataclasses.replace(MODEL, pattern=f"{short.letter}*-", mamba=None, recurrences=(short,)))
    check(dataclasses.replace(MODEL, pattern="ME", moe=MOE))
    for name in ("delta", "kimi", "selective"):
        check(FOR_ENGINES[name])
    check(dtype="float32", replay_interval=1, num_speculative_tokens=2, speculative_method="ngram", host_cache_gib=1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"dtype": "float16"}, "does not support dtype float16; use float32 or bfloat16"),
        ({"ssm_dtype": "bfloat16"}, "does not support ssm_dtype bfloat16; use float32"),
        ({"kv_cache_dtype": "fp8"}, "does not support kv_cache_dtype fp8; use auto"),
        ({"checkpoint_dtype": "int8"}, "does not support checkpoint_dtype int8; use auto"),
        ({"tensor_parallel_size": 2}, "does not support tensor_parallel_size 2; use 1"),
        ({"kernels": "xla"}, "does not support kernels xla; use auto"),
        ({"enable_lora": True, "max_lora_rank": 12}, "does not support max_lora_rank 12; use a power of two"),
        ({"replay_interval": 16}, "does not support replay_interval 16; use 1"),
        ({"logprobs_mode": "processed_logprobs"}, "does not support logprobs_mode processed_logprobs"),
        ({"platform": "tpu"}, "is not supported on TPU, only on CPU"),
        ({"page_size": 256, "state_block_size": 256}, "does not support page_size 256; use a divisor of 128"),
        ({"model": FOR_ENGINES["lightning"]}, "does not support the lightning attention of this test model"),
        ({"model": FOR_ENGINES["griffin"]}, "does not support the RG-LRU recurrence of this test model"),
    ],
)
def test_other_flags_are_refused(flags, message):
    with pytest.raises(ConfigError, match=f"^schedule_invariant .*{message}"):
        check(**flags)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(schedule_invariant, "WHY_NOT_INVARIANT", "not built")
    with pytest.raises(ConfigError, match="needs the C\\+\\+ operations, which are missing: not built"):
        check()


def test_other_dtypes_of_weights_are_refused():
    config = EngineConfig(schedule_invariant=True)
    check_weights_invariant(config, ["float32", "bfloat16"])
    with pytest.raises(ConfigError, match="needs float32 or bfloat16 weights, not float16"):
        check_weights_invariant(config, ["float32", "float16"])


def test_without_the_flag_everything_is_allowed():
    check_schedule_invariant(EngineConfig(dtype="float16"), MODEL, "tpu")
    check_weights_invariant(EngineConfig(), ["float16"])


def test_its_kernels_are_chosen_by_the_flag_only():
    assert kernel_choice(EngineConfig(schedule_invariant=True)).named == "invariant"
    with pytest.raises(ConfigError, match="use schedule_invariant"):
        kernel_choice(EngineConfig(kernels="invariant"))
