"""Engine flags: one clear line for each mistake, and what the modes of prefix caching come to."""

import logging

import pytest

from checkpoints.random import write_random
from mamba_jax.programs import KernelChoice
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.build import assemble, build_engine
from serving.engine.assembly.design import resolve_caching
from serving.hosts.host import facts_of
from serving.settings import read_config_file
from tests.support.engines.small_tiers import tier_mover
from tests.support.models.tiny_configs import CHECKPOINT


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"state_block_size": 200}, "state_block_size 200 is not a multiple of tile_size 128; try 256"),
        ({"page_size": 48}, "page_size 48 does not divide state_block_size 256; try 32"),
        ({"max_num_seqs": 0}, "max_num_seqs: must be greater than or equal to 1, got 0"),
        ({"data_parallel_size": 0}, "data_parallel_size: must be greater than or equal to 1, got 0"),
        ({"max_num_seqs": "many"}, "max_num_seqs: must be a valid integer"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode: must be 'none', 'align' or 'all', got 'some'"),
        ({"dtype": "int8"}, "dtype: must be 'auto', 'float32', 'bfloat16' or 'float16', got 'int8'"),
        ({"checkpoint_dtype": "int8", "ssm_dtype": "bfloat16"}, "checkpoint_dtype int8 needs ssm_dtype float32"),
        ({"max_num_seq": 3}, "unknown setting 'max_num_seq'; did you mean 'max_num_seqs'?"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens: must be less than or equal to 16, got 17"),
        ({"speculative_method": "mtp", "num_speculative_tokens": 0}, "'mtp' needs num_speculative_tokens >= 1"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 3}, "prompt_lookup_min 5 is greater than prompt_lookup_max 3"),
        ({"prompt_lookup_max": 33}, "prompt_lookup_max: must be less than or equal to 32, got 33"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min: must be greater than or equal to 1, got 0"),
        ({"grammar_timeout": 3e6}, "grammar_timeout: must be less than or equal to 86400, got 3000000.0"),
        ({"disk_cache_gib": float("inf")}, "disk_cache_gib: must be at most 1e+09, got inf"),
        ({"memory_utilization": 1.5}, "memory_utilization: must be less than or equal to 1, got 1.5"),
        ({"replay_interval": 0}, "replay_interval: must be greater than or equal to 1, got 0"),
        ({"replay_interval": 24}, "must divide tile_size (128) and be at least 2 * (1 + num_speculative_tokens) = 2"),
        ({"replay_interval": 4, "num_speculative_tokens": 3}, "= 8; allowed are 1, 8, 16, 32, 64, 128"),
        ({"replay_interval": 32, "tile_size": 16}, "allowed are 1, 2, 4, 8, 16"),
        ({"replay_interval": 2, "tile_size": 2, "num_speculative_tokens": 1}, "allowed are 1"),
        (
            {"state_block_size": 2, "tile_size": 2, "page_size": 2, "num_speculative_tokens": 2,
             "speculative_method": "ngram"},
            "state_block_size 2 is less than 1 + num_speculative_tokens = 3",
        ),
    ],
)  # fmt: skip
def test_bad_flags_are_one_clear_line(flags, said):
    with pytest.raises(ConfigError) as error:
        EngineConfig.create(**flags)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("flags", "mode", "chunked", "notice"),
    [
        ({}, "all", True, ""),
        ({"mamba_cache_mode": "none"}, "none", True, ""),
        ({"mamba_cache_mode": "align"}, "align", True, ""),
        ({"mamba_cache_mode": "align", "enable_chunked_prefill": False}, "align", True, "switched on"),
        ({"mamba_cache_mode": "all", "enable_chunked_prefill": False}, "all", False, ""),
        ({"checkpoint_dtype": "int8", "enable_chunked_prefill": False}, "all", True, "switched on: checkpoint_dtype"),
        ({"enable_prefix_caching": False}, "none", True, ""),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "none"}, "none", True, ""),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "all"}, "none", True, "no effect"),
        ({"enable_prefix_caching": False, "mamba_cache_mode": "align"}, "none", True, "no effect"),
        ({"num_speculative_tokens": 3, "speculative_method": "mtp"}, "all", True, ""),
    ],
)
def test_resolution_table(flags, mode, chunked, notice):
    policy = resolve_caching(EngineConfig.create(**flags))
    assert (policy.mode, policy.chunked_prefill) == (mode, chunked)
    assert notice in " ".join(policy.notices)
    assert bool(policy.notices) == bool(notice)


def test_defaults_of_drafts():
    assert EngineConfig.create(speculative_method="ngram").num_speculative_tokens == 3
    assert EngineConfig.create(num_speculative_tokens=2).speculative_method is None
    assert EngineConfig.create().ngram_bounds == (2, 4)
    assert EngineConfig.create(prompt_lookup_min=6).ngram_bounds == (6, 6)
    assert EngineConfig.create(prompt_lookup_max=1).ngram_bounds == (1, 1)


def test_config_files(tmp_path):
    yaml, toml = tmp_path / "a.yaml", tmp_path / "b.toml"
    yaml.write_text("max-num-seqs: 3\nmamba_cache_mode: align\n")
    toml.write_text('max-num-seqs = 3\nmamba_cache_mode = "align"\n')
    assert read_config_file(yaml) == read_config_file(toml) == {"max_num_seqs": 3, "mamba_cache_mode": "align"}
    for name, text, said in (
        ("c.toml", "a = ", "c.toml"),
        ("d.yaml", "a: [", "d.yaml"),
        ("e.yaml", "- 1", "expected a table of flags, got list"),
        ("f.ini", "", "must end in .yaml, .yml or .toml, not '.ini'"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=said.replace("[", r"\[")) as error:
            read_config_file(tmp_path / name)
        assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_config_file(tmp_path / "missing.yaml")


FLAGS = {
    "state_block_size": 16, "tile_size": 8, "page_size": 8, "num_slots": 8, "num_pages": 16, "max_num_seqs": 1,
    "compilation_cache": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return str(write_random(tmp_path_factory.mktemp("model") / "tiny", CHECKPOINT))


def identities(directory, cache, overrides):
    """The disk folder, the digest that the other side of a split compares, the programs, the facts of a host."""
    config = EngineConfig.create(model=directory, disk_cache=str(cache), hf_overrides=overrides, **FLAGS)
    built = build_engine(config, progress=False)
    loop = built.engine.loop
    facts = facts_of(config)
    folder = tier_mover(built.engine).disk.folder.path.name
    found = (folder, built.weights_digest, loop.programs.description, str(facts))
    built.engine.close()
    return found


def test_different_overrides_share_nothing(directory, tmp_path):
    plain, changed, same = (
        identities(directory, tmp_path, overrides)
        for overrides in (None, {"layer_norm_epsilon": 0.5}, '{"layer_norm_epsilon": 0.5}')
    )
    assert changed == same
    assert not set(plain) & set(changed)


def test_overrides_may_be_text():
    one, other = (EngineConfig.create(hf_overrides=each) for each in ({"a": {"b": 1}}, '{"a.b": 1}'))
    assert one == other
    for wrong in ("{", "3", 3):
        with pytest.raises(ConfigError, match=r"^hf_overrides: "):
            EngineConfig.create(hf_overrides=wrong)


def test_a_longer_context_needs_a_reason(directory):
    flags = {"model": directory, "max_model_len": 1 << 20, **FLAGS, "num_pages": None}
    limit = {"max_position_embeddings": 512}
    both_ways = r"exceeds the model's own 512 tokens.*--hf-overrides.*--allow-long-max-model-len"
    with pytest.raises(ConfigError, match=both_ways):
        build_engine(EngineConfig.create(hf_overrides=limit, **flags), progress=False)
    for given in ({"hf_overrides": {"max_position_embeddings": 1 << 20}},
                  {"hf_overrides": limit, "allow_long_max_model_len": True}):  # fmt: skip
        built = build_engine(EngineConfig.create(**flags, **given), progress=False)
        assert built.size.max_model_len == 1 << 20
        built.engine.close()


@pytest.mark.parametrize(
    ("kernels", "message"),
    [
        ("recurrence_scan=xla,update", "kernels: 'update' is not operation=implementation"),
        ("paged_attention=quick", "no implementation is called 'quick'; there are: "),
        ("recurrence_scan=pallas_gpu", "pallas_gpu cannot run this call: it runs on gpu only"),
    ],
)
def test_a_kernel_choice_that_cannot_run_is_refused(harness, kernels, message):
    with pytest.raises(ConfigError, match=message):
        assemble(EngineConfig.create(**harness.flags, kernels=kernels), harness.model)


def test_start_up_tells_how_bfloat16_weights_are_multiplied(harness, caplog, monkeypatch):
    monkeypatch.setattr(KernelChoice, "products", lambda self: "C++ products use avx2")
    with caplog.at_level(logging.INFO, logger="serving"):
        harness.engine("align")
    assert caplog.messages.count("C++ products use avx2") == 1
