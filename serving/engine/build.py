"""From a configuration to a running engine: model, store, programs, scheduler, put together."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
import jax.numpy as jnp

from checkpoints.load import generation_config, load_config, load_tokenizer, load_weights, weight_bytes
from checkpoints.tokenizer import Tokenizer
from mamba_jax.config import HybridConfig
from mamba_jax.drafts import DraftSource
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import KernelChoice, StepPrograms, UnsupportedError
from mamba_jax.rows import Rows, init_rows
from mamba_jax.sharding import Partition, parameter_shardings, rows_shardings, sharded_store
from mamba_jax.store import StoreShape
from mamba_jax.store_layout import init_laid_out, lanes_of
from mamba_jax.tails import Replay
from serving.config import ConfigError, EngineConfig, ResolvedCaching, resolve_caching
from serving.core import Scheduler, SchedulerConfig
from serving.engine.batching import BatchBuilder
from serving.engine.compile_cache import use_compilation_cache
from serving.engine.devices import Meshes, describe, device_meshes, least_of_all_processes, on_mesh, own_devices
from serving.engine.draft_policy import draft_policy
from serving.engine.drafting import draft_source
from serving.engine.engine import Engine
from serving.engine.fetch import fetched
from serving.engine.gpu_memory import share_notices
from serving.engine.grammars import Grammars
from serving.engine.kept_programs import keep_programs
from serving.engine.loop import StepLoop
from serving.engine.narrow_states import row_rounding
from serving.engine.replay import ResolvedReplay, resolve_replay
from serving.engine.row_inputs import RowInputs
from serving.engine.sizing import (
    CPU_STORE_TOKENS,
    StoreSize,
    check_weights_fit,
    scheduler_config,
    size_store,
    store_memory,
    workspace_bytes,
)
from serving.engine.tiering import check_tiers, connect_tiers
from serving.engine.warmup import warm_up
from serving.engine.weights import Weights
from serving.points.digest import model_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Built:
    """An engine, or replicas of one, and what they were made of."""

    engines: tuple[Engine, ...]
    config: EngineConfig
    size: StoreSize
    model: HybridModel
    tokenizer: Tokenizer | None
    digest: str = ""
    """Of the files that the weights were loaded from; empty for a model that was made in memory."""

    @cached_property
    def weights_digest(self) -> str:
        """Identifies the weights that the engines began with."""
        return self.digest or model_digest(self.model, self.model.config)

    @property
    def engine(self) -> Engine:
        """The engine; of several replicas the first."""
        return self.engines[0]


def build_engine(config: EngineConfig, *, progress: bool = True, led: bool = False) -> Built:
    """Load the model that `config` names and make an engine for it.

    Args:
        config: every flag.
        progress: show bars for loading and compiling, on stderr.
        led: of several processes, one schedules for all (`serving/hosts`). Otherwise each does for itself.

    Raises:
        ConfigError: flags that do not fit together, the model, or the memory.
        CheckpointError: the model cannot be loaded.
    """
    config = _in_step(fetched(config), led)
    described = load_config(config.model)
    weights = weight_bytes(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        quantization=config.quantization,
        quantization_exclude=config.excluded_from_quantization,
    )
    resolved = _Resolved.of(config, described, weights)  # errors come before minutes are spent on loading
    if config.compilation_cache:
        use_compilation_cache()
    tokenizer = load_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)
    eos = generation_config(config.model).eos_token_ids or described.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        # A chat tokenizer's end of turn is often missing from the other two.
        eos = tuple(dict.fromkeys([*eos, tokenizer.eos_token_id]))
    mesh = resolved.meshes[0]
    own = own_devices(resolved.meshes)
    check_weights_fit(weights if own is None or mesh is None else weights * len(own) // mesh.size, devices=own)
    loaded = load_weights(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        progress=progress,
        sharding=None if mesh is None else parameter_shardings(described, mesh),
        seed=config.seed,
        quantization=config.quantization,
        quantization_exclude=config.excluded_from_quantization,
    )
    keep = config.compilation_cache
    return _assemble(config, resolved, loaded.model, tokenizer, eos, None, progress, keep=keep, digest=loaded.digest)


def assemble(
    config: EngineConfig,
    model: HybridModel,
    *,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Sequence[int] = (),
    programs: StepPrograms | None = None,
    progress: bool = False,
    led: bool = False,
) -> Built:
    """Make an engine for a model that is loaded already.

    Args:
        config: every flag; those about loading are not looked at.
        model: its parameters are used where they are; with tensor parallelism they are moved if need be.
        tokenizer: None serves token ids only.
        eos_token_ids: what ends a text.
        programs: compiled programs of the same model, tile size and draft source, to share them between engines. Of no
            use to replicas: each has devices of its own.
        progress: show a bar for compiling, on a terminal.
        led: as of `build_engine`.

    Raises:
        ConfigError: flags that do not fit together, the model, or the memory.
    """
    config = _in_step(config, led)
    resolved = _Resolved.of(config, model.config, sum(leaf.nbytes for leaf in parameters(model).values()))
    return _assemble(config, resolved, model, tokenizer, eos_token_ids, programs, progress)


def _in_step(config: EngineConfig, led: bool) -> EngineConfig:
    """Without what processes that each schedule would do differently: their clocks differ."""
    if led or jax.process_count() == 1:
        return config
    return config.model_copy(update={"max_decode_pause": None})


@dataclass(frozen=True)
class _Resolved:
    """What flags amount to for one model."""

    caching: ResolvedCaching
    source: DraftSource | None
    meshes: Meshes
    replay: ResolvedReplay

    @classmethod
    def of(cls, config: EngineConfig, model: HybridConfig, weights: int) -> _Resolved:
        """`weights`: bytes of all of them. Raises ConfigError: flags that do not fit together or the model."""
        check_tiers(config)
        return cls(
            resolve_caching(config),
            draft_source(config, model),
            device_meshes(config, model),
            resolve_replay(config, StoreShape.of(model), platform=jax.default_backend(), weight_bytes=weights),
        )


def _assemble(
    config: EngineConfig,
    resolved: _Resolved,
    model: HybridModel,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    programs: StepPrograms | None,
    progress: bool,
    *,
    keep: bool = False,
    digest: str = "",
) -> Built:
    policy, source, meshes = resolved.caching, resolved.source, resolved.meshes
    # Other sources, and no source, never look at the draft layer's keys and values.
    with_mtp = source is not None and source.stores_kv
    stored = model.config if with_mtp else dataclasses.replace(model.config, mtp_pattern="")
    # Read once: replicas take copies from the first, device to device.
    models = [on_mesh(model, mesh) for mesh in meshes]
    replay = resolved.replay.replay
    size = _size(config, policy, stored, model.dtype, meshes, replay)
    for notice in (*policy.notices, *size.notices, *share_notices(jax.default_backend())):
        log.warning(notice)
    log.info("running on %s", describe(meshes))
    log.info("decoding keeps %s", resolved.replay.notice)
    if len(meshes) > 1:
        log.info("each of %d replicas has weights, programs and a state store of its own:", len(meshes))
    for line in size.report().splitlines():
        log.info(line)
    settings = scheduler_config(
        config, policy, size, lookahead=max(1, config.num_speculative_tokens) if with_mtp else 0
    )
    grammars = None
    if config.enable_structured_outputs and tokenizer is not None:
        grammars = Grammars(tokenizer, model.config.vocab_size, eos_token_ids, seconds=config.grammar_timeout)
    parts = _Parts(config, resolved, stored, size, settings, tokenizer, eos_token_ids, grammars, digest)
    given = programs if len(models) == 1 else None
    engines = tuple(parts.engine(replica, each, given) for replica, each in enumerate(models))
    built = Built(engines, config, size, models[0], tokenizer, digest)
    connect_tiers(config, [engine.loop for engine in engines], models[0].config, lambda: built.weights_digest)
    at_start = config.warmup if config.warmup is not None else jax.default_backend() != "cpu"
    for replica, engine in enumerate(engines):
        if keep and not at_start:
            keep_programs(engine.loop.programs)
        if at_start:
            label = f"replica {replica + 1} of {len(engines)}: " if len(engines) > 1 else ""
            _compile_all(engine, progress=progress, keep=config.compilation_cache, label=label)
    return built


@dataclass(frozen=True)
class _Parts:
    """What replicas have in common: everything but the devices and what lies on them."""

    config: EngineConfig
    resolved: _Resolved
    stored: HybridConfig
    size: StoreSize
    settings: SchedulerConfig
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    grammars: Grammars | None
    digest: str

    def engine(self, replica: int, model: HybridModel, programs: StepPrograms | None) -> Engine:
        """An engine for a model that lies on the devices of this replica."""
        config, size, settings, grammars = self.config, self.size, self.settings, self.grammars
        source, mesh, replay = self.resolved.source, self.resolved.meshes[replica], self.resolved.replay.replay
        batches = BatchBuilder(
            settings,
            seats_bring_tokens=source is not None and source.sees_tokens,
            masks=grammars is not None,
            narrow_steps=config.adaptive_drafts,
        )
        make_store = partial(
            init_laid_out if mesh is None else partial(sharded_store, mesh=mesh),
            self.stored,
            num_slots=size.num_slots,
            num_pages=size.num_pages,
            page_size=size.page_size,
            dtype=model.dtype,
            ssm_dtype=jnp.dtype(config.ssm_dtype),
            kv_dtype=jnp.dtype(config.kv_dtype(model.dtype)),
            debug_state=config.debug_state,
            replay=replay,
            num_tails=0 if replay is None else 1 + settings.num_rows,
            rounding=row_rounding(config),
        )

        def make_rows() -> Rows:
            rows = init_rows(
                model.config,
                max_num_seqs=settings.num_rows,
                num_speculative_tokens=settings.num_speculative_tokens,
                source=source,
                max_len=settings.max_model_len,
                masks=grammars is not None,
                replay=replay is not None,
            )
            return rows if mesh is None else jax.device_put(rows, rows_shardings(rows, mesh))

        programs = programs or StepPrograms(
            model,
            tile_size=config.tile_size,
            source=source,
            mesh=mesh,
            kernels=kernel_choice(config),
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
        )
        loop = StepLoop(
            Scheduler(settings, drafts=draft_policy(config, model, bytes_per_token=size.bytes_per_token)),
            programs,
            batches,
            RowInputs(batches, vocab_size=model.config.vocab_size, masks=grammars is not None),
            make_store=make_store,
            make_rows=make_rows,
        )
        weights = Weights(
            model,
            programs,
            quantization=config.quantization,
            quantization_exclude=config.excluded_from_quantization,
            digest=self.digest,
        )
        return Engine(
            loop,
            tokenizer=self.tokenizer,
            weights=weights,
            vocab_size=model.config.vocab_size,
            eos_token_ids=self.eos_token_ids,
            max_model_len=size.max_model_len,
            # Requests without a seed must not draw alike on all replicas.
            seed=config.seed + replica,
            grammars=grammars,
        )


def _compile_all(engine: Engine, *, progress: bool, keep: bool, label: str) -> None:
    loop = engine.loop
    if loop.mover is not None and loop.store is not None:
        loop.mover.warm_up(loop.store)
    warm_up(loop, engine.vocab_size, progress=progress and sys.stderr.isatty(), keep=keep, label=label)
    log.info(loop.programs.kernels.report())
    if (instructions := loop.programs.kernels.instructions()) is not None:
        log.info("C++ products use the instruction set %s", instructions)


def kernel_choice(config: EngineConfig) -> KernelChoice:
    """What operations are to run by.

    Raises:
        ConfigError: the flag is not written as it should be.
    """
    try:
        return KernelChoice.parse(config.kernels)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from None


def _size(
    config: EngineConfig,
    policy: ResolvedCaching,
    stored: HybridConfig,
    dtype: jnp.dtype,
    meshes: Meshes,
    replay: Replay | None,
) -> StoreSize:
    """All bytes are those of one device. Replicas are alike: the device with the least free memory decides."""
    shape = Partition.of(stored, config.tensor_parallel_size).device_shape(StoreShape.of(stored))
    shape = dataclasses.replace(shape, lanes=lanes_of(jax.default_backend()))
    workspace = workspace_bytes(
        config,
        hidden_size=stored.hidden_size,
        inner_size=stored.inner_size // config.tensor_parallel_size,
        vocab_size=stored.vocab_size,
    )
    return size_store(
        config,
        shape,
        mode=policy.mode,
        dtype=dtype,
        model_max_len=stored.max_position_embeddings,
        memory=least_of_all_processes(store_memory(config, workspace=workspace, devices=own_devices(meshes))),
        replay=replay,
        platform=jax.default_backend(),
        most_tokens=CPU_STORE_TOKENS if jax.default_backend() == "cpu" else sys.maxsize,
    )
