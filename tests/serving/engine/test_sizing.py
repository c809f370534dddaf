"""The store's size: what fits, what is clamped and said, and the report that explains it."""

import dataclasses
import os
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import jax.numpy as jnp
import pytest

from checkpoints import load_config
from checkpoints.load import Checkpoint
from mamba_jax.config import AttentionConfig, HybridConfig, MambaConfig
from mamba_jax.head_padding import HeadPadding
from mamba_jax.modules.feed_forward import rows_at_once
from mamba_jax.store import StoreShape, init_store, store_bytes
from serving.cli import main
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly import build, free_memory
from serving.engine.assembly.design import EngineDesign
from serving.engine.assembly.free_memory import store_memory
from serving.engine.assembly.gpu_memory import reserve_gpu_memory, share_notices, usable_share
from serving.engine.assembly.sizing import size_store
from serving.split.settings import SplitSettings

CONFIG = HybridConfig(
    family="test", vocab_size=8, hidden_size=64, pattern="MM*MM*", norm_eps=1e-5,
    mamba=MambaConfig(num_heads=8, head_dim=16, state_size=32, num_groups=2, conv_width=4),
    attention=AttentionConfig(num_heads=2, num_kv_heads=2, head_dim=16, scale=1.0, input_size=64),
)  # fmt: skip
SHAPE = StoreShape.of(CONFIG)
PURE = StoreShape.of(dataclasses.replace(CONFIG, pattern="MMMM"))
MIB = 1 << 20
FOUR = {"context_parallel_size": 4}


def size(memory=64 * MIB, shape=SHAPE, mode="all", longest=4096, most=sys.maxsize, platform="cpu", **flags):
    return size_store(
        EngineConfig.create(**flags), shape, mode=mode, dtype=jnp.float32, model_max_len=longest, memory=memory,
        most_tokens=most, platform=platform,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [SHAPE, PURE])
@pytest.mark.parametrize("mode", ["none", "align", "all"])
@pytest.mark.parametrize("memory", [4 * MIB, 16 * MIB, 200 * MIB])
def test_it_fits_and_is_used(shape, mode, memory):
    found = size(memory, shape, mode)
    assert found.total_bytes <= memory
    assert found.max_num_seqs < 64 or memory > 8 * MIB
    assert any("max_num_seqs is" in notice for notice in found.notices) == (found.max_num_seqs < 64)
    assert found.num_slots - 1 >= found.running_slots
    assert found.running_slots == found.max_num_seqs * (1 if mode == "none" else 2)
    if shape is SHAPE:
        assert (found.num_pages - 1) * found.page_size >= found.max_model_len
        assert found.pages_per_row == -(-(found.max_model_len + 2) // found.page_size)
    if mode != "none":
        assert found.total_bytes > 0.8 * memory
    elif shape is PURE:
        assert found.num_pages == 0


@pytest.mark.parametrize("memory", [4 * MIB, 16 * MIB])
def test_members_hold_as_many_times_the_tokens(memory):
    one, found = size(memory, mode="none", longest=1 << 20), size(memory, mode="none", longest=1 << 20, **FOUR)
    assert found.total_bytes <= memory
    assert found.num_pages % 4 == found.pages_per_row % 4 == 0
    assert 3.9 < found.max_model_len / one.max_model_len < 4.1
    assert any("max_model_len is" in notice for notice in one.notices)
    assert found.sequences_at(found.max_model_len) == found.sequences_at(found.max_model_len - 70) == 1
    assert "divided by position over 4 members" in found.report()
    exact = size(memory, num_pages=42, **FOUR)
    assert exact.num_pages == 4 + 44
    assert exact.tokens_in_pages == 44 * exact.page_size


def test_pages_of_members_are_rounded_up_once():
    found = size(num_pages=7, longest=1 << 20, **FOUR)
    assert (found.num_pages, found.max_model_len, found.pages_per_row) == (4 + 8, 8 * found.page_size - 2, 8)
    assert "max_model_len is 254 instead of 1,048,576: 8 pages hold no more" in found.notices
    assert size(num_pages=1, **FOUR) == size(num_pages=4, **FOUR)


@pytest.mark.parametrize(
    ("platform", "flags", "page_size"),
    [
        ("tpu", {}, 128), ("gpu", {}, 32), ("cpu", {}, 32), ("tpu", {"page_size": 64}, 64),
        ("tpu", {"state_block_size": 192, "tile_size": 64}, 64), ("cpu", {"state_block_size": 48, "tile_size": 16}, 16),
    ],
)  # fmt: skip
def test_the_default_page_size_depends_on_the_platform_and_divides_the_state_block(platform, flags, page_size):
    found, config, padding = size(platform=platform, **flags), EngineConfig.create(**flags), HeadPadding.of(CONFIG, 1)
    design = EngineDesign.of(config, padding, shards=1, platform=platform, weight_bytes=1)
    assert found.page_size == design.scheduler(found).page_size == page_size
    assert found.bytes_per_page == SHAPE.bytes_per_page(page_size, jnp.float32)


def test_the_bytes_are_those_of_the_arrays():
    """Keys and values in 8 bits and states in 16 take so much less."""
    wide = size(4 * MIB, max_num_seqs=2)
    narrow = size(4 * MIB, max_num_seqs=2, kv_cache_dtype="fp8", ssm_dtype="float16")
    assert 4 * narrow.bytes_per_page == wide.bytes_per_page
    assert narrow.bytes_per_slot < 0.6 * wide.bytes_per_slot
    for found, types in ((wide, {}), (narrow, {"kv_dtype": "float8_e4m3fn", "ssm_dtype": jnp.float16})):
        sizes = {"num_slots": found.num_slots, "num_pages": found.num_pages, "page_size": 32, "dtype": jnp.float32}
        assert store_bytes(init_store(SHAPE, **sizes, **types)) == found.total_bytes <= 4 * MIB


def test_second_sets_and_drafts_count():
    found = size(mode="none", num_speculative_tokens=3, speculative_method="mtp")
    assert found.running_slots == 4 * found.max_num_seqs
    found = size(mode="all", num_speculative_tokens=3, speculative_method="mtp")
    assert found.running_slots == 8 * found.max_num_seqs
    assert f"{found.max_num_seqs} x 8 for running sequences" in found.report()
    assert found.pages_per_row == -(-(4096 + 8) // 32)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"memory": MIB // 8}, "is too small for one sequence"),
        ({"max_model_len": 5000}, "max_model_len 5,000 exceeds the model's own 4,096 tokens"),
        ({"memory": 2 * MIB, "max_model_len": 4096}, "max_model_len 4,096 does not fit"),
        ({"num_slots": 1}, "num_slots=1 cannot hold one sequence: at least 2 are needed"),
    ],
)
def test_what_cannot_work(flags, said):
    with pytest.raises(ConfigError, match=said):
        size(**flags)


def test_given_sizes_are_kept():
    found = size(num_slots=9, num_pages=200)
    assert (found.num_slots, found.num_pages, found.max_num_seqs) == (10, 201, 4)


def test_a_small_model_takes_no_more_than_it_can_use():
    found = size(1 << 40, most=1 << 14, max_num_seqs=4)
    assert (found.num_pages - 1) * 32 <= (1 << 14) + 32
    found = size(1 << 40, mode="none", max_num_seqs=4)
    assert (found.num_pages - 1) * 32 <= 4 * (4096 + 32)


def test_the_report_says_what_a_user_asks():
    report = size().report()
    for said in ("slots:", "pages:", "tokens", "at once", "smallest reusable prefix is 256 tokens", "KiB"):
        assert said in report
    assert "no attention" in size(shape=PURE).report()
    assert "prefix reuse: off" in size(mode="none").report()


def test_weights_that_do_not_fit_are_refused_before_they_are_read(monkeypatch):
    never = Mock(side_effect=AssertionError("weights are being loaded"))
    monkeypatch.setattr(Checkpoint, "load_identified", never)
    monkeypatch.setattr(free_memory, "available_ram", lambda: 8 << 30)
    config = EngineConfig.create(model="nemotron-h-8b", load_format="dummy", dtype="bfloat16")
    with pytest.raises(ConfigError, match=r"weights need 15\.1 GiB but only 8\.0 GiB is free") as caught:
        build.build_engine(config)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("files", "free"),
    [
        ({"memory.max": "900", "memory.current": "700", "memory.stat": "anon 100\ninactive_file 500\n"}, 700),
        ({"memory.max": "max", "memory.current": "700", "memory.stat": "inactive_file 500\n"}, 4096),
        ({}, 4096),
    ],
)
def test_cached_files_of_a_container_count_as_free(files, free, monkeypatch):
    def read(path):
        if path.name not in {"meminfo", *files}:
            raise FileNotFoundError(path)
        return files.get(path.name, "MemAvailable: 4 kB")

    monkeypatch.setattr(free_memory.Path, "read_text", read)
    assert free_memory.available_ram() == free


@pytest.mark.parametrize("name", ["num_pages", "num_slots"])
def test_a_store_that_does_not_fit_is_refused_before_it_is_allocated(name):
    with pytest.raises(ConfigError, match=r"slots and pages need .* but only .* is free; lower --num-pages"):
        build.build_engine(EngineConfig.create(model="demo", **{name: 10**11}))


def test_what_is_reserved_is_left_to_others(monkeypatch):
    """A split's worker leaves as much as states in transfer may take."""
    monkeypatch.setattr(free_memory, "available_ram", lambda: 1 << 30)
    whole = free_memory.store_memory(EngineConfig.create(), workspace=MIB)
    flags = SplitSettings.create(role="decode", max_transfer_bytes=256 * MIB).engine_flags
    assert whole - free_memory.store_memory(EngineConfig.create(**flags), workspace=MIB) == 256 * MIB
    assert "reserved_bytes" not in SplitSettings.create().engine_flags
    with pytest.raises(ConfigError, match=r"1\.0 GiB are reserved"):
        free_memory.store_memory(EngineConfig.create(reserved_bytes=1 << 30), workspace=MIB)


WHOLE = 100 << 30


NEW, OLD = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"


@pytest.mark.parametrize(
    ("given", "reserved", "share"),
    [({}, {NEW: "0.93"}, 0.9 / 0.93), ({NEW: "0.5"}, {NEW: "0.5"}, 1), ({OLD: "0.5"}, {OLD: "0.5"}, 1)],
)
def test_the_command_line_reserves_what_the_engine_uses_unless_the_user_has_set_a_share(given, reserved, share):
    environment = dict(given)
    reserve_gpu_memory(0.9, environment)
    assert environment == reserved
    assert usable_share("gpu", 0.9, environment) == pytest.approx(share)
    assert share_notices("gpu", environment) == ()


@pytest.mark.parametrize(
    ("platform", "used", "environment", "share"),
    [
        ("gpu", 0.4, {NEW: "0.5"}, 0.8),
        ("gpu", 0.9, {}, 0.9),  # of what JAX takes
        ("cpu", 0.9, {NEW: "0.5"}, 0.9),
        ("tpu", 0.9, {NEW: "0.5"}, 0.9),
    ],
)
def test_the_fraction_is_of_what_jax_takes(platform, used, environment, share):
    assert usable_share(platform, used, environment) == pytest.approx(share)
    notices = " ".join(share_notices(platform, environment))
    assert ("75%" in notices and "XLA_CLIENT_MEM_FRACTION=0.9" in notices) == (platform == "gpu" and not environment)


@pytest.mark.parametrize("text", ["0", "1.5", "most"])
def test_refuses_a_share_that_is_not_a_fraction(text):
    with pytest.raises(ConfigError, match=f"XLA_CLIENT_MEM_FRACTION is '{text}'; .* number above 0 and up to 1"):
        usable_share("gpu", 0.9, {"XLA_CLIENT_MEM_FRACTION": text})


@pytest.mark.parametrize("reserved", [None, "0.93", "1"], ids=["application", "command line", "user"])
def test_the_store_fills_its_part_of_the_device(reserved, monkeypatch):
    environment = {} if reserved is None else {NEW: reserved}
    share, expected = (0.75, 0.75 * 0.9) if reserved is None else (float(reserved), 0.9)
    monkeypatch.setattr(free_memory, "usable_share", lambda platform, used: usable_share(platform, used, environment))
    weights, workspace = 30 << 30, 2 << 30
    stats = {"bytes_limit": int(share * WHOLE), "bytes_in_use": weights}
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    free = store_memory(EngineConfig(model="m"), workspace=workspace, devices=[gpu])
    assert free == pytest.approx(expected * WHOLE - weights - workspace, abs=2)


def test_a_gpu_without_memory_statistics_is_not_sized_by_the_hosts_memory():
    silent = SimpleNamespace(platform="gpu", memory_stats=lambda: None)
    with pytest.raises(ConfigError, match="does not say how much memory"):
        store_memory(EngineConfig(model="m"), workspace=0, devices=[silent])


@pytest.mark.parametrize(
    ("options", "share"), [({"memory_utilization": 0.6}, "0.63"), ({}, "0.93"), ({"memory_utilization": 0.99}, "1")]
)
def test_a_command_reserves_gpu_memory_before_it_starts(options, share, monkeypatch):
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION", raising=False)
    seen = []
    main._after_jax(lambda **_: seen.append(os.environ["XLA_CLIENT_MEM_FRACTION"]))(**options)
    monkeypatch.delenv("XLA_CLIENT_MEM_FRACTION")
    assert seen == [share]


def test_rows_of_experts_are_in_the_workspace():
    """A GPU processes those of all devices' experts at once. On a CPU, a step of two layers took 237 MiB."""
    config = EngineConfig.create(tensor_parallel_size=8, max_num_batched_tokens=2048)
    padding = HeadPadding.of(load_config("qwen3-next-80b-a3b"), 8)
    gpu, tpu = (
        EngineDesign.of(config, padding, shards=8, platform=platform, weight_bytes=1).workspace_bytes
        for platform in ("gpu", "tpu")
    )
    rows = 10 * (2048 + 64)
    assert gpu - tpu == (rows - rows_at_once(rows, 64, 512)) * (2048 + 2 * 512) * 4
    assert gpu > 237 << 20
