"""Translation of each flag of `vllm serve`; docs/vllm.md has the same table.

A flag with the same name and values in both programs needs no entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from serving.config import DRAFTER_METHODS, ConfigError

Words = list[str]


class Arity(Enum):
    """Number of values of a flag."""

    NOTHING = 0
    A_VALUE = 1
    VALUES = 2


@dataclass(frozen=True)
class Flag:
    """One flag of vLLM. Exactly one of `becomes`, `unnecessary` and `missing` is set."""

    name: str
    takes: Arity
    short: tuple[str, ...] = ()
    ours: str = ""
    """This project's flags, for the table."""
    becomes: Callable[[str], Words] | None = None
    """Returns this project's flags for a value ("" if the flag has no value)."""
    off: Words | None = None
    """This project's flags for `--no-...`."""
    unnecessary: str = ""
    """Why the flag has no effect."""
    missing: str = ""
    """The unsupported feature, and the alternative."""
    harmless: tuple[str, ...] = ()
    """Values of a missing flag that have the same effect as its absence."""
    only_before: tuple[str, ...] = ()
    """This project's flag has no value; the flag is vLLM's only if one of these words follows."""


def renamed(name: str, ours: str, *short: str, values: dict[str, str] | None = None) -> Flag:
    """Returns a flag that has another name here; `values` are values that have other names here."""
    known = values or {}
    return Flag(
        name, Arity.A_VALUE, short, ours=ours, becomes=lambda value: [ours, known.get(value.lower(), value)]
    )  # fmt: skip


def repeated(name: str) -> Flag:
    """Returns a flag that takes several values in vLLM, as words or as a JSON list, and is repeatable here."""
    return Flag(name, Arity.VALUES, ours=f"`{name}` for each value", becomes=lambda value: _each(name, value))


def switch(name: str, on: str, off: str) -> Flag:
    """Returns a flag without a value that has another name here."""
    return Flag(name, Arity.NOTHING, ours=on, becomes=lambda _: [on], off=[off])


def unnecessary(name: str, why: str, takes: Arity = Arity.A_VALUE, *short: str) -> Flag:
    return Flag(name, takes, short, unnecessary=why)


def missing(name: str, why: str, *short: str, takes: Arity = Arity.A_VALUE, harmless: tuple[str, ...] = ()) -> Flag:
    return Flag(name, takes, short, missing=why, harmless=harmless)


def _each(name: str, value: str) -> Words:
    items = json_value(name, value) if value.lstrip().startswith("[") else [value]
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise ConfigError(f"{name} must be a JSON list of strings, got {value}")
    return [word for item in items for word in (name, item)]


def json_value(name: str, text: str) -> Any:
    """Returns the value of a flag in JSON.

    Raises:
        ConfigError: the text is not valid JSON.
    """
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid JSON ({error}): {text[:80]}") from None


_MTP = ("mtp", "nemotron_h_mtp", "qwen3_next_mtp", "qwen3_5_mtp", "deepseek_mtp")
_UNNECESSARY_FOR_DRAFTS = (
    "moe_backend", "attention_backend", "draft_tensor_parallel_size", "enforce_eager", "draft_sample_method",
    "rejection_sample_method",
)  # fmt: skip
"""Keys about kernels, and about how drafts are drawn: they are always the most likely tokens."""
_DRAFT_KEYS = {
    "num_speculative_tokens": "--num-speculative-tokens",
    "prompt_lookup_min": "--prompt-lookup-min",
    "prompt_lookup_max": "--prompt-lookup-max",
}


def drafts(value: str) -> Words:
    """Translates `--speculative-config`, a JSON object."""
    config = json_value("--speculative-config", value)
    if not isinstance(config, dict):
        raise ConfigError(f"--speculative-config must be a JSON object, got {value[:80]}")
    method = config.pop("method", None)
    if method in _MTP:
        words = ["--speculative-method", "mtp"]
    elif method == "ngram":
        words = ["--speculative-method", "ngram"]
    elif method in DRAFTER_METHODS:
        words = ["--speculative-method", method]
    elif method is None:
        words = []
    else:
        raise ConfigError(
            f"--speculative-config: method {method!r} is not supported; drafts come from the model's own layer (mtp), "
            f"ngram, or a drafter ({', '.join(DRAFTER_METHODS)})"
        )
    if method not in _MTP and "model" in config:
        words += ["--speculative-model", str(config.pop("model"))]
    for key, number in config.items():
        if key in _UNNECESSARY_FOR_DRAFTS:
            continue
        if key not in _DRAFT_KEYS:
            known = ", ".join(["method", *_DRAFT_KEYS])
            raise ConfigError(f"--speculative-config: unknown key {key!r}; allowed: {known}")
        words += [_DRAFT_KEYS[key], str(number)]
    return words


def _generation_config(value: str) -> Words:
    match value:
        case "auto":
            return ["--generation-config"]
        case "vllm":
            return ["--no-generation-config"]
    raise ConfigError("--generation-config must be auto (the checkpoint's) or vllm (none); folders are not supported")


def _model_length(value: str) -> Words:
    return [] if value in ("auto", "-1") else ["--max-model-len", value]


_STORED = (
    "modelopt",
    "modelopt_fp4",
    "modelopt_mixed",
    "compressed-tensors",
    "gptq",
    "gptq_marlin",
    "awq",
    "awq_marlin",
)
"""Formats of quantised checkpoints, which the server detects from config.json."""


def _quantization(value: str) -> Words:
    return [] if value in _STORED else ["--quantization", value]


_UNSUPPORTED_FAMILIES = {"inkling": "Inkling", "kimi_k3": "Kimi K3"}
"""Unsupported families by the names of their parsers."""


def parser(name: str, values: dict[str, str]) -> Flag:
    """Returns a flag that names a parser; `values` are names that differ here."""

    def becomes(value: str) -> Words:
        value = value.lower()
        if family := _UNSUPPORTED_FAMILIES.get(value):
            raise ConfigError(f"{name} {value}: {family} models are not supported; README.md lists all families")
        return [name, values.get(value, value)]

    return Flag(name, Arity.A_VALUE, ours=name, becomes=becomes)


_TEXT_ONLY = "text only"
_GENERATE_ONLY = "only text generation is served, not embeddings or classification"
_ONE_HOST = "replicas are on one host: start a server on each host, with `mamba-jax router` in front"
_BALANCE = "a server balances its own replicas, `mamba-jax router` servers"
_ALL_DEVICES = "all devices of a replica compute each sequence"
_ONE_PROGRAM = "programs are always compiled, at start-up"
_BUILT_IN = "formats are built in; no code of a checkpoint is run"
_MEMORY = "a preempted request is computed again from its tokens"
_REUSE_PLACES = "--mamba-cache-mode and --mamba-block-size set where prefixes may end"
_KERNELS = "the engine chooses the platform's kernels; --kernels overrides them"

FLAGS: tuple[Flag, ...] = (
    renamed("--tensor-parallel-size", "--tensor-parallel-size", "-tp"),
    renamed("--data-parallel-size", "--data-parallel-size", "-dp"),
    renamed("--nnodes", "--num-hosts", "-n"),
    renamed("--node-rank", "--host-id", "-r"),
    renamed("--master-addr", "--coordinator"),
    renamed("--gpu-memory-utilization", "--memory-utilization"),
    renamed("--block-size", "--page-size"),
    renamed("--mamba-block-size", "--state-block-size"),
    Flag(
        "--mamba-ssm-cache-dtype", Arity.A_VALUE, ours="--ssm-dtype",
        becomes=lambda value: [] if value == "auto" else ["--ssm-dtype", value],
    ),
    Flag(
        "--speculative-config", Arity.A_VALUE, ("-sc",),
        ours="--speculative-method, --speculative-model, --num-speculative-tokens, --prompt-lookup-min, "
        "--prompt-lookup-max",
        becomes=drafts,
    ),
    renamed("--dtype", "--dtype", values={"half": "float16", "float": "float32"}),
    Flag("--max-model-len", Arity.A_VALUE, ours="--max-model-len", becomes=_model_length),
    renamed(
        "--load-format", "--load-format",
        values=dict.fromkeys(("safetensors", "fastsafetensors", "instanttensor", "hf", "runai_streamer"), "auto"),
    ),
    renamed("--kv-cache-dtype", "--kv-cache-dtype", values={"fp8_e4m3": "fp8"}),
    Flag("--quantization", Arity.A_VALUE, ("-q",), ours="--quantization", becomes=_quantization),
    repeated("--served-model-name"),
    repeated("--lora-modules"),
    repeated("--api-key"),
    repeated("--allowed-origins"),
    repeated("--allowed-methods"),
    repeated("--allowed-headers"),
    parser(
        "--tool-call-parser",
        values={
            "granite4": "hermes", "nemotron_json": "nemotron", "nemotron_nano_v2": "nemotron",
            "qwen3_xml": "qwen3_coder", "nemotron_v3": "qwen3_coder", "glm45": "ling3", "glm47": "ling3",
        },
    ),
    parser(
        "--reasoning-parser",
        values=dict.fromkeys(
            (
                "nemotron_v3", "nano_v3", "nano_v2", "qwen3", "deepseek_r1", "deepseek_v3", "granite", "glm45",
                "kimi_k2", "ling3", "olmo3",
            ),
            "think",
        ),
    ),
    Flag(
        "--generation-config", Arity.A_VALUE, ours="--generation-config, --no-generation-config",
        becomes=_generation_config, only_before=("auto", "vllm"),
    ),
    switch("--enable-log-requests", "--log-requests", "--no-log-requests"),
    switch("--disable-log-requests", "--no-log-requests", "--log-requests"),
    unnecessary("--enable-auto-tool-choice", "calls are parsed in every request with tools", Arity.NOTHING),
    unnecessary("--tool-parser-plugin", _BUILT_IN),
    unnecessary("--tool-call-parser-plugin", _BUILT_IN),
    unnecessary("--reasoning-parser-plugin", _BUILT_IN),
    unnecessary("--trust-remote-code", "families are built in; no code of a checkpoint is run", Arity.NOTHING),
    unnecessary("--enforce-eager", _ONE_PROGRAM, Arity.NOTHING),
    unnecessary("--compilation-config", _ONE_PROGRAM, Arity.A_VALUE, "-cc"),
    unnecessary("--optimization-level", _ONE_PROGRAM, Arity.A_VALUE, "-O"),
    unnecessary("--max-seq-len-to-capture", _ONE_PROGRAM),
    unnecessary("--cuda-graph-sizes", _ONE_PROGRAM, Arity.VALUES),
    unnecessary("--cudagraph-capture-sizes", _ONE_PROGRAM, Arity.VALUES),
    unnecessary("--max-cudagraph-capture-size", _ONE_PROGRAM),
    unnecessary("--swap-space", _MEMORY),
    unnecessary("--preemption-mode", _MEMORY),
    unnecessary("--async-scheduling", "a step is dispatched before the last one's results are read", Arity.NOTHING),
    unnecessary("--calculate-kv-scales", "scales of keys and values are the checkpoint's, or 1", Arity.NOTHING),
    unnecessary("--mamba-cache-dtype", "convolution windows have the model's data type"),
    unnecessary("--attention-backend", _KERNELS),
    unnecessary("--mamba-backend", _KERNELS),
    unnecessary("--moe-backend", _KERNELS),
    unnecessary("--linear-backend", _KERNELS),
    unnecessary("--attention-config", _KERNELS),
    unnecessary("--mamba-ssu-algorithm", _KERNELS),
    unnecessary("--enable-flashinfer-autotune", _KERNELS, Arity.NOTHING),
    unnecessary("--kernel-config", _KERNELS),
    unnecessary("--disable-cascade-attn", _KERNELS, Arity.NOTHING),
    unnecessary("--additional-config", "settings of vLLM's platform plugins"),
    unnecessary("--disable-hybrid-kv-cache-manager", "states and pages have one manager", Arity.NOTHING),
    unnecessary("--enable-mamba-cache-stochastic-rounding", "states are rounded to the nearest value", Arity.NOTHING),
    unnecessary("--mamba-cache-philox-rounds", "states are rounded to the nearest value"),
    unnecessary("--enable-mamba-shared-prefix-checkpoint", _REUSE_PLACES, Arity.NOTHING),
    unnecessary("--prefix-match-unit", _REUSE_PLACES),
    unnecessary("--kv-events-config", "`mamba-jax router` reads the workers' events at /internal/events"),
    unnecessary("--weight-transfer-config", "weights are replaced over HTTP or in Python: docs/rollouts.md"),
    unnecessary("--enable-sleep-mode", "sleep and wake-up are always available", Arity.NOTHING),
    unnecessary("--scheduling-policy", "requests may have a priority; equal ones are served in order"),
    unnecessary("--stream-interval", "tokens are sent when they are ready"),
    renamed("--kv-offloading-size", "--host-cache-gib"),
    unnecessary("--kv-offloading-backend", "--host-cache-gib is built in"),
    unnecessary("--safetensors-load-strategy", "weights are read tensor by tensor, straight to their devices"),
    unnecessary("--device", "JAX uses the available accelerator; set JAX_PLATFORMS to choose another"),
    unnecessary("--distributed-executor-backend", "one process drives all local devices"),
    unnecessary("--headless", "only the first host accepts requests", Arity.NOTHING),
    unnecessary("--master-port", "hosts connect at port 8476; `--coordinator HOST:PORT` sets another"),
    unnecessary(
        "--enable-expert-parallel", "--tensor-parallel-size puts whole experts on devices where their number divides",
        Arity.NOTHING,
    ),
    unnecessary("--disable-custom-all-reduce", "sums over devices are XLA's", Arity.NOTHING),
    unnecessary("--all2all-backend", "exchanges between devices are XLA's"),
    unnecessary("--enable-eplb", "experts are divided evenly and stay where they are", Arity.NOTHING),
    unnecessary("--eplb-config", "experts are divided evenly and stay where they are"),
    unnecessary("--data-parallel-hybrid-lb", _BALANCE, Arity.NOTHING),
    unnecessary("--data-parallel-external-lb", _BALANCE, Arity.NOTHING),
    unnecessary("--data-parallel-backend", "one process drives all replicas"),
    unnecessary("--data-parallel-rpc-port", "one process drives all replicas"),
    unnecessary("--structured-outputs-config", "grammars are llguidance's"),
    unnecessary("--guided-decoding-backend", "grammars are llguidance's"),
    unnecessary("--prefix-caching-hash-algo", "prefixes are found by their tokens, not by a hash"),
    unnecessary("--tokenizer-mode", "tokenizer.json is read by the tokenizers library"),
    unnecessary("--chat-template-content-format", "lists of text parts become one text"),
    unnecessary("--limit-mm-per-prompt", _TEXT_ONLY),
    unnecessary("--language-model-only", _TEXT_ONLY, Arity.NOTHING),
    unnecessary("--mm-encoder-tp-mode", _TEXT_ONLY),
    unnecessary("--mm-encoder-attn-backend", _TEXT_ONLY),
    unnecessary("--mm-processor-cache-type", _TEXT_ONLY),
    unnecessary("--mm-processor-cache-gb", _TEXT_ONLY),
    unnecessary("--mm-processor-kwargs", _TEXT_ONLY),
    unnecessary("--media-io-kwargs", _TEXT_ONLY),
    unnecessary("--video-pruning-rate", _TEXT_ONLY),
    unnecessary("--allowed-local-media-path", _TEXT_ONLY),
    unnecessary("--skip-mm-profiling", _TEXT_ONLY, Arity.NOTHING),
    missing("--runner", _GENERATE_ONLY, harmless=("auto", "generate")),
    missing("--task", _GENERATE_ONLY, harmless=("auto", "generate")),
    missing("--convert", _GENERATE_ONLY, harmless=("auto", "none")),
    unnecessary("--disable-log-stats", "statistics are at /metrics, not in the log", Arity.NOTHING),
    unnecessary("--enable-server-load-tracking", "statistics are at /metrics", Arity.NOTHING),
    unnecessary("--enable-prompt-tokens-details", "usage always has them", Arity.NOTHING),
    unnecessary("--uvicorn-log-level", "there is one log; see --log-format"),
    unnecessary("--disable-uvicorn-access-log", "each request is logged once; see --no-log-requests", Arity.NOTHING),
    unnecessary("--disable-fastapi-docs", "/docs shows only the API's description", Arity.NOTHING),
    missing("--pipeline-parallel-size", "layers are divided by --tensor-parallel-size only", "-pp", harmless=("1",)),
    missing("--api-server-count", "one process serves HTTP", harmless=("1",)),
    unnecessary(
        "--decode-context-parallel-size", "keys and values are divided by heads; the number of devices is the same",
        Arity.A_VALUE, "-dcp",
    ),
    unnecessary("--dcp-comm-backend", "exchanges between devices are XLA's"),
    missing("--prefill-context-parallel-size", _ALL_DEVICES, "-pcp", harmless=("1",)),
    missing("--data-parallel-address", _ONE_HOST),
    missing("--data-parallel-rank", _ONE_HOST),
    missing("--data-parallel-size-local", _ONE_HOST),
    missing("--data-parallel-start-rank", _ONE_HOST),
    missing("--hf-token", "set HF_TOKEN in the environment: other users of this machine can read a command line"),
    missing("--cpu-offload-gb", "weights stay on the device; `mamba-jax plan` reports what fits", harmless=("0",)),
    missing("--kv-transfer-config", "see --role and docs/split.md"),
    missing("--enable-force-include-usage", "clients use stream_options", takes=Arity.NOTHING),
    missing("--middleware", "put a proxy in front"),
)  # fmt: skip
"""All flags, in the order of docs/vllm.md."""
