"""From a configuration to a running engine: model, store, programs, scheduler, put together."""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import checkpoints
from checkpoints.tokenizer import Tokenizer
from mamba_jax import HybridModel, StepPrograms, init_rows, init_store
from mamba_jax.store import StoreShape
from serving.config import ConfigError, EngineConfig, resolve_cache_policy
from serving.core import Scheduler, SchedulerConfig
from serving.engine.batching import BatchBuilder
from serving.engine.compile_cache import use_compilation_cache
from serving.engine.engine import Engine
from serving.engine.loop import StepLoop
from serving.engine.sizing import StoreSize, size_store, store_memory, workspace_bytes
from serving.engine.warmup import warm_up

log = logging.getLogger(__name__)

MAX_PREFILL_ROWS = 32
"""Prompts that one step may begin or continue."""


@dataclass(frozen=True)
class Built:
    """An engine and what it was made of."""

    engine: Engine
    config: EngineConfig
    size: StoreSize
    model: HybridModel
    tokenizer: Tokenizer | None


def build_engine(config: EngineConfig, *, progress: bool = True) -> Built:
    """Load the model and make an engine for it.

    Args:
        config: every flag.
        progress: show bars for loading and compiling on stderr.

    Raises:
        ConfigError: flags that do not fit together, the model, or the memory.
        checkpoints.CheckpointError: the model cannot be loaded.
    """
    if config.num_speculative_tokens:
        raise ConfigError("num_speculative_tokens: drafts are not supported by this version; leave it at 0")
    policy = resolve_cache_policy(config)
    for notice in policy.notices:
        log.warning(notice)
    if config.compilation_cache:
        use_compilation_cache()
    dtype = _dtype(config)
    model = checkpoints.load_model(config.model, dtype=dtype, load_format=config.load_format, progress=progress)
    hybrid = model.config
    shape = StoreShape.of(hybrid)
    activation = jnp.dtype(model.dtype)
    inner = shape.heads * shape.head_dim
    workspace = workspace_bytes(config, hidden_size=hybrid.hidden_size, inner_size=inner, vocab_size=hybrid.vocab_size)
    size = size_store(
        config,
        shape,
        mode=policy.mode,
        dtype=activation,
        model_max_len=hybrid.max_position_embeddings,
        memory=store_memory(config, workspace=workspace),
    )
    for notice in size.notices:
        log.warning(notice)
    log.info(size.report())
    budget = (
        config.max_num_batched_tokens
        if policy.chunked_prefill
        else max(config.max_num_batched_tokens, size.max_model_len)
    )
    settings = SchedulerConfig(
        num_slots=size.num_slots,
        num_pages=size.num_pages,
        max_num_seqs=size.max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=size.max_model_len,
        page_size=config.page_size,
        state_block_size=config.state_block_size,
        tile_size=config.tile_size,
        cache_mode=policy.mode,
        max_prefill_rows=min(MAX_PREFILL_ROWS, size.max_num_seqs),
        max_waiting=config.max_num_waiting,
    )
    batches = BatchBuilder(settings)
    programs = StepPrograms(model, tile_size=config.tile_size)
    make_store = partial(
        init_store,
        hybrid,
        num_slots=size.num_slots,
        num_pages=size.num_pages,
        page_size=config.page_size,
        dtype=activation,
        ssm_dtype=jnp.dtype(config.ssm_dtype),
        debug_state=config.debug_state,
    )
    make_rows = partial(init_rows, hybrid, max_num_seqs=settings.seats)
    tokenizer = checkpoints.load_tokenizer(config.model)
    loop_of = partial(StepLoop, Scheduler(settings), programs, batches, make_store=make_store, make_rows=make_rows)
    engine = Engine(
        loop_of,
        batches,
        tokenizer=tokenizer,
        vocab_size=hybrid.vocab_size,
        eos_token_ids=checkpoints.generation_config(config.model).eos_token_ids,
        max_model_len=size.max_model_len,
        seed=config.seed,
    )
    if config.warmup:
        warm_up(engine.loop, hybrid.vocab_size, progress=progress and sys.stderr.isatty())
    return Built(engine, config, size, model, tokenizer)


def _dtype(config: EngineConfig) -> Any:
    """`auto` is float32 on CPU, where bfloat16 dots of one row are slower, and the checkpoint's own elsewhere."""
    if config.dtype == "auto":
        return "float32" if jax.default_backend() == "cpu" else "auto"
    return config.dtype
