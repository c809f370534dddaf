"""Plans a model on a machine: the memory that it needs, the memory left for sequences, and the bounds of a step."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from checkpoints.drafter import drafter_shapes
from checkpoints.errors import CheckpointError
from checkpoints.load import load_config, weight_shapes
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.config import HybridConfig, ModelConfigError
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, num_parameters
from mamba_jax.modules.quantised import weight_of
from mamba_jax.programs import StepBatch, UnsupportedError
from mamba_jax.rows import Rows
from mamba_jax.sharding import TENSOR, Partition, rows_shardings
from mamba_jax.store import StoreShape, init_store
from mamba_jax.store_layout import lanes_of
from serving.capacity.buckets import decode_name, decode_shapes, kind_of, mixed_name, prefill_name, prefill_shapes
from serving.capacity.compiling import Program, SlicePrograms, check_compiler, code_of_all, slice_mesh
from serving.capacity.count import Counter, Workload, collectives, decode_workload, prefill_workload
from serving.capacity.layer_cuts import Cut, can_cut, cut_config, cut_parameters, layer_cuts, whole_programs
from serving.capacity.overheads import HOST_SECONDS, KERNEL_SECONDS, decode_kernels
from serving.capacity.result import CapacityPlan, Step
from serving.capacity.targets import Target, larger
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.design import EngineDesign
from serving.engine.assembly.drafting import with_drafter_config
from serving.engine.assembly.gpu_memory import reserved_share
from serving.engine.assembly.narrow_states import waiting_form
from serving.engine.assembly.sizing import StoreSize
from serving.engine.steps.batching import BatchBuilder, PrefillShape

DEFAULT_CONTEXT = 2048


def make_plan(
    config: EngineConfig,
    target: Target,
    *,
    compile: bool = True,
    full: bool = False,
    whole_model: bool = False,
    context: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityPlan:
    """Plans a model on a machine.

    Args:
        config: the engine's flags; `config.model` is a directory or the name of a published size.
        target: the machine; the model is divided over all its devices.
        compile: have the compiler build the programs, for machines that it can be told of.
        full: all programs, not only the largest of decode and prefill.
        whole_model: compile all layers. Otherwise the figures follow from programs of a few layers (`layer_cuts`).
        context: tokens before each sequence's next one, for the bound of a decode step.
        progress: told what is being done.

    Raises:
        ConfigError: flags that do not fit together, a model that does not divide over the devices, no compiler.
    """
    compile = compile and target.topology is not None
    if compile:
        check_compiler(target)
    return _Planner(config, target, load_config(config.model, hf_overrides=config.hf_overrides)).plan(
        compile, full, whole_model, context, progress
    )


class _Planner:
    """Values that several stages of planning use."""

    def __init__(self, config: EngineConfig, target: Target, model: HybridConfig) -> None:
        self.config, self.target, self._target_model = config, target, model
        try:
            self._checkpoint = with_drafter_config(config, model)
        except CheckpointError as error:
            raise ConfigError(str(error)) from None
        self.dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
        self.kv_dtype = jnp.dtype(config.kv_dtype(self.dtype))
        self.memory = int(target.device.memory * config.memory_utilization)
        """Bytes of one device for weights, states and pages, as on the machine itself."""
        share = reserved_share(config.memory_utilization) if target.device.platform == "gpu" else 1.0
        self.limit = int(target.device.memory * share)
        """Bytes of one device that programs may use."""
        self._loaded = self._weights(target.count)
        self.design, self.counter, self.shapes = self._divided(target.count)
        self.model = self.design.model
        self.partition, self.replay = self.design.partition, self.design.replay.replay
        self.exchanges = collectives(self.model, self.partition)

    def _divided(self, count: int) -> tuple[EngineDesign, Counter, dict[str, jax.ShapeDtypeStruct]]:
        """The engine design for a number of devices, the counter of its bytes, and every parameter."""
        try:
            padding = HeadPadding.of(self._checkpoint, count)
            partition = Partition.of(padding.padded, count)
            shapes = {
                path: jax.ShapeDtypeStruct(padding.shape(path, leaf.shape), leaf.dtype) if padding.pads(path) else leaf
                for path, leaf in self._loaded.items()
            }
        except ModelConfigError as error:
            raise ConfigError(f"{self.target.name}: {error}") from None
        counter = Counter(
            padding.padded,
            partition,
            shapes,
            ssm_dtype=jnp.dtype(self.config.ssm_dtype),
            kv_dtype=self.kv_dtype,
            lanes=lanes_of(self.target.device.platform),
        )
        total = counter.weight_bytes * count
        platform = self.target.device.platform
        design = EngineDesign.of(self.config, padding, shards=count, platform=platform, weight_bytes=total)
        return design, counter, shapes

    @property
    def _dtype_name(self) -> str:
        """The dtype of the model, and narrower dtypes of its weights and pages, in words."""
        narrow = {leaf.dtype.name for path, leaf in self.shapes.items() if weight_of(path) and path.endswith(".values")}
        pages = self.kv_dtype.name if self.kv_dtype != self.dtype else ""
        return (
            self.dtype.name
            + (f", weights in {' and '.join(sorted(narrow))}" if narrow else "")
            + (f", keys and values in {pages}" if pages else "")
        )

    def _weights(self, shards: int) -> dict[str, jax.ShapeDtypeStruct]:
        """Every parameter as it would be loaded for this number of devices, before heads are padded."""
        config, mesh = self.config, AbstractMesh((shards,), (TENSOR,))
        try:
            padding = HeadPadding.of(self._target_model, shards)
            partition = Partition.of(padding.padded, shards)
            found = weight_shapes(
                config.model,
                dtype=self.dtype,
                quantization=config.quantization,
                quantization_exclude=config.excluded_from_quantization,
                hf_overrides=config.hf_overrides,
                sharding=functools.partial(padding.load_sharding, partition, mesh),
            )
            if self._checkpoint.drafter is not None:
                found = {path: leaf for path, leaf in found.items() if not path.startswith("mtp.")}
                found |= drafter_shapes(self._checkpoint, self.dtype)
            return found
        except (CheckpointError, ModelConfigError) as error:
            raise ConfigError(str(error)) from None

    def plan(
        self, compile: bool, full: bool, whole_model: bool, context: int | None, progress: Callable[[str], None]
    ) -> CapacityPlan:
        target, limit, design = self.target, self.limit, self.design
        weights, workspace = self.counter.weight_bytes, design.workspace_bytes
        try:
            size = self._size(design, weights)
        except ConfigError as error:
            return self._too_small(weights, workspace, str(error))
        batches = design.batches(design.scheduler(size))
        shapes = prefill_shapes(batches, full), decode_shapes(batches, full)
        rows = jax.eval_shape(lambda: design.rows(size))
        context = min(context or DEFAULT_CONTEXT, size.max_model_len)
        steps = [self._prefill_step(shape) for shape in shapes[0]]
        if batches.mixed_shapes:
            steps.append(self._mixed_step(shapes[1][-1], shapes[0][-1], context))
        steps += [self._decode_step(count, context) for count in shapes[1]]
        programs: tuple[Program, ...] = ()
        kernels, notes, begin = (
            "",
            [f"decoding keeps {design.replay.notice}", *size.notices, *self._padding_notes],
            time.perf_counter(),
        )
        if compile:
            try:
                cuts = [] if whole_model or not can_cut(self.model) else layer_cuts(self.model)
                programs, kernels = self._compile(size, rows, batches, shapes, cuts, progress)
                if cuts:
                    patterns = ", ".join(cut_config(self.model, cut).pattern for cut in cuts)
                    notes.append(
                        f"figures of programs are scaled from layers {patterns} to all {len(self.model.pattern)} "
                        "(--whole-model compiles all)"
                    )
            except jax.errors.JaxRuntimeError as error:
                # What does not fit is an answer, too.
                notes.append("the compiler refuses a program: " + " ".join(str(error).split())[:300])
        refused = compile and not programs
        kinds = [kind_of(batch) for batch in batches.warm_up_batches(1) if isinstance(batch, StepBatch)]
        code = code_of_all(programs, kinds)
        temporaries = max((p.temporaries for p in programs), default=workspace)
        other = self._bytes_of_seats(rows)
        spare = limit - weights - size.total_bytes - code - temporaries - other
        return CapacityPlan(
            model=self.config.model,
            target=target,
            dtype=self._dtype_name,
            parameters=num_parameters(self._loaded),
            fits=spare >= 0 and not refused,
            spare=spare,
            limit=limit,
            weights=weights,
            store=size.total_bytes,
            bytes_off_device=StoreShape.of(design.stored).bytes_per_waiting_state(
                self.dtype, self.config.ssm_dtype, waiting_form(self.config)
            ),
            code=code,
            temporaries=temporaries,
            other=other,
            size=size,
            steps=tuple(with_kernels(step, programs) for step in steps),
            context=context,
            exchanges=self.exchanges,
            programs=programs,
            num_programs=len(kinds),
            kernels=kernels,
            notes=tuple(notes),
            compile_seconds=time.perf_counter() - begin if compile else 0.0,
        )

    @property
    def _padding_notes(self) -> list[str]:
        padding = self.design.padding
        return [padding.notice] if padding else []

    def _bytes_of_seats(self, rows: Rows) -> int:
        """On one device."""
        mesh: Any = AbstractMesh((self.partition.shards,), (TENSOR,))
        pairs = zip(jax.tree.leaves(rows), jax.tree.leaves(rows_shardings(rows, mesh)), strict=True)
        return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in pairs)

    def _size(self, design: EngineDesign, weights: int) -> StoreSize:
        memory = self.memory - weights - design.workspace_bytes - self.config.reserved_bytes
        return design.size(memory=memory, dtype=self.dtype)

    def _too_small(self, weights: int, workspace: int, reason: str) -> CapacityPlan:
        """Not even one sequence fits: by how much, and where it would."""
        shape = self.design.device_shape
        config, width = self.config, 1 + self.config.num_speculative_tokens
        per_row = width if self.design.caching.mode == "none" else 2 * width
        slots = 1 + (per_row if self.replay is None else 2)
        page_size = config.page_size_on(self.target.device.platform)
        pages = 1 - (-(config.state_block_size + 2 * width) // page_size)
        least = slots * shape.bytes_per_slot(self.dtype, config.ssm_dtype)
        least += pages * shape.bytes_per_page(page_size, self.kv_dtype)
        if self.replay is not None:
            least += 2 * shape.bytes_per_tail(self.dtype, config.ssm_dtype, self.replay)
        notes = [f"{config.memory_utilization:.0%} of the memory is used (memory_utilization)", *self._padding_notes]
        if weights < self.memory - workspace - config.reserved_bytes:
            notes.append(reason)
        if enough := self._enough():
            notes.append(f"the smallest of its kind that holds it: {enough}")
        return CapacityPlan(
            model=config.model,
            target=self.target,
            dtype=self._dtype_name,
            parameters=num_parameters(self._loaded),
            fits=False,
            spare=self.memory - weights - workspace - least,
            limit=self.memory,
            weights=weights,
            store=least,
            code=0,
            temporaries=workspace,
            other=0,
            size=None,
            exchanges=self.exchanges,
            notes=tuple(notes),
        )

    def _enough(self) -> str | None:
        for bigger in larger(self.target):
            try:
                design, counter, _ = self._divided(bigger.count)
                self._size(design, counter.weight_bytes)
            except ConfigError:
                continue
            return bigger.name
        return None

    def _step(self, name: str, *loads: Workload, emitted: int, counted: int) -> Step:
        device, work = self.target.device, self.counter.work(*loads)
        memory, compute = work.bytes / device.bandwidth, work.flops / device.flops
        shards = self.partition.shards
        # A sum over a ring sends each byte 2 (n - 1) / n times, at half of what goes both ways.
        link = 2 * (shards - 1) / shards * work.collective_bytes / (device.link / 2)
        bound = max(memory, compute) + link
        kernels = decode_kernels(self.model) if device.platform == "gpu" else 0
        return Step(
            name=name,
            tokens=sum(load.tokens for load in loads),
            emitted=emitted,
            work=work,
            without_keys=self.counter.work(*(dataclasses.replace(load, keys_read=0) for load in loads)).bytes,
            memory_ms=memory * 1e3,
            compute_ms=compute * 1e3,
            link_ms=link * 1e3,
            bound_ms=bound * 1e3,
            latency_ms=sum(self.exchanges.values()) * device.exchange * 1e3,
            launch_ms=kernels * KERNEL_SECONDS * 1e3,
            kernels=kernels,
            host_ms=HOST_SECONDS * 1e3,
            tokens_per_second=counted / bound,
        )

    def _decode_load(self, rows: int, context: int) -> Workload:
        drafts = self.config.num_speculative_tokens
        return decode_workload(rows=rows, drafts=drafts, context=context, replay=self.replay)

    def _prefill_load(self, shape: PrefillShape) -> Workload:
        return prefill_workload(tokens=shape.tokens, rows=shape.rows, tile_size=self.config.tile_size)

    def _decode_step(self, rows: int, context: int) -> Step:
        return self._step(decode_name(rows), self._decode_load(rows, context), emitted=rows, counted=rows)

    def _prefill_step(self, shape: PrefillShape) -> Step:
        return self._step(prefill_name(shape), self._prefill_load(shape), emitted=shape.rows, counted=shape.tokens)

    def _mixed_step(self, rows: int, shape: PrefillShape, context: int) -> Step:
        loads = self._decode_load(rows, context), self._prefill_load(shape)
        emitted, counted = rows + shape.rows, rows + shape.tokens
        return self._step(mixed_name(rows, shape), *loads, emitted=emitted, counted=counted)

    def _compile(
        self,
        size: StoreSize,
        rows: Any,
        builder: BatchBuilder,
        shapes: tuple[list[PrefillShape], list[int]],
        cuts: Sequence[Cut],
        progress: Callable[[str], None],
    ) -> tuple[tuple[Program, ...], str]:
        drafts = self.config.num_speculative_tokens
        batches: list[tuple[str, DecodeBatch | PrefillBatch]] = [
            *((decode_name(count), builder.empty_decode(count, drafts)) for count in shapes[1]),
            *((prefill_name(shape), builder.empty_prefill(shape)) for shape in shapes[0]),
        ]
        progress(f"compiling {len(batches) * max(1, len(cuts))} programs")
        compilers = [self._compiler(size, rows, cut) for cut in cuts or [tuple(range(len(self.model.pattern)))]]
        programs = [compiler.compile(batches, progress) for compiler in compilers]
        # A cut with more layers says as much of how operations run.
        report = compilers[-1].choice.report()
        return tuple(whole_programs(self.model, programs) if cuts else programs[0]), report

    def _compiler(self, size: StoreSize, rows: Any, cut: Cut) -> SlicePrograms:
        """For the programs of some of the layers."""
        model, stored = (cut_config(each, cut) for each in (self.model, self.design.stored))
        arguments = self.design.store_arguments(size, dtype=self.dtype)
        routed_experts = self.config.enable_return_routed_experts
        shape = self.partition.store_shape(StoreShape.of(stored, routed_experts=routed_experts))
        try:
            return SlicePrograms(
                HybridModel.from_parameters(model, cast(Mapping[str, jax.Array], cut_parameters(self.shapes, cut))),
                slice_mesh(self.target),
                store=jax.eval_shape(lambda: init_store(shape, **arguments)),
                rows=rows,
                tile_size=self.config.tile_size,
                source=self.design.source,
                kernels=self.config.kernels,
            )
        except UnsupportedError as error:
            raise ConfigError(str(error)) from None


def with_kernels(step: Step, programs: Sequence[Program]) -> Step:
    """The step with the number of kernels in its compiled program, if it has one for a GPU."""
    kernels = next((program.kernels for program in programs if program.name == step.name), 0)
    if not kernels:
        return step
    return dataclasses.replace(step, kernels=kernels, launch_ms=kernels * KERNEL_SECONDS * 1e3)
