"""Builds a running engine from a configuration: loads the model, allocates the store, compiles the programs."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice

import jax
from jax.sharding import Mesh

from checkpoints.drafts import drafter_bytes, with_drafter
from checkpoints.load import generation_config, load_config
from checkpoints.tokenizer import Tokenizer, load_tokenizer
from mamba_jax.adapters import Adapters
from mamba_jax.config import HybridConfig, ModelConfigError, need
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import weight_of
from mamba_jax.programs import KernelChoice, RowsBatch, StepPrograms, UnsupportedError
from mamba_jax.rows import Rows, rows_shardings
from mamba_jax.sharding import TENSOR, Partition, sharded_store
from mamba_jax.store import EXPERT, Store
from mamba_jax.store_layout import init_laid_out
from serving.compatibility import Deployment, check
from serving.config import ConfigError, EngineConfig
from serving.core.scheduler import Scheduler
from serving.engine.assembly.chosen_kernels import kernel_choice, refused_on_all, source_of_bits
from serving.engine.assembly.design import EngineDesign
from serving.engine.assembly.devices import (
    Meshes,
    adapters_of,
    describe,
    device_meshes,
    least_of_all_processes,
    on_mesh,
    own_devices,
    scheduler_clock,
)
from serving.engine.assembly.drafting import draft_policy, with_drafter_config
from serving.engine.assembly.fetch import checkpoint_of, fetched
from serving.engine.assembly.free_memory import check_fits, store_memory
from serving.engine.assembly.gpu_memory import share_notices
from serving.engine.assembly.sizing import StoreSize
from serving.engine.assembly.tiering import check_tiers, connect_tiers
from serving.engine.compiled_programs import keep_programs, use_compilation_cache
from serving.engine.control import Weights
from serving.engine.engine import Engine
from serving.engine.requests.adapters import AdapterNames, AdapterTable
from serving.engine.requests.initial_states import InitialStates
from serving.engine.steps.loop import StepLoop
from serving.engine.steps.warm_up import warm_up
from serving.engine.structured.grammars import Grammars
from serving.state_transfer.identity import model_digest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class AssembledEngine:
    """An engine, or its replicas, with the configuration, model and tokenizer that they were built from."""

    engines: tuple[Engine, ...]
    config: EngineConfig
    size: StoreSize
    model: HybridModel
    tokenizer: Tokenizer | None
    digest: str = ""
    """Digest of the files from which the weights were loaded; empty for a model that was created in memory."""

    @cached_property
    def weights_digest(self) -> str:
        """Digest of the engines' initial weights. Stored and transferred states of schedule-invariant engines have one
        of their own for each mesh, and each instruction set, or kind of device with the versions of JAX and of the
        platform."""
        digest = self.digest or model_digest(self.model, self.model.config)
        if not self.config.schedule_invariant:
            return digest
        programs = self.engine.loop.programs
        return f"{digest}-{source_of_bits(programs.kernels, programs.mesh)}"

    @property
    def engine(self) -> Engine:
        """The engine, or the first of several replicas."""
        return self.engines[0]


def build_engine(config: EngineConfig, *, progress: bool = True, led: bool = False) -> AssembledEngine:
    """Loads the model that `config` names and builds an engine for it.

    Args:
        config: every flag.
        progress: show bars for loading and compiling, on stderr.
        led: one of several processes schedules for all of them (`serving/hosts`). Otherwise each process schedules for
            itself.

    Raises:
        ConfigError: the flags contradict each other, or do not fit the model or the memory.
        CheckpointError: the model cannot be loaded.
    """
    config = fetched(config)
    refused = refused_on_all(config, led)  # before anything here starts JAX
    config = _in_step(config, led)
    target = load_config(config.model, hf_overrides=config.hf_overrides)
    described = with_drafter_config(config, target)
    checkpoint = checkpoint_of(config)
    weights = checkpoint.nbytes() + drafter_bytes(described, config.dtype)
    design = _design(config, described, weights, led)  # reports errors before loading, which can take minutes
    weights = int(weights * (1 + design.padding.cost))
    meshes = device_meshes(config)
    if config.compilation_cache:
        use_compilation_cache()
    tokenizer = load_tokenizer(config.tokenizer or config.model, chat_template=config.chat_template)
    eos = generation_config(config.model, hf_overrides=config.hf_overrides).eos_token_ids or described.eos_token_ids
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        # A chat tokenizer's end of turn is often missing from the other two.
        eos = tuple(dict.fromkeys([*eos, tokenizer.eos_token_id]))
    mesh, own = meshes[0], own_devices(meshes)
    advice = "use a smaller --dtype, --quantization, --tensor-parallel-size or a larger machine"
    per_process = weights if own is None or mesh is None else weights * len(own) // mesh.shape[TENSOR]
    check_fits("weights", per_process, advice, devices=own)
    shardings = None
    if mesh is not None:
        padding = HeadPadding.of(target, mesh.shape[TENSOR])
        shardings = partial(padding.load_sharding, Partition.of(padding.padded, mesh.shape[TENSOR]), mesh)
    loaded = checkpoint.load_identified(progress=progress, sharding=shardings)
    if described.drafter is not None and config.speculative_model is not None:
        loaded = with_drafter(
            config.speculative_model,
            loaded,
            method=config.speculative_method,
            load_format=config.load_format,
            seed=config.seed,
            progress=progress,
        )
    model, digest = on_mesh(loaded.model, mesh), loaded.digest
    del loaded  # frees the weights that were padded
    keep = config.compilation_cache
    assembly = _Assembly(design, meshes, tokenizer, eos, progress, led, keep=keep, digest=digest, refused=refused)
    return assembly.of(model)


def assemble(
    config: EngineConfig,
    model: HybridModel,
    *,
    tokenizer: Tokenizer | None = None,
    eos_token_ids: Sequence[int] = (),
    programs: StepPrograms | None = None,
    progress: bool = False,
    led: bool = False,
) -> AssembledEngine:
    """Builds an engine for a model that is already loaded.

    Args:
        config: every flag; flags for loading are ignored.
        model: its parameters stay on their devices; with tensor parallelism they are moved if necessary.
        tokenizer: None serves token ids only.
        eos_token_ids: the tokens that end a text.
        programs: compiled programs of the same model, tile size and draft source, shared between engines. Ignored with
            several replicas, because each has its own devices.
        progress: show a bar for compiling, on a terminal.
        led: as for `build_engine`.

    Raises:
        ConfigError: the flags contradict each other, or do not fit the model or the memory.
    """
    config = _in_step(config, led)
    design = _design(config, model.config, sum(leaf.nbytes for leaf in parameters(model).values()), led)
    return _Assembly(design, device_meshes(config), tokenizer, eos_token_ids, progress, led, programs).of(model)


def _in_step(config: EngineConfig, led: bool) -> EngineConfig:
    """Disables `max_decode_pause` if each of several processes schedules for itself: their clocks differ, so their
    schedules would differ."""
    if led or jax.process_count() == 1:
        return config
    return config.model_copy(update={"max_decode_pause": None})


def _design(config: EngineConfig, model: HybridConfig, weight_bytes: int, led: bool) -> EngineDesign:
    check_tiers(config)
    try:
        return EngineDesign.of(
            config,
            HeadPadding.of(model, config.tensor_parallel_size),
            shards=config.tensor_parallel_size,
            platform=jax.default_backend(),
            weight_bytes=weight_bytes,
            several_hosts=led or jax.process_count() > 1,
        )
    except ModelConfigError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True)
class _Assembly:
    """The parts that all replicas have in common: everything except the devices and the arrays on them."""

    design: EngineDesign
    meshes: Meshes
    tokenizer: Tokenizer | None
    eos_token_ids: Sequence[int]
    progress: bool
    led: bool
    programs: StepPrograms | None = None
    keep: bool = False
    digest: str = ""
    refused: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """Kernels that are not used, with the reasons."""
    names: AdapterNames = field(default_factory=AdapterNames)

    def of(self, model: HybridModel) -> AssembledEngine:
        """Builds the engines for a model that is loaded."""
        config, design, meshes = self.design.config, self.design, self.meshes
        wide = frozenset(str(leaf.dtype) for path, leaf in parameters(model).items() if weight_of(path) is None)
        check(Deployment(config, weight_dtypes=wide))
        # The checkpoint is read once: other replicas copy the weights from device to device.
        models = [on_mesh(model, mesh) for mesh in meshes]
        # Allocate the adapters' memory before the store is sized.
        adapters = [adapters_of(config, each, mesh) for each, mesh in zip(models, meshes, strict=True)]
        own = own_devices(meshes)
        memory = store_memory(config, workspace=design.workspace_bytes + design.code_bytes, devices=own)
        size = design.size(memory=least_of_all_processes(memory), dtype=model.dtype)
        advice = "lower --num-pages, --num-slots or --max-num-seqs"
        check_fits("slots and pages", size.total_bytes * len(own or meshes), advice, devices=own)
        for notice in (*design.caching.notices, *size.notices, *share_notices(design.platform)):
            log.warning(notice)
        log.info("running on %s", describe(meshes))
        if design.padding:
            log.info(design.padding.notice)
        log.info("decoding keeps %s", design.replay.notice)
        if len(meshes) > 1:
            log.info("each of %d replicas has weights, programs and a state store of its own:", len(meshes))
        for line in size.report().splitlines():
            log.info(line)
        grammars = None
        if config.enable_structured_outputs and self.tokenizer is not None:
            vocab_size, seconds, users = model.config.vocab_size, config.grammar_timeout, len(meshes)
            grammars = Grammars(self.tokenizer, vocab_size, self.eos_token_ids, seconds=seconds, users=users)
        engines = tuple(
            self._engine(replica, size, grammars, each, mesh, own)
            for replica, (each, mesh, own) in enumerate(zip(models, meshes, adapters, strict=True))
        )
        built = AssembledEngine(engines, config, size, models[0], self.tokenizer, self.digest)
        connect_tiers(config, [engine.loop for engine in engines], models[0].config, lambda: built.weights_digest)
        if (products := KernelChoice(platform=design.platform).products()) is not None:
            log.info(products)
        at_start = config.warmup if config.warmup is not None else design.platform != "cpu"
        for replica, engine in enumerate(engines):
            if self.keep and not at_start:
                keep_programs(engine.loop.programs)
            try:
                if at_start:
                    label = f"replica {replica + 1} of {len(engines)}: " if len(engines) > 1 else ""
                    _compile_all(engine, progress=self.progress, keep=config.compilation_cache, label=label)
                elif config.kernels != "auto":  # a named kernel that cannot run is an error now, not in a step
                    _trace_steps(engine)
            except UnsupportedError as error:
                raise ConfigError(str(error)) from None
        return built

    def _engine(
        self,
        replica: int,
        size: StoreSize,
        grammars: Grammars | None,
        model: HybridModel,
        mesh: Mesh | None,
        adapters: Adapters | None,
    ) -> Engine:
        """Builds an engine for a model with weights on the devices of this replica."""
        design, config = self.design, self.design.config
        settings, masks = design.scheduler(size), grammars is not None
        batches = design.batches(settings, masks=masks)
        states = None
        if config.max_initial_states:
            states = InitialStates(design.stored, first=size.num_slots, count=size.initial_states)

        def make_store() -> Store:
            init = init_laid_out if mesh is None else partial(sharded_store, mesh=mesh)
            store = init(design.stored, **design.store_arguments(size, dtype=model.dtype))
            return store if states is None else states.fill(store)

        def make_rows() -> Rows:
            rows = design.rows(size, masks=masks)
            return rows if mesh is None else jax.device_put(rows, rows_shardings(rows, mesh))

        shared = self.programs if len(self.meshes) == 1 else None
        programs = shared or StepPrograms(
            model,
            tile_size=config.tile_size,
            source=design.source,
            mesh=mesh,
            kernels=kernel_choice(config, self.refused),
            processed_logprobs=config.logprobs_mode == "processed_logprobs",
            sampling_masks=config.enable_return_sampling_mask,
            max_logprobs=config.max_logprobs,
            adapters=adapters,
        )
        loop = StepLoop(
            Scheduler(
                settings,
                drafts=draft_policy(config, model, bytes_per_token=size.bytes_per_token),
                clock=scheduler_clock(led=self.led),
            ),
            programs,
            batches,
            make_store=make_store,
            make_rows=make_rows,
        )
        weights = Weights(
            model,
            programs,
            quantization=config.quantization,
            quantization_exclude=config.excluded_from_quantization,
            digest=self.digest,
            fixed=_why_fixed(design),
        )
        return Engine(
            loop,
            tokenizer=self.tokenizer,
            weights=weights,
            eos_token_ids=self.eos_token_ids,
            # Requests without a seed must not get the same random numbers on all replicas.
            seed=config.seed + replica,
            grammars=grammars,
            experts_per_layer=need(model.config.moe).experts_per_token if config.enable_return_routed_experts else 0,
            expert_bytes=EXPERT.itemsize * design.device_shape.experts,
            adapters=AdapterTable(programs, model.config, loop, states, self.names) if config.adapter_flag else None,
        )


def _why_fixed(design: EngineDesign) -> str:
    if design.padding:
        return f"{design.padding.notice}; use a tensor_parallel_size that divides the heads"
    if design.model.drafter is not None:
        return "the engine has a drafter (speculative_model), which was made for these weights"
    if design.config.enable_lora and design.config.enable_dora:
        return "the factors of adapters with magnitudes (enable_dora) are computed from these weights"
    return ""


def _trace_steps(engine: Engine) -> None:
    loop = engine.loop
    for batch in islice(loop.batches.warm_up_batches(engine.vocab_size), loop.batches.num_essential):
        if not isinstance(batch, RowsBatch):
            loop.programs.trace(*loop.shapes, batch)


def _compile_all(engine: Engine, *, progress: bool, keep: bool, label: str) -> None:
    loop = engine.loop
    for source in loop.sources:
        if loop.store is not None:
            source.warm_up(loop.store)
    if engine.adapters is not None:
        engine.adapters.warm_up()
    warm_up(loop, engine.vocab_size, progress=progress and sys.stderr.isatty(), keep=keep, label=label)
    log.info(loop.programs.kernels.report())
