"""Command lines of `vllm serve` in our words, and those of published recipes up to loading the model."""

import json
import logging
import re
import shlex
import shutil
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from checkpoints.resolve import DEMO_DIRECTORY
from serving.cli.main import run, translate_arguments
from serving.cli.options import whole_number
from serving.config import ConfigError, EngineConfig
from serving.engine.llm import LLM
from serving.vllm.flags import FLAGS, engine_flags, translate


@pytest.mark.parametrize(
    ("line", "ours"),
    [
        ("m -tp 2", "m --tensor-parallel-size 2"),
        ("m -tp=2 --gpu_memory_utilization=0.5", "m --tensor-parallel-size 2 --memory-utilization 0.5"),
        ("--block-size 16 --mamba-block-size 512", "--page-size 16 --state-block-size 512"),
        ("--mamba-ssm-cache-dtype auto --mamba_ssm_cache_dtype bfloat16", "--ssm-dtype bfloat16"),
        ("--speculative-config.method ngram", "--speculative-method ngram"),
        ("--speculative-config.method ngram --speculative_config.prompt_lookup_max=3 m",
         "m --speculative-method ngram --prompt-lookup-max 3"),
        ("-sc '{\"num_speculative_tokens\": 2}'", "--num-speculative-tokens 2"),
        ("-sc '{\"method\": \"eagle3\", \"model\": \"x/y\"}'", "--speculative-method eagle3 --speculative-model x/y"),
        ("-sc '{\"model\": \"x/y\"}'", "--speculative-model x/y"),
        ("SUPER --load-format fastsafetensors --attention-backend flashinfer --kv-cache-dtype fp8 --tool-call-parser "
         "qwen3_xml --speculative-config '{\"method\":\"mtp\",\"num_speculative_tokens\":3,"
         "\"moe_backend\":\"triton\"}'",
         "SUPER --load-format auto --kv-cache-dtype fp8 --tool-call-parser qwen3_coder --speculative-method mtp "
         "--num-speculative-tokens 3"),
        ("--served-model-name a b --port 1", "--served-model-name a --served-model-name b --port 1"),
        ("--allowed-origins '[\"*\"]'", "--allowed-origins *"),
        ("--max-model-len auto --max-model-len 64K", "--max-model-len 64K"),
        ("--dtype HALF --load-format safetensors", "--dtype float16 --load-format auto"),
        ("--enable-log-requests --no-enable-log-requests", "--log-requests --no-log-requests"),
        ("--generation-config vllm --generation-config --no-generation-config",
         "--no-generation-config --generation-config --no-generation-config"),
        ("-O3 --swap-space 4 --cuda-graph-sizes 1 2 4 --enforce-eager m", "m"),
        ("--pipeline-parallel-size 1 --api-server-count 1 --no-enable-lora", "--no-enable-lora"),
        ("-dp 2", "--data-parallel-size 2"),
        ("--runner generate --task auto --convert none m", "m"),
        ("--kernel-config.enable_flashinfer_autotune false --kernel-config={} --all2all-backend x m", "m"),
        ("--no-disable-hybrid-kv-cache-manager --enable-sleep-mode --mm-encoder-tp-mode data m", "m"),
        ("--prefix-match-unit 16 --enable-mamba-shared-prefix-checkpoint -dcp 8 m", "m"),
        ("--decode-context-parallel-size 8 --dcp-comm-backend a2a m", "m"),
        ("--additional-config {} --weight-transfer-config={} m", "m"),
        ("--tool-call-parser granite4 --reasoning-parser ling3", "--tool-call-parser hermes --reasoning-parser think"),
        ("--tool-call-parser Kimi_K2 --reasoning-parser olmo3", "--tool-call-parser kimi_k2 --reasoning-parser think"),
        ("--kv-offloading-size 8 --scheduling-policy priority", "--host-cache-gib 8"),
        ("--model m -- --swap-space", "--model m -- --swap-space"),
        ("--no-such-flag x --host=h", "--no-such-flag x --host=h"),
    ],
)  # fmt: skip
def test_words(line, ours):
    assert translate(shlex.split(line)).words == shlex.split(ours)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("-pp 2", "--tensor-parallel-size only"),
        ("--speculative-config '{\"method\": \"medusa\", \"model\": \"x\"}'", "method 'medusa' is not supported"),
        ("--speculative-config '{\"method\": \"mtp\", \"model\": \"x\"}'", "unknown key 'model'; allowed: method"),
        ("--speculative-config '{\"method\": \"mtp\", \"depth\": 1}'", "unknown key 'depth'; allowed: method"),
        ("--speculative-config '{'", "not valid JSON"),
        ("--speculative-config '[]'", "must be a JSON object"),
        ("--speculative-config.method", "needs a value"),
        ("--swap-space", "--swap-space needs a value"),
        ("--runner pooling", "--runner is not supported: only text generation is served"),
        ("--task embed", "--task is not supported"),
        ("--task=classify", "--task is not supported"),
        ("--convert embed", "--convert is not supported"),
        ("--tool-call-parser inkling", "--tool-call-parser inkling: Inkling models are not supported"),
        ("--reasoning-parser=kimi_k3", "--reasoning-parser kimi_k3: Kimi K3 models are not supported"),
        ("--hf-token x", "set HF_TOKEN in the environment"),
        ("--generation-config=folder", "folders are not supported"),
        ("--allowed-origins '[1]'", "must be a JSON list of strings"),
    ],
)  # fmt: skip
def test_what_is_not_there_is_one_line(line, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        translate(shlex.split(line))


@pytest.mark.parametrize(
    ("keywords", "flags"),
    [
        ({"gpu_memory_utilization": 0.8, "trust_remote_code": True}, {"memory_utilization": "0.8"}),
        ({"tensor_parallel_size": 2, "seed": 1, "enforce_eager": False}, {"tensor_parallel_size": 2, "seed": 1}),
        ({"dtype": "half", "quantization": "modelopt", "max_model_len": -1}, {"dtype": "float16"}),
        ({"kv_cache_dtype": "fp8_e4m3", "swap_space": 4, "block_size": 8}, {"kv_cache_dtype": "fp8", "page_size": "8"}),
        (
            {"speculative_config": {"method": "mtp", "num_speculative_tokens": 2}},
            {"speculative_method": "mtp", "num_speculative_tokens": "2"},
        ),
        ({"limit_mm_per_prompt": {"image": 0}, "compilation_config": 3, "tokenizer": None}, {"tokenizer": None}),
        ({"enable_prefix_caching": False}, {"enable_prefix_caching": False}),
        ({"enable_lora": True, "max_loras": 2}, {"enable_lora": True, "max_loras": 2}),
    ],
)
def test_keywords_of_a_python_engine(keywords, flags):
    translated, _ = engine_flags(keywords)
    assert translated == flags
    EngineConfig.create(**translated)


@pytest.mark.parametrize(
    ("keywords", "said"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size is not supported"),
        ({"served_model_name": "a"}, "served_model_name is an option of `mamba-jax serve`"),
        ({"gpu_memory_utilisation": 0.5}, "unknown setting 'gpu_memory_utilisation'"),
        ({"max_model_len": "many"}, "max_model_len: must be a valid integer"),
        ({"gpu_memory_utilization": 2}, "memory_utilization: must be less than or equal to 1"),
    ],
)
def test_keywords_that_are_wrong(keywords, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        LLM("demo", **keywords)


def test_every_flag_says_what_becomes_of_it():
    for flag in FLAGS:
        assert sum(map(bool, (flag.becomes, flag.unnecessary, flag.missing))) == 1, flag.name
        assert bool(flag.becomes) == bool(flag.ours), flag.name
    names = [name for flag in FLAGS for name in (flag.name, *flag.short)]
    assert len(names) == len(set(names))


def test_flags_of_our_own_are_left_alone(caplog):
    words = ["--hf_overrides.rope_parameters.factor", "2", "m"]
    assert translate(words, own={"--hf-overrides"}).words == ["m", "--hf-overrides", '{"rope_parameters.factor": 2}']
    assert translate(["--kv-cache-dtype", "fp8"], own={"--kv-cache-dtype"}).words == ["--kv-cache-dtype", "fp8"]
    with caplog.at_level(logging.INFO, logger="serving.cli"):
        assert translate_arguments("serve", ["--page-size", "8", "--swap-space", "4"]) == ["--page-size", "8"]
    assert "--swap-space 4: has no effect: a preempted request is computed again" in caplog.text


@pytest.mark.parametrize(
    ("text", "number"), [("7", 7), ("-1", -1), ("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("1M", 1 << 20)]
)
def test_counts_as_people_write_them(text, number):
    assert whole_number(text) == number


TABLE = Path(__file__).parent / "vllm_recipes.tsv"
ROWS = [line.split("\t") for line in TABLE.read_text().splitlines() if not line.startswith("#")]

REFUSED = {
    r"--(tool-call|reasoning)-parser (inkling|kimi_k3): .* models are not supported": "families",
    r"quantization: must be .* got 'ascend'": "weights for another vendor's devices",
}
"""Errors that a recipe's command may end with, and what is missing."""


@pytest.fixture
def outcome(tmp_path, monkeypatch, capfd):
    """Runs a recipe's command with the demo model, long enough for all of them: "" if it reaches loading, else the
    error."""
    checkpoint = tmp_path / "model"
    shutil.copytree(DEMO_DIRECTORY, checkpoint)
    config = json.loads((checkpoint / "config.json").read_text())
    (checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 20}))
    begun = []
    # Drafters are not downloaded.
    monkeypatch.setattr("serving.engine.assembly.fetch.local", lambda ref, **_: ref)
    monkeypatch.setattr("serving.cli.serve.bind", mock.Mock())
    monkeypatch.setattr("serving.cli.serve._run", lambda *_, **__: begun.append(True))
    monkeypatch.setattr("serving.cli.serve._serve_together", lambda *_, **__: begun.append(True))

    def run_one(line):
        words = shlex.split(line)
        at = words.index("--model") + 1 if "--model" in words else 0
        begun.clear()
        code = run(["serve", *words[:at], str(checkpoint), *words[at + 1 :]])
        error = capfd.readouterr().err
        assert "Traceback" not in error
        assert (code, bool(begun)) in ((0, True), (2, False)), error
        return "" if code == 0 else next(text for text in error.splitlines() if text.startswith("mamba-jax: error:"))

    return run_one


@pytest.mark.parametrize(("kind", "least"), [("guide", 113), ("list", 172)])
def test_commands_reach_loading(outcome, kind, least):
    errors = Counter(outcome(line) for _, each, line in ROWS if each == kind)
    passed = errors.pop("", 0)
    assert passed >= least
    assert not [error for error in errors if not any(re.search(pattern, error) for pattern in REFUSED)]
