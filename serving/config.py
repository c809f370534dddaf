"""Every flag of the engine, defined once: for Python keywords, command-line options and configuration files."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from serving.core import CacheMode, ConfigError

__all__ = ["CacheMode", "CachePolicy", "ConfigError", "EngineConfig", "read_config_file", "resolve_cache_policy"]

SpeculativeMethod = Literal["mtp", "ngram"]

DEFAULT_DRAFTS = 3
_LOOKUP = (2, 4)


class EngineConfig(BaseModel):
    """What the engine is told. `EngineConfig.create` is the way to make one: its errors are one clear line.

    The field order is the order of the command line's help; a field's description is its help text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model: str = Field("demo", description="A Hugging Face directory, an Orbax directory, or 'demo'.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. auto: the checkpoint's on accelerators, float32 on CPU."
    )
    ssm_dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="Stored recurrent states. bfloat16 halves their memory at some cost in accuracy."
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="dummy: random weights for the checkpoint's config; no weight file is read."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest sequence, prompt and output together. Unset: the model's own limit."
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences that run at once, at most.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens fed to the model in one step, at most.")
    max_num_waiting: int | None = Field(None, ge=1, description="Requests that may wait; more are refused.")
    enable_chunked_prefill: bool = Field(True, description="Long prompts are computed over several steps.")
    enable_prefix_caching: bool = Field(True, description="Reuse the state of prompts' shared beginnings.")
    mamba_cache_mode: CacheMode | None = Field(
        None,
        description="Which recurrent states are kept for reuse: none, align (where prefill chunks end) or "
        "all (every state block). Unset: all where prefix caching is on.",
    )
    page_size: int = Field(32, ge=1, description="Tokens in a page of keys and values. Divides the state block size.")
    state_block_size: int = Field(
        256, ge=1, description="Tokens between two kept states. A multiple of the tile size and of the page size."
    )
    tile_size: int = Field(128, ge=1, description="Tokens that one tile of the prefill scan holds.")
    speculative_method: SpeculativeMethod | None = Field(
        None,
        description="Where draft tokens come from: mtp (the model's own multi-token-prediction layer) or ngram (what "
        "followed the same tokens before). Unset, with num_speculative_tokens: mtp where the model has it.",
    )
    num_speculative_tokens: int = Field(
        0, ge=0, le=16, description="Draft tokens in a step (K). Unset, with speculative_method: 3."
    )
    adaptive_drafts: bool = Field(
        True,
        description="Draft fewer tokens, or none, where too few of them turn out right for what verifying them costs. "
        "--no-adaptive-drafts: always num_speculative_tokens. Outputs do not depend on it.",
    )
    keep_draft_kv: bool = Field(
        False,
        description="Keep the keys and values of the model's own draft layer though nothing is drafted here: a prefill "
        "worker does, for those that go on from its states.",
    )
    prompt_lookup_min: int | None = Field(
        None, ge=1, description="ngram: the fewest last tokens that must have occurred before. Unset: 2."
    )
    prompt_lookup_max: int | None = Field(
        None, ge=1, le=32, description="ngram: the most last tokens that are looked up. Unset: 4."
    )
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that share each layer.")
    kernels: str = Field(
        "auto",
        description="What operations run by. auto: this platform's kernels, plain XLA where one cannot run. 'xla': no "
        "kernels. Or by operation, as in ssd_scan=xla,state_update=pallas_tpu; a named one must be able to run.",
    )
    memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory that weights, states and pages may take."
    )
    num_slots: int | None = Field(None, ge=1, description="State slots. Unset: as many as the memory holds.")
    num_pages: int | None = Field(None, ge=1, description="Key and value pages. Unset: as many as the memory holds.")
    enable_structured_outputs: bool = Field(
        False, description="Make room for outputs of a given form (JSON schema, regex, grammar). `serve` does."
    )
    seed: int = Field(0, description="Seed of requests that have none of their own, and of dummy weights.")
    warmup: bool | None = Field(
        None,
        description="Compile every step program at start-up, or each when first needed. Unset: at start-up on "
        "accelerators, when first needed on CPU.",
    )
    compilation_cache: bool = Field(True, description="Keep compiled programs on disk for the next start.")
    debug_state: bool = Field(False, description="Tag state slots and check every read, on the device.")

    @classmethod
    def create(cls, **flags: Any) -> EngineConfig:
        """A validated configuration; flags that are None count as not given.

        Raises:
            ConfigError: an unknown flag or a bad value.
        """
        for name in flags:
            if name not in cls.model_fields:
                near = difflib.get_close_matches(name, cls.model_fields, n=1)
                raise ConfigError(f"unknown engine flag {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
        try:
            return cls(**{name: value for name, value in flags.items() if value is not None})
        except ValidationError as error:
            raise ConfigError("; ".join(_explain(cls, detail) for detail in error.errors())) from None

    @model_validator(mode="before")
    @classmethod
    def _fill_in_drafts(cls, flags: Any) -> Any:
        if isinstance(flags, dict) and flags.get("speculative_method") is not None:
            flags = {"num_speculative_tokens": DEFAULT_DRAFTS} | flags
        return flags

    @property
    def ngram_bounds(self) -> tuple[int, int]:
        """The fewest and the most tokens that `ngram` looks up. One bound given moves the other's default with it."""
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        most = high if high is not None else max(_LOOKUP[1], low or 0)
        return low if low is not None else min(_LOOKUP[0], most), most

    @model_validator(mode="after")
    def _sizes_fit(self) -> EngineConfig:
        block, tile, page, drafts = (
            self.state_block_size, self.tile_size, self.page_size, self.num_speculative_tokens
        )  # fmt: skip
        if block % tile:
            raise ValueError(
                f"state_block_size {block} is not a multiple of tile_size {tile}; try {-(-block // tile) * tile}"
            )
        if block % page:
            below = max(size for size in range(1, min(page, block) + 1) if block % size == 0)
            raise ValueError(f"page_size {page} does not divide state_block_size {block}; try {below}")
        if block < 1 + drafts:
            raise ValueError(
                f"state_block_size {block} is below 1 + num_speculative_tokens = {1 + drafts}; "
                "one step may cross one block boundary only"
            )
        low, high = self.ngram_bounds
        if low > high:
            raise ValueError(f"prompt_lookup_min {low} is above prompt_lookup_max {high}")
        if self.speculative_method is not None and not drafts:
            raise ValueError(f"speculative_method {self.speculative_method!r} needs num_speculative_tokens >= 1")
        return self


def _explain(cls: type[BaseModel], detail: Any) -> str:
    """One of pydantic's complaints as a short clause that names the flag, the value and what is allowed."""
    if not detail["loc"]:
        return str(detail["ctx"]["error"]) if "error" in detail.get("ctx", {}) else detail["msg"]
    name = str(detail["loc"][0])
    message = detail["msg"].replace("Input should be ", "must be ")
    return f"{name}: {message[0].lower()}{message[1:]}, got {detail['input']!r}"


class CachePolicy(NamedTuple):
    """What prefix caching does in the end, and what the user is told about it."""

    mode: CacheMode
    chunked_prefill: bool
    notices: tuple[str, ...]


def resolve_cache_policy(config: EngineConfig, *, supports_all: bool = True) -> CachePolicy:
    """Settle prefix caching, cache mode and chunked prefill between them.

    | prefix caching | mode given   | mode used                                                |
    |----------------|--------------|----------------------------------------------------------|
    | on             | unset        | `all` where the family supports it, else `align`         |
    | on             | none         | none                                                     |
    | on             | align        | align; chunked prefill is switched on, with a notice     |
    | on             | all          | all (a clear error where the family does not support it) |
    | off            | unset, none  | none                                                     |
    | off            | align, all   | none, with a warning                                     |

    Drafts change nothing: every mode works with and without them.

    Raises:
        ConfigError: mode `all` was asked of a family that cannot.
    """
    asked, chunked = config.mamba_cache_mode, config.enable_chunked_prefill
    if not config.enable_prefix_caching:
        if asked in ("align", "all"):
            return CachePolicy(
                "none", chunked, (f"mamba_cache_mode {asked!r} has no effect: prefix caching is switched off",)
            )
        return CachePolicy("none", chunked, ())
    if asked == "all" and not supports_all:
        raise ConfigError("mamba_cache_mode 'all' is not supported by this model family; use 'align' or 'none'")
    mode: CacheMode = asked or ("all" if supports_all else "align")
    if mode == "align" and not chunked:
        return CachePolicy(mode, True, ("chunked prefill is switched on: mamba_cache_mode 'align' needs it",))
    return CachePolicy(mode, chunked, ())


def read_config_file(path: Path | str) -> Mapping[str, Any]:
    """Engine flags from a YAML or TOML file; dashes in names count as underscores.

    Raises:
        ConfigError: the file cannot be read, is neither, or holds something else than a table of flags.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"config file {path}: {getattr(error, 'strerror', None) or 'not a text file'}") from None
    try:
        match path.suffix.lower():
            case ".toml":
                flags = tomllib.loads(text)
            case ".yaml" | ".yml":
                flags = yaml.safe_load(text) or {}
            case other:
                raise ConfigError(f"config file {path}: its name must end in .yaml, .yml or .toml, not {other!r}")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        first = " ".join(str(error).split())
        raise ConfigError(f"config file {path}: {first}") from None
    if not isinstance(flags, dict):
        raise ConfigError(f"config file {path}: expected a table of flags, got {type(flags).__name__}")
    return {str(name).replace("-", "_"): value for name, value in flags.items()}
