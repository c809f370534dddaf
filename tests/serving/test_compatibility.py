"""Each rule of what excludes what refuses its combination in one line, and nothing else."""

import dataclasses
import re

import jax
import pytest

from kernels_pallas import native
from kernels_pallas.dispatch import KernelChoice
from mamba_jax.config.channel_recurrence import ShortConvConfig
from mamba_jax.sharding import make_mesh
from serving import compatibility
from serving.compatibility import RULES, Deployment, check
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.chosen_kernels import kernel_choice, source_of_bits
from tests.support.models.tiny_configs import FOR_ENGINES, MOE

DENSE = FOR_ENGINES["nemotronh"]
DIVIDED = {"context_parallel_size": 2}
DRAFTER = {"speculative_model": "x/y"}
HOSTS, CPU = {"several_hosts": True}, {"model": DENSE, "platform": "cpu"}
CASES = [
    ({"enable_lora": True}, HOSTS, "enable_lora does not support several hosts; use one host or merge the adapter"),
    ({"max_initial_states": 2}, HOSTS, "max_initial_states does not support several hosts"),
    ({"enable_lora": True}, {"padding": "20 heads to 24"}, "support padded heads (20 heads to 24)"),
    ({"enable_lora": True, "lora_experts": True}, CPU, "lora_experts does not support this"),
    (DRAFTER, HOSTS, "speculative_model does not support several hosts; use mtp or ngram drafts"),
    ({"data_parallel_size": 2}, HOSTS, "data_parallel_size 2 does not support several hosts"),
    ({"data_parallel_size": 2}, {"role": "prefill"}, "data_parallel_size 2 does not support --role prefill"),
    ({"data_parallel_size": 2}, {"followed": True},
     "data_parallel_size 2 does not support --split-secret or --kv-events-config"),
    (DIVIDED | {"kernels": "recurrence_scan=xla, paged_attention=xla"}, {},
     "context_parallel_size 2 does not support kernels paged_attention=xla; name paged_attention_part"),
    ({}, HOSTS | {"role": "decode"}, "--role decode does not support several hosts"),
    ({}, HOSTS | {"followed": True}, "(routers that follow it) does not support several hosts"),
    ({"host_cache_gib": 1}, HOSTS, "host_cache_gib does not support several hosts"),
    ({"enable_return_routed_experts": True}, CPU, "which has no routed experts; leave the flag out"),
    ({"enable_return_routed_experts": True},
     {"model": dataclasses.replace(DENSE, pattern="ME", mtp_pattern="", moe=MOE)},
     "which has no attention, whose pages hold the experts"),
    ({"enable_return_routed_experts": True, "disk_cache": "x"}, {}, "experts does not support disk_cache"),
    ({"enable_return_routed_experts": True}, HOSTS, "enable_return_routed_experts does not support several hosts"),
    ({"enable_return_routed_experts": True}, {"role": "decode"}, "experts does not support --role decode"),
    ({"enable_return_sampling_mask": True}, {"role": "decode"}, "sampling_mask does not support --role decode"),
]  # fmt: skip
INVARIANT_CASES = [
    ({}, {"platform": "tpu", "model": FOR_ENGINES["selective"]}, "Mamba-1 on TPU; use a CPU, with kernels auto"),
    ({"enable_lora": True}, {"platform": "gpu"}, "enable_lora on GPU; use a CPU, with kernels auto"),
    (
        {"kernels": "invariant_interpreted", "enable_lora": True},
        CPU,
        "enable_lora in the interpreter; use a CPU, with kernels auto",
    ),
    ({}, HOSTS, "several hosts; use one host"),
    ({"dtype": "float16"}, CPU, "dtype float16; use float32 or bfloat16"),
    ({"ssm_dtype": "bfloat16"}, CPU, "ssm_dtype bfloat16; use float32"),
    ({"kv_cache_dtype": "fp8"}, CPU, "kv_cache_dtype fp8; use auto"),
    ({"checkpoint_dtype": "int8"}, CPU, "checkpoint_dtype int8; use auto"),
    (DRAFTER, CPU, "speculative_model; use mtp or ngram drafts"),
    ({"kernels": "xla"}, CPU, "kernels xla; use auto"),
    ({"kernel_check": "always"}, CPU, "kernel_check always; use auto"),
    ({"enable_lora": True, "max_lora_rank": 12}, CPU, "max_lora_rank 12; use a power of two"),
    ({"replay_interval": 16}, CPU, "replay_interval 16; use 1"),
    ({"logprobs_mode": "processed_logprobs"}, CPU, "logprobs_mode processed_logprobs; use raw_logprobs"),
    ({"page_size": 256, "state_block_size": 256}, CPU, "page_size 256; use a divisor of 128"),
    ({}, CPU | {"model": FOR_ENGINES["lightning"]}, "the lightning attention of this test model"),
    ({}, CPU | {"model": FOR_ENGINES["griffin"]}, "the RG-LRU recurrence of this test model"),
    ({}, CPU | {"weight_dtypes": frozenset({"float32", "float16"})}, "weights in float16"),
]
CASES += [
    (flags | {"schedule_invariant": True}, facts, f"schedule_invariant does not support {said}")
    for flags, facts, said in INVARIANT_CASES
]


@pytest.fixture(autouse=True)
def native_operations(monkeypatch):
    """As if there were a C++ compiler."""
    monkeypatch.setattr(compatibility, "WHY_NOT_INVARIANT", None)


@pytest.mark.parametrize(("flags", "facts", "message"), CASES, ids=[case[2] for case in CASES])
def test_each_combination_is_refused_in_one_line(flags, facts, message):
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        check(Deployment(EngineConfig(**flags), **facts))
    assert "\n" not in str(error.value)


def test_every_rule_has_a_case():
    deployments = [Deployment(EngineConfig(**flags), **facts) for flags, facts, _ in CASES]
    unseen = [rule for rule in RULES if not any(rule.violation(each) for each in deployments)]
    assert [rule.excludes.text for rule in unseen] == ["installations without the C++ operations, on CPU"]


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setattr(compatibility, "WHY_NOT_INVARIANT", "not built")
    with pytest.raises(ConfigError, match=r"an installation without the C\+\+ operations \(not built\)"):
        check(Deployment(EngineConfig(schedule_invariant=True), platform="cpu"))
    check(Deployment(EngineConfig(schedule_invariant=True, kernels="invariant_interpreted"), platform="cpu"))


def test_stored_bits_name_what_compiled_them():
    device = jax.devices()[0]
    named = source_of_bits(KernelChoice(platform="gpu", device=device, named="invariant"))
    assert named.endswith(f", JAX {jax.__version__}")
    assert " ".join(device.client.platform_version.split()) in named
    meshes = None, make_mesh(1), make_mesh(2), make_mesh(4), make_mesh(2, members=2)
    one, same, *others = (source_of_bits(KernelChoice(named="invariant"), mesh) for mesh in meshes)
    assert one == same
    assert len({one, *others}) == 4


def test_what_is_supported():
    def invariant(model=DENSE, **flags):
        check(Deployment(EngineConfig(schedule_invariant=True, **flags), model, "cpu"))

    invariant()
    invariant(tensor_parallel_size=2, **DIVIDED)
    invariant(dtype="bfloat16", data_parallel_size=2, enable_lora=True, mixed_steps=True)
    invariant(dtype="float32", replay_interval=1, speculative_method="ngram", host_cache_gib=1)
    short = ShortConvConfig(channels=20, conv_width=4, bias=True)
    invariant(dataclasses.replace(DENSE, pattern=f"{short.letter}*-", mtp_pattern="", mamba=None, recurrences=(short,)))
    check(Deployment(EngineConfig(schedule_invariant=True), DENSE, "tpu"))
    for name in ("joined", "kimi", "selective"):
        invariant(FOR_ENGINES[name])
    check(Deployment(EngineConfig(dtype="float16"), DENSE, "tpu", weight_dtypes=frozenset({"float16"})))
    check(Deployment(EngineConfig(**DIVIDED, data_parallel_size=2, enable_lora=True, disk_cache="x"), DENSE, "gpu"))
    check(Deployment(EngineConfig(**DIVIDED, **DRAFTER), DENSE, "tpu", role="decode", followed=True))
    for kernels in ("pallas_gpu", "recurrence_scan=pallas_gpu,paged_attention_part=xla"):
        check(Deployment(EngineConfig(**DIVIDED, kernels=kernels), DENSE, "gpu"))


@pytest.mark.skipif(native.WHY_MISSING is not None, reason=f"native operations: {native.WHY_MISSING}")
def test_its_kernels_are_chosen_by_the_flag_only():
    assert kernel_choice(EngineConfig(schedule_invariant=True)).named == "invariant"
    rehearsal = EngineConfig(schedule_invariant=True, kernels="invariant_interpreted")
    assert kernel_choice(rehearsal).named == "invariant_interpreted"
    with pytest.raises(ConfigError, match="set schedule_invariant too"):
        kernel_choice(EngineConfig(kernels="invariant"))
