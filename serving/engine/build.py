"""Builds a running engine from a configuration: loads the model, allocates the store, compiles the programs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import jax
from jax.sharding import Mesh

from checkpoints.load import generation_config, load_config, load_tokenizer, load_weights, weight_bytes
from checkpoints.tokenizer import Tokenizer
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.model import HybridModel, parameters
from mamba_jax.programs import KernelChoice, StepPrograms, UnsupportedError
from mamba_jax.rows import Rows
from mamba_jax.sharding import Partition, parameter_shardings, rows_shardings, sharded_store
from mamba_jax.store_layout import init_laid_out
from serving.config import ConfigError, EngineConfig
from serving.core import Scheduler
from serving.engine.compile_cache import use_compilation_cache
from serving.engine.design import EngineDesign
from serving.engine.devices import Meshes, describe, device_meshes, least_of_all_processes, on_mesh, own_devices
from serving.engine.draft_policy import draft_policy
from serving.engine.engine import Engine
from serving.engine.fetch import fetched
from serving.engine.gpu_memory import share_notices
from serving.engine.grammars import Grammars
from serving.engine.kept_programs import keep_programs
from serving.engine.loop import StepLoop
from serving.engine.row_inputs import RowInputs
from serving.engine.sizing import StoreSize, check_weights_fit, store_memory
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
    described = load_config(config.model, hf_overrides=config.hf_overrides)
    weights = weight_bytes(
        config.model,
        dtype=config.dtype,
        load_format=config.load_format,
        quantization=config.quantization,
        quantization_exclude=config.excluded_from_quantization,
        hf_overrides=config.hf_overrides,
    )
    design = _design(config, described, weights)  # errors come before minutes are spent on loading
    meshes = device_meshes(config)
    if config.compilation_cache:
        use_compilation_cache()
    tokenizer = load_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)
    eos = generation_config(config.model, hf_overrides=config.hf_overrides).eos_token_ids or described.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        # A chat tokenizer's end of turn is often missing from the other two.
        eos = tuple(dict.fromkeys([*eos, tokenizer.eos_token_id]))
    mesh, own = meshes[0], own_devices(meshes)
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
        hf_overrides=config.hf_overrides,
    )
    keep = config.compilation_cache
    return _assemble(design, meshes, loaded.model, tokenizer, eos, None, progress, keep=keep, digest=loaded.digest)


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
    design = _design(config, model.config, sum(leaf.nbytes for leaf in parameters(model).values()))
    return _assemble(design, device_meshes(config), model, tokenizer, eos_token_ids, programs, progress)


def _in_step(config: EngineConfig, led: bool) -> EngineConfig:
    """Without what processes that each schedule would do differently: their clocks differ."""
    if led or jax.process_count() == 1:
        return config
    return config.model_copy(update={"max_decode_pause": None})


def _design(config: EngineConfig, model: HybridConfig, weight_bytes: int) -> EngineDesign:
    """Raises ConfigError: flags that contradict each other, or that the model or the machine does not support."""
    check_tiers(config)
    try:
        partition = Partition.of(model, config.tensor_parallel_size)
    except ModelConfigError as error:
        raise ConfigError(str(error)) from None
    return EngineDesign.of(config, partition, platform=jax.default_backend(), weight_bytes=weight_bytes)


def _assemble(
    design: EngineDesign,
    meshes: Meshes,
    model: HybridModel,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    programs: StepPrograms | None,
    progress: bool,
    *,
    keep: bool = False,
    digest: str = "",
) -> Built:
    config = design.config
    # The checkpoint is read once: other replicas copy the weights from device to device.
    models = [on_mesh(model, mesh) for mesh in meshes]
    memory = store_memory(config, workspace=design.workspace_bytes, devices=own_devices(meshes))
    size = design.size(memory=least_of_all_processes(memory), dtype=model.dtype)
    for notice in (*design.caching.notices, *size.notices, *share_notices(design.platform)):
        log.warning(notice)
    log.info("running on %s", describe(meshes))
    log.info("decoding keeps %s", design.replay.notice)
    if len(meshes) > 1:
        log.info("each of %d replicas has weights, programs and a state store of its own:", len(meshes))
    for line in size.report().splitlines():
        log.info(line)
    grammars = None
    if config.enable_structured_outputs and tokenizer is not None:
        grammars = Grammars(tokenizer, model.config.vocab_size, eos_token_ids, seconds=config.grammar_timeout)
    parts = _Parts(design, size, tokenizer, eos_token_ids, grammars, digest)
    shared = programs if len(models) == 1 else None
    engines = tuple(
        parts.engine(replica, each, mesh, shared)
        for replica, (each, mesh) in enumerate(zip(models, meshes, strict=True))
    )
    built = Built(engines, config, size, models[0], tokenizer, digest)
    connect_tiers(config, [engine.loop for engine in engines], models[0].config, lambda: built.weights_digest)
    if (products := KernelChoice(platform=design.platform).products()) is not None:
        log.info(products)
    at_start = config.warmup if config.warmup is not None else design.platform != "cpu"
    for replica, engine in enumerate(engines):
        if keep and not at_start:
            keep_programs(engine.loop.programs)
        if at_start:
            label = f"replica {replica + 1} of {len(engines)}: " if len(engines) > 1 else ""
            _compile_all(engine, progress=progress, keep=config.compilation_cache, label=label)
    return built


@dataclass(frozen=True)
class _Parts:
    """What replicas have in common: everything but the devices and the arrays on them."""

    design: EngineDesign
    size: StoreSize
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    grammars: Grammars | None
    digest: str

    def engine(self, replica: int, model: HybridModel, mesh: Mesh | None, programs: StepPrograms | None) -> Engine:
        """An engine for a model whose weights are on the devices of this replica."""
        design, config, size, grammars = self.design, self.design.config, self.size, self.grammars
        settings, masks = design.scheduler(size), grammars is not None
        batches = design.batches(settings, masks=masks)
        make_store = partial(
            init_laid_out if mesh is None else partial(sharded_store, mesh=mesh),
            design.stored,
            **design.store_arguments(size, dtype=model.dtype),
        )

        def make_rows() -> Rows:
            rows = design.rows(size, masks=masks)
            return rows if mesh is None else jax.device_put(rows, rows_shardings(rows, mesh))

        programs = programs or StepPrograms(
            model,
            tile_size=config.tile_size,
            source=design.source,
            mesh=mesh,
            kernels=kernel_choice(config),
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
        )
        loop = StepLoop(
            Scheduler(settings, drafts=draft_policy(config, model, bytes_per_token=size.bytes_per_token)),
            programs,
            batches,
            RowInputs(batches, vocab_size=model.config.vocab_size, masks=masks),
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


def kernel_choice(config: EngineConfig) -> KernelChoice:
    """What operations are to run by.

    Raises:
        ConfigError: the flag is not written as it should be.
    """
    try:
        return KernelChoice.parse(config.kernels)
    except UnsupportedError as error:
        raise ConfigError(str(error)) from None
