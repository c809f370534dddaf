"""Every flag of the engine, defined once: for Python keywords, command-line options and configuration files."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import Field, model_validator

from checkpoints.json_file import parse_overrides
from serving.core.config import CacheMode, check_sizes
from serving.core.errors import ConfigError
from serving.settings import Settings

__all__ = ["CacheMode", "ConfigError", "EngineConfig"]

SpeculativeMethod = Literal["mtp", "ngram", "eagle3", "dflash", "dspark"]
DRAFTER_METHODS = ("eagle3", "dflash", "dspark")
"""Methods whose drafts come from a separate checkpoint, `speculative_model`."""

DEFAULT_DRAFTS = 3
_LOOKUP = (2, 4)


class EngineConfig(Settings):
    """The engine's flags. Use `EngineConfig.create`, which reports invalid flags in one line."""

    COMMON = (
        "model", "revision", "tokenizer", "dtype", "quantization", "kv_cache_dtype", "max_model_len", "max_num_seqs",
        "enable_prefix_caching", "speculative_method", "num_speculative_tokens", "tensor_parallel_size",
        "memory_utilization",
    )  # fmt: skip

    model: str = "demo"
    """A Hugging Face directory, an Orbax directory, 'demo', or a hub's name as in org/name."""
    revision: str | None = None
    """Branch, tag or commit of a model that comes from a hub. Unset: its main branch."""
    download_dir: str | None = None
    """Where models from a hub are kept. Unset: the usual cache (HF_HOME)."""
    tokenizer: str | None = None
    """A directory, or a hub's name, whose tokenizer to use. Unset: the model's own."""
    chat_template: str | None = None
    """A chat template instead of the checkpoint's: a file, or the template itself."""
    hf_overrides: dict[str, Any] | None = None
    """Fields that replace those of the model's config.json: a JSON object such as {"rope_parameters": {"rope_type":
    "yarn", "factor": 4}}. Nested objects are merged; a dotted key such as rope_parameters.factor names a nested
    field."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of weights and activations. auto: the checkpoint's on accelerators, float32 on CPU."""
    ssm_dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Data type of stored recurrent states. 16 bits halve their memory but lose some accuracy, and answers may then
    depend a little on what was reused."""
    checkpoint_dtype: Literal["auto", "float16", "bfloat16", "int8"] = "auto"
    """Data type of recurrent states in host_cache_gib and disk_cache. int8 has a scale for each head and channel. auto:
    ssm_dtype. Running sequences are rounded likewise at every state_block_size tokens, so answers do not depend on what
    was reused."""
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Data type of cached keys and values. auto: that of activations. fp8: float8_e4m3fn, divided by the checkpoint's
    scales where it has them."""
    load_format: Literal["auto", "dummy"] = "auto"
    """auto: read the checkpoint's weights. dummy: random weights of the checkpoint's shapes; no weight file is read."""
    quantization: Literal["int8", "fp8", "int4", "nvfp4"] | None = None
    """Quantize the weights of a wide checkpoint while they are read. Unset: weights as the checkpoint has them,
    quantized ones included."""
    quantization_exclude: str | None = None
    """With quantization: modules to leave wide, by name with wildcards, separated by commas. The embedding and the head
    are always left wide."""
    max_model_len: int | None = Field(None, ge=2)
    """Maximum length of a sequence, prompt plus output, in tokens. Unset: the model's own limit."""
    allow_long_max_model_len: bool = False
    """Allow max_model_len beyond the model's own limit. Outputs past that limit may be poor; hf_overrides with rope
    scaling extends the limit properly."""
    max_num_seqs: int = Field(64, ge=1)
    """Maximum number of sequences that run at once."""
    max_num_batched_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens processed in one step. Unset: 2048; up to 8192 on TPU and GPU for models with experts,
    so that reading them takes no longer than multiplying."""
    max_num_waiting: int | None = Field(None, ge=1)
    """Maximum number of waiting requests; further ones are refused. Unset: no limit; 4096 in `serve`."""
    max_decode_pause: float | None = Field(None, gt=0)
    """Maximum time in seconds that running requests pause while a step prefills others; prefill chunks shrink to keep
    to it, down to one tile. Unset: no limit; 0.2 in `serve`."""
    enable_chunked_prefill: bool = True
    """Split long prompts over several steps."""
    enable_prefix_caching: bool = True
    """Reuse the state of prefixes that prompts share."""
    mamba_cache_mode: CacheMode | None = None
    """Which recurrent states to keep for reuse: none, align (those at the ends of prefill chunks) or all (one per state
    block). Unset: all if prefix caching is on."""
    page_size: int | None = Field(None, ge=1)
    """Tokens per page of keys and values. Must divide the state block size. Unset: 128 on TPU and 32 elsewhere, or the
    largest divisor of the state block size that divides it."""
    state_block_size: int = Field(256, ge=1)
    """Tokens between two cached states. Must be a multiple of the tile size and of the page size."""
    tile_size: int = Field(128, ge=1)
    """Tokens per tile of the prefill scan."""
    replay_interval: int | None = Field(None, ge=1)
    """Tokens between two states that a decoding sequence writes (R); in between, a step replays the inputs since the
    last one. More than 1 saves memory and its bandwidth, most of all with draft tokens. Must divide the tile size and
    be at least 2 * (1 + num_speculative_tokens). 1: a state for each token. Unset: chosen by platform, model,
    max_num_seqs and drafts, and said at start-up."""
    speculative_method: SpeculativeMethod | None = None
    """Where draft tokens come from: mtp (the model's multi-token-prediction layer), ngram (what followed the same
    tokens earlier in the sequence), or speculative_model, a drafter: eagle3, dflash or dspark. Unset with
    num_speculative_tokens set: the kind of speculative_model, or mtp if the model has it."""
    speculative_model: str | None = None
    """A drafter for the model: a directory, or a hub's name. It reads hidden states of some of the model's layers."""
    num_speculative_tokens: int = Field(0, ge=0, le=16)
    """Draft tokens per step (K). Unset with speculative_method or speculative_model set: 3."""
    adaptive_drafts: bool = True
    """Draft fewer tokens, or none, where too few are accepted to be worth verifying. --no-adaptive-drafts: always
    num_speculative_tokens. Outputs are the same either way."""
    keep_draft_kv: bool = False
    """Store the keys and values of the model's draft layer even though nothing is drafted here. Prefill workers do so,
    for the decode workers that continue from their states."""
    prompt_lookup_min: int | None = Field(None, ge=1)
    """ngram: shortest run of last tokens to look up. Unset: 2."""
    prompt_lookup_max: int | None = Field(None, ge=1, le=32)
    """ngram: longest run of last tokens to look up. Unset: 4."""
    tensor_parallel_size: int = Field(1, ge=1)
    """Number of devices that each layer is divided over."""
    context_parallel_size: int = Field(1, ge=1)
    """Number of members that keys and values are divided over by position, each of tensor_parallel_size devices with
    all of the weights. Sequences may have that many times the tokens, decoding reads them by as many devices, and
    prefill steps are divided by tokens; see docs/several-devices.md."""
    data_parallel_size: int = Field(1, ge=1)
    """Number of replicas: engines with all of the weights that share the requests, each on tensor_parallel_size devices
    of its own. Limits such as max_num_seqs and max_num_waiting are one replica's."""
    kernels: str = "auto"
    """Kernel implementation of each operation. auto: this platform's kernels, or plain XLA where one cannot run. xla:
    no kernels. Or by operation, as in recurrence_scan=xla,gated_update=pallas_gpu; it is an error if an implementation
    named here cannot run."""
    kernel_check: Literal["auto", "always", "off"] = "auto"
    """Compare kernels with plain JAX in another process before this one starts JAX; wrong ones are not used. auto: once
    on a machine with an accelerator; always: at each start."""
    schedule_invariant: bool = False
    """Make the bits of log-probabilities independent of the schedule (batch, chunks, cache, drafts). In float32 or
    bfloat16; each shape of the mesh has its own bits. See docs/reproducibility.md."""
    enable_return_routed_experts: bool = False
    """Record the experts of each token, and return them as routed_experts of an output. Needs a model with experts and
    attention; not with tiers, a split or several hosts."""
    max_logprobs: int = Field(20, ge=0, le=1024)
    """Maximum number of alternatives in log-probabilities of a token."""
    enable_return_sampling_mask: bool = False
    """Allow return_sampling_mask in requests: sampling_mask of an output is the tokens that each token could have been,
    one bit for each of the vocabulary. Not with a split."""
    memory_utilization: float = Field(0.9, gt=0, le=1)
    """Fraction of the whole device's memory for weights, states and pages."""
    reserved_bytes: int = Field(0, ge=0)
    """Device memory (bytes) to leave free. Workers of a split: as many as states in transfer may take
    (`--max-transfer-bytes`)."""
    num_slots: int | None = Field(None, ge=1)
    """Number of state slots. Unset: as many as fit in memory."""
    num_pages: int | None = Field(None, ge=1)
    """Number of key and value pages. Unset: as many as fit in memory."""
    host_cache_gib: float | None = Field(None, gt=0)
    """GiB of the host's memory for states and pages that no longer fit on the device; replicas share them. Unset:
    none."""
    disk_cache: str | None = None
    """Folder for states and pages that outlast this process; replicas share it. Unset: none."""
    disk_cache_gib: float = Field(16.0, gt=0)
    """GiB that disk_cache may hold."""
    enable_lora: bool = False
    """Let each request use a LoRA adapter of its own: its name is the `model` of an HTTP request, and
    `LLM.generate(..., lora_request=...)` takes one."""
    max_loras: int = Field(4, ge=1, le=256)
    """With enable_lora: maximum number of adapters on the device."""
    max_lora_rank: int = Field(16, ge=1, le=512)
    """With enable_lora: maximum rank of an adapter. Lower ranks are padded to it."""
    lora_experts: bool = False
    """With enable_lora: accept adapters of routed experts, too. Memory for max_loras adapters of all experts is
    allocated."""
    enable_dora: bool = False
    """With enable_lora: accept adapters with magnitudes (DoRA), too."""
    lora_tables: bool = False
    """With enable_lora: accept adapters with an embedding or head of their own (modules_to_save), too. Memory for
    max_loras embeddings and heads is allocated."""
    max_initial_states: int = Field(0, ge=0, le=65_536)
    """Maximum number of learned initial states (adapters with initial_state.safetensors) on the device at once. Each
    takes one state slot."""
    enable_structured_outputs: bool = False
    """Support outputs constrained by a JSON schema, regex or grammar. On by default in `serve` and `LLM`."""
    grammar_timeout: float = Field(10.0, gt=0, le=86_400)
    """CPU seconds that compiling one grammar may take; grammars that take longer are refused."""
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] = "raw_logprobs"
    """Log-probabilities of output tokens. raw_logprobs: the model's own. processed_logprobs: of the distribution that
    tokens are drawn from, after masks, biases, penalties, temperature, min_p, top_k and top_p."""
    seed: int = 0
    """Seed of requests that set none, and of dummy weights."""
    warmup: bool | None = None
    """Compile every step program at start-up rather than when first needed. Unset: at start-up on accelerators, when
    first needed on CPU."""
    mixed_steps: bool | None = None
    """Compute a step's decode and prefill rows in one program, which reads the weights once. Unset: on accelerators."""
    compilation_cache: bool = True
    """Cache compiled programs on disk for the next start."""
    debug_state: bool = False
    """Debugging: tag state slots and check every read, on the device."""

    @model_validator(mode="before")
    @classmethod
    def _prepare(cls, flags: Any) -> Any:
        if not isinstance(flags, dict):
            return flags
        if flags.get("hf_overrides") is not None:
            flags = flags | {"hf_overrides": parse_overrides(flags["hf_overrides"])}
        drafting = any(flags.get(name) is not None for name in ("speculative_method", "speculative_model"))
        return {"num_speculative_tokens": DEFAULT_DRAFTS} | flags if drafting else flags

    def kv_dtype(self, dtype: Any) -> Any:
        """Returns the data type of cached keys and values if activations have `dtype`."""
        return "float8_e4m3fn" if self.kv_cache_dtype == "fp8" else dtype

    def page_size_on(self, platform: str) -> int:
        """Returns the tokens per page on a platform; the default also divides `state_block_size`.

        The attention kernel on TPU keeps page tables in scalar memory, which is small.
        """
        return self.page_size or math.gcd(128 if platform == "tpu" else 32, self.state_block_size)

    def mixes_steps_on(self, platform: str) -> bool:
        """Returns whether decode and prefill rows run in one program. On a CPU two programs waste less padding."""
        return platform != "cpu" if self.mixed_steps is None else self.mixed_steps

    @property
    def narrows_states(self) -> bool:
        """Whether states in tiers are narrower than those of running rows, which are rounded likewise."""
        return self.checkpoint_dtype not in ("auto", self.ssm_dtype)

    @property
    def excluded_from_quantization(self) -> tuple[str, ...]:
        """The names in `quantization_exclude`."""
        return tuple(name.strip() for name in (self.quantization_exclude or "").split(",") if name.strip())

    @property
    def adapter_flag(self) -> str:
        """The flag that lets requests have adapters (LoRA matrices, learned initial states, or both); empty if they
        cannot."""
        return "enable_lora" if self.enable_lora else "max_initial_states" if self.max_initial_states else ""

    @property
    def ngram_bounds(self) -> tuple[int, int]:
        """The shortest and the longest run of tokens that `ngram` looks up. A value set for one may change the other's
        default."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        most = high if high is not None else max(_LOOKUP[1], low or 0)
        return low if low is not None else min(_LOOKUP[0], most), most

    @model_validator(mode="after")
    def _sizes_fit(self) -> EngineConfig:
        drafts = self.num_speculative_tokens
        check_sizes(
            self.state_block_size,
            tile_size=self.tile_size,
            page_size=self.page_size,
            num_speculative_tokens=drafts,
            replay_interval=self.replay_interval or 1,
        )
        if self.narrows_states and self.ssm_dtype != "float32":
            raise ValueError(
                f"checkpoint_dtype {self.checkpoint_dtype} needs ssm_dtype float32: states in {self.ssm_dtype} are "
                "rounded after every token; use checkpoint_dtype auto"
            )
        if self.ngram_bounds[0] > self.ngram_bounds[1]:
            raise ValueError("prompt_lookup_min {} is greater than prompt_lookup_max {}".format(*self.ngram_bounds))
        if self.speculative_method is not None and not drafts:
            raise ValueError(f"speculative_method {self.speculative_method!r} needs num_speculative_tokens >= 1")
        if self.speculative_model is not None and self.speculative_method not in (None, *DRAFTER_METHODS):
            raise ValueError(
                f"speculative_model has no effect with speculative_method {self.speculative_method!r}; "
                f"use {' or '.join(DRAFTER_METHODS)}"
            )
        return self
