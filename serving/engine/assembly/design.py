"""The design of an engine, before its arrays are allocated.

`EngineDesign` is computed once from the flags, the model and the kind of device. `build` allocates arrays for it;
`serving.capacity` computes only shapes. Both therefore agree on sizes, batches and the form of states.
"""

from __future__ import annotations

import dataclasses
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax.numpy as jnp

from mamba_jax.config import HybridConfig
from mamba_jax.drafts import DraftSource
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.feed_forward import rows_at_once
from mamba_jax.rounding import NarrowDtype
from mamba_jax.rows import Rows, init_rows
from mamba_jax.sharding import Partition
from mamba_jax.store import StoreShape
from mamba_jax.store_layout import lanes_of
from serving.compatibility import Deployment, check
from serving.config import CacheMode, EngineConfig
from serving.core.config import SchedulerConfig
from serving.engine.assembly.drafting import draft_source
from serving.engine.assembly.replay import ResolvedReplay, resolve_replay
from serving.engine.assembly.sizing import (
    CODE_PER_LAYER,
    CPU_STORE_TOKENS,
    LONG_CODE,
    LONG_CODE_PER_LAYER,
    MOST_CODE,
    StoreSize,
    max_model_len,
    places_of_parts,
    size_store,
)
from serving.engine.steps.batching import BatchBuilder

MAX_PREFILL_ROWS = 32
"""Maximum number of prompts that one step begins or continues."""
STEP_TOKENS, MOST_STEP_TOKENS = 2048, 8192
"""The default of `max_num_batched_tokens`: at least, and at most for models with experts."""
OPERATIONS_PER_BYTE = {"tpu": 560, "gpu": 250}
"""Operations that a device computes while it reads a byte, by platform: those of a v6e, and between H200 and H100."""


def step_tokens(model: HybridConfig, platform: str) -> int:
    """Returns the default of `max_num_batched_tokens`: the largest power of two, within the bounds, with which products
    take no longer than reading 16-bit weights.

    A step reads all experts, and multiplies a token with few of them. A longer step reads them less often for a prompt.
    """
    if model.moe is None or platform not in OPERATIONS_PER_BYTE:
        return STEP_TOKENS
    share, read, used = model.moe.experts_per_token / model.moe.num_experts, 0, 0.0
    for path, leaf in parameters(HybridModel.abstract(model, dtype=jnp.bfloat16)).items():
        read += leaf.size
        used += leaf.size * (share if ".experts." in path else path != "embed.weight")
    balanced = int(OPERATIONS_PER_BYTE[platform] * read / used)
    return 1 << max(STEP_TOKENS, min(balanced, MOST_STEP_TOKENS)).bit_length() - 1


class ResolvedCaching(NamedTuple):
    """The cache mode and chunking that result from the flags, with notices for the user."""

    mode: CacheMode
    chunked_prefill: bool
    notices: tuple[str, ...]


def resolve_caching(config: EngineConfig) -> ResolvedCaching:
    """Resolves conflicts between prefix caching, cache mode and chunked prefill, each with a notice."""
    asked, notices = config.mamba_cache_mode, list[str]()
    mode: CacheMode = (asked or "all") if config.enable_prefix_caching else "none"
    if asked not in (None, mode):
        notices.append(f"mamba_cache_mode {asked!r} has no effect: prefix caching is switched off")
    needed_by = "checkpoint_dtype" if config.narrows_states else "mamba_cache_mode 'align'" if mode == "align" else ""
    if needed_by and not config.enable_chunked_prefill:
        notices.append(f"chunked prefill is switched on: {needed_by} needs it")
    return ResolvedCaching(mode, config.enable_chunked_prefill or bool(needed_by), tuple(notices))


def waiting_form(config: EngineConfig) -> NarrowDtype | None:
    """Returns the form of states in tiers; None if it is the form of the slots."""
    return NarrowDtype(config.checkpoint_dtype) if config.narrows_states else None


def row_rounding(config: EngineConfig) -> tuple[NarrowDtype, int] | None:
    """Returns the form to which running rows are rounded, and the number of tokens between roundings."""
    return (NarrowDtype(config.checkpoint_dtype), config.state_block_size) if config.narrows_states else None


@dataclass(frozen=True)
class EngineDesign:
    """All properties of an engine that do not depend on free memory. Create it with `EngineDesign.of`."""

    config: EngineConfig
    partition: Partition
    """How the model is divided over the devices of a replica."""
    platform: str
    """`cpu`, `gpu` or `tpu`."""
    caching: ResolvedCaching
    source: DraftSource | None
    replay: ResolvedReplay
    padding: HeadPadding
    """The heads with which `model` is padded."""

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        padding: HeadPadding,
        *,
        shards: int,
        platform: str,
        weight_bytes: int,
        several_hosts: bool = False,
    ) -> EngineDesign:
        """Returns the design for a model.

        Args:
            config: every flag.
            padding: the model, with the padding for this number of devices.
            shards: devices of a replica.
            platform: `cpu`, `gpu` or `tpu`.
            weight_bytes: bytes of all weights on all devices together.
            several_hosts: the devices are those of several hosts.

        Raises:
            ConfigError: the flags contradict each other, or the model does not support them.
            ModelConfigError: the model does not divide over the devices.
        """
        model = padding.padded
        notice = padding.notice if padding else ""
        check(Deployment(config, model, platform, several_hosts=several_hosts, padding=notice))
        return cls(
            config,
            Partition.of(model, shards, config.context_parallel_size),
            platform,
            resolve_caching(config),
            draft_source(config, model),
            resolve_replay(config, StoreShape.of(model), platform=platform, weight_bytes=weight_bytes),
            padding,
        )

    @property
    def model(self) -> HybridConfig:
        """The whole model's configuration, with padded heads."""
        return self.partition.config

    @property
    def _stores_draft_kv(self) -> bool:
        return self.source is not None and self.source.stores_kv

    @cached_property
    def stored(self) -> HybridConfig:
        """The part of the model with state in the store. It includes the draft layer only if the draft layer's keys and
        values are stored."""
        return self.model if self._stores_draft_kv else dataclasses.replace(self.model, mtp_pattern="")

    @property
    def device_shape(self) -> StoreShape:
        """The shape of the state on one device."""
        routed_experts = self.config.enable_return_routed_experts
        shape = self.partition.device_shape(StoreShape.of(self.stored, routed_experts=routed_experts))
        return dataclasses.replace(shape, lanes=lanes_of(self.platform))

    @cached_property
    def step_tokens(self) -> int:
        """Maximum number of tokens of a step."""
        return self.config.max_num_batched_tokens or step_tokens(self.model, self.platform)

    @property
    def workspace_bytes(self) -> int:
        """A rough upper bound on the bytes per device that a step needs besides weights and store: activations in
        float32, those of all rows that experts process at once, and copies of the logits: two more where an adapter's
        own head replaces some.

        Of several members, each computes fewer activations than these, which leaves room for the states that it
        gathers.
        """
        config, model, shards, tokens = self.config, self.model, self.partition.shards, self.step_tokens
        heads = config.max_num_seqs * (1 + config.num_speculative_tokens)
        places = places_of_parts(config, tokens, heads, prefill_rows=min(MAX_PREFILL_ROWS, config.max_num_seqs))
        tokens += heads if config.mixes_steps_on(self.platform) else 0
        experts = 0
        if (moe := model.moe) is not None:
            rows, whole = tokens * moe.experts_per_token, moe.num_experts
            if self.platform == "tpu" and whole % shards == 0:
                rows = rows_at_once(rows, whole // shards, whole)
            experts = rows * ((moe.latent_size or model.hidden_size) + (1 + moe.gated) * moe.intermediate_size)
        hidden_size = model.hidden_size * (1 if model.drafter is None else 1 + len(model.drafter.places))
        activations = tokens * (4 * hidden_size + 6 * (model.inner_size // shards))
        logits = (5 if config.lora_tables else 3) * heads * model.vocab_size
        return (activations + experts + logits + places * (model.query_size // shards)) * 4

    @property
    def code_bytes(self) -> int:
        """An estimate of the bytes per device of the compiled step programs; 0 where they need little."""
        return self._coarse_and_code[1]

    @cached_property
    def _coarse_and_code(self) -> tuple[int, int]:
        """How far apart the shapes of steps are (`coarse` of `BatchBuilder`), and the bytes of their programs."""
        if self.platform not in CODE_PER_LAYER:
            return 0, 0
        config, rows, budget = self.config, self.config.max_num_seqs, self.step_tokens
        if not self.caching.chunked_prefill:
            budget = max(budget, max_model_len(config, self.model.max_position_embeddings))
        settings = SchedulerConfig(
            num_slots=1 + rows * (1 + config.num_speculative_tokens),
            num_pages=0,
            max_num_seqs=rows,
            max_num_batched_tokens=budget,
            state_block_size=config.state_block_size,
            tile_size=config.tile_size,
            num_speculative_tokens=config.num_speculative_tokens,
            max_prefill_rows=min(MAX_PREFILL_ROWS, rows),
        )
        long, code = sum(kind in LONG_CODE for kind in self.model.pattern), 0
        sizes = [
            long * each + (len(self.model.pattern) - long) * other
            for each, other in zip(LONG_CODE_PER_LAYER[self.platform], CODE_PER_LAYER[self.platform], strict=True)
        ]
        for coarse in (1, 2, 3):
            programs = self.batches(settings, coarse=coarse).step_programs
            code = sum(count * size for count, size in zip(programs, sizes, strict=True))
            if code <= MOST_CODE:
                return coarse, code
        return 3, code

    def size(self, *, memory: int, dtype: Any) -> StoreSize:
        """Returns the numbers of slots and pages that fit.

        Args:
            memory: bytes for the store on one device.
            dtype: data type of weights and activations.

        Raises:
            ConfigError: not even one sequence fits.
        """
        return size_store(
            self.config,
            self.device_shape,
            mode=self.caching.mode,
            dtype=dtype,
            model_max_len=self.model.max_position_embeddings,
            memory=memory,
            replay=self.replay.replay,
            platform=self.platform,
            most_tokens=CPU_STORE_TOKENS if self.platform == "cpu" else sys.maxsize,
        )

    def scheduler(self, size: StoreSize) -> SchedulerConfig:
        """Returns the scheduler's settings for a store of this size."""
        drafts = max(1, self.config.num_speculative_tokens)
        if self.model.drafter is not None:
            drafts = self.model.drafter.lookahead(drafts)
        config, budget = self.config, self.step_tokens
        if not self.caching.chunked_prefill:
            # Without chunks, a step must hold the longest prompt.
            budget = max(budget, size.max_model_len)
        return SchedulerConfig(
            num_slots=size.num_slots,
            num_pages=size.num_pages,
            max_num_seqs=size.max_num_seqs,
            max_num_batched_tokens=budget,
            max_model_len=size.max_model_len,
            page_size=size.page_size,
            context_members=size.members,
            state_block_size=config.state_block_size,
            tile_size=config.tile_size,
            cache_mode=self.caching.mode,
            num_speculative_tokens=config.num_speculative_tokens,
            replay_interval=size.replay_interval,
            num_lookahead_tokens=drafts if self._stores_draft_kv else 0,
            chunks_end_at_blocks=config.narrows_states,
            max_prefill_rows=min(MAX_PREFILL_ROWS, size.max_num_seqs),
            max_waiting=config.max_num_waiting,
            max_decode_pause=config.max_decode_pause,
        )

    def batches(self, settings: SchedulerConfig, *, masks: bool = False, coarse: int | None = None) -> BatchBuilder:
        """Returns a builder that converts the scheduler's plans to arrays. `masks`: grammars constrain some rows.
        `coarse`: as of `BatchBuilder`; None: so that the code of the programs is small enough."""
        return BatchBuilder(
            settings,
            seats_bring_tokens=self.source is not None and self.source.sees_tokens,
            masks=masks,
            narrow_steps=self.config.adaptive_drafts,
            mixed_steps=self.config.mixes_steps_on(self.platform),
            coarse=self._coarse_and_code[0] if coarse is None else coarse,
            adapters=self.config.enable_lora,
        )

    def store_arguments(self, size: StoreSize, *, dtype: Any) -> dict[str, Any]:
        """Returns the keyword arguments of `init_store`, and of the functions that lay the store out over devices."""
        config, replay = self.config, self.replay.replay
        return {
            "num_slots": size.num_slots + size.initial_states,
            "num_pages": size.num_pages,
            "page_size": size.page_size,
            "dtype": dtype,
            "ssm_dtype": jnp.dtype(config.ssm_dtype),
            "kv_dtype": jnp.dtype(config.kv_dtype(dtype)),
            "debug_state": config.debug_state,
            "replay": replay,
            "num_tails": 0 if replay is None else 1 + size.max_num_seqs,
            "rounding": row_rounding(config),
            "routed_experts": config.enable_return_routed_experts,
        }

    def rows(self, size: StoreSize, *, masks: bool = False) -> Rows:
        """Returns the arrays of the seats, which contain the data that each running row keeps between steps."""
        return init_rows(
            self.model,
            max_num_seqs=size.max_num_seqs,
            num_speculative_tokens=self.config.num_speculative_tokens,
            source=self.source,
            max_len=size.max_model_len,
            masks=masks,
            replay=self.replay.replay is not None,
            pages_per_row=size.pages_per_row,
            adapters=self.config.enable_lora,
        )
