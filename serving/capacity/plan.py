"""Plans a model on a machine: the memory that it needs, the memory left for sequences, and the bounds of a step."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from checkpoints.drafts import drafter_shapes
from checkpoints.errors import CheckpointError, one_line
from checkpoints.load import load_config
from mamba_jax.config import LATENT, HybridConfig, ModelConfigError
from mamba_jax.head_padding import HeadPadding
from mamba_jax.model import HybridModel, num_parameters
from mamba_jax.modules.quantized import weight_of
from mamba_jax.programs import INVARIANT, StepBatch, UnsupportedError
from mamba_jax.rows import Rows, rows_shardings
from mamba_jax.sharding import TENSOR, Partition
from mamba_jax.store import StoreShape, init_store
from mamba_jax.store_layout import lanes_of
from serving.capacity.compiling import Program, SlicePrograms, check_compiler, slice_mesh
from serving.capacity.count import LONG_CONTEXTS, Counter, LongContext, Step, bounds
from serving.capacity.targets import Target, larger
from serving.config import ConfigError, EngineConfig
from serving.engine.assembly.design import EngineDesign, waiting_form
from serving.engine.assembly.devices import adapters_of
from serving.engine.assembly.drafting import with_drafter_config
from serving.engine.assembly.fetch import checkpoint_of
from serving.engine.assembly.gpu_memory import reserved_share
from serving.engine.assembly.sizing import StoreSize, StoreTooSmallError
from serving.engine.steps.batching import PrefillShape

DEFAULT_CONTEXT = 2048


@dataclass(frozen=True)
class CapacityPlan:
    """The report of `mamba-jax plan`. Bytes are per device."""

    model: str
    target: Target
    dtype: str
    parameters: int
    fits: bool
    spare: int
    """Bytes left (negative: missing) after weights, store, programs and temporaries."""
    limit: int
    """Bytes that programs and data may have together."""
    weights: int
    store: int
    temporaries: int
    notes: tuple[str, ...]
    members: int
    """Over which keys and values are divided."""
    size: StoreSize | None = None
    """None where not even one sequence fits."""
    code: int = 0
    other: int = 0
    """Seats and adapters."""
    steps: tuple[Step, ...] = ()
    context: int = 0
    """Tokens before each sequence's next one that decode steps are counted with."""
    long_contexts: tuple[LongContext, ...] = ()
    """Those of `LONG_CONTEXTS` that sequences may have."""
    bytes_off_device: int = 0
    """Of one state in host memory, on disk or on its way to another worker; without keys and values."""
    programs: tuple[Program, ...] = ()
    """Those that were compiled; empty if nothing was."""
    num_programs: int = 0
    """Step programs that an engine compiles in all."""
    kernels: str = ""
    compile_seconds: float = 0.0

    @property
    def compiled(self) -> bool:
        """Whether the figures are the compiler's, or estimates."""
        return bool(self.programs)

    def sequences_at(self, tokens: int) -> tuple[int, str]:
        """Returns the number of sequences of `tokens` tokens that run at once, and their limit: `pages` or
        `max_num_seqs`."""
        if self.size is None:
            return 0, "memory"
        count = self.size.sequences_at(tokens)
        return count, "pages" if count < self.size.max_num_seqs else "max_num_seqs"


def make_plan(
    config: EngineConfig,
    target: Target,
    *,
    compile: bool = True,
    full: bool = False,
    context: int | None = None,
    progress: Callable[[str], None] = lambda text: None,
) -> CapacityPlan:
    """Plans a model on a machine.

    Args:
        config: the engine's flags; `config.model` is a directory or the name of a published size.
        target: the machine; the model is divided over all its devices, whatever `config.tensor_parallel_size` says.
        compile: have the compiler build the programs, for machines that it can be told of.
        full: all programs, not only the largest of each kind.
        context: tokens before each sequence's next one, for the bound of a decode step.
        progress: told what is being done.

    Raises:
        ConfigError: flags that do not fit together, a model that does not divide over the devices, no compiler.
    """
    compile = compile and target.topology is not None
    if compile:
        check_compiler(target)
    model = load_config(config.model, hf_overrides=config.hf_overrides)
    try:
        return _Planner(config, target, model).plan(compile, full, context, progress)
    except (CheckpointError, ModelConfigError) as error:
        raise ConfigError(f"{target.name}: {error}") from None


class _Planner:
    """A model on one machine: the bytes that it takes there, and those that it leaves. `loaded`: every parameter before
    it is padded, if they are known."""

    def __init__(
        self, config: EngineConfig, target: Target, model: HybridConfig, loaded: dict[str, Any] | None = None
    ) -> None:
        self.target, self._undivided = target, model
        platform, members = target.device.platform, config.context_parallel_size
        if target.count % members:
            raise ConfigError(f"context_parallel_size {members} does not divide {target.count} device(s)")
        shards = target.count // members
        self.config = config = config.model_copy(update={"tensor_parallel_size": shards})
        self.dtype = jnp.dtype("bfloat16" if config.dtype == "auto" else config.dtype)
        self.kv_dtype = jnp.dtype(config.kv_dtype(self.dtype))
        self.mesh: Any = AbstractMesh((shards,), (TENSOR,))
        described = with_drafter_config(config, model)
        padding = HeadPadding.of(described, shards)
        self.model, self.partition = padding.padded, Partition.of(padding.padded, shards, members)
        self.loaded = loaded or self._shapes(described)
        self.shapes: Any = {
            path: jax.ShapeDtypeStruct(padding.shape(path, leaf.shape), leaf.dtype) if padding.pads(path) else leaf
            for path, leaf in self.loaded.items()
        }
        self.counter = Counter(
            self.model,
            self.partition,
            self.shapes,
            ssm_dtype=jnp.dtype(config.ssm_dtype),
            kv_dtype=self.kv_dtype,
            lanes=lanes_of(platform),
        )
        total = self.counter.weight_bytes * shards
        self.design = EngineDesign.of(config, padding, shards=shards, platform=platform, weight_bytes=total)
        self.replay = self.design.replay.replay
        self.adapter_bytes = 0
        if config.enable_lora:
            whole = HybridModel.from_parameters(self.model, self.shapes)
            adapters = adapters_of(config, whole, self.mesh, abstract=True)  # type: ignore[arg-type]
            assert adapters is not None
            self.adapter_bytes = _bytes_of_one((leaf, leaf.sharding) for leaf in adapters.arrays)
        self.memory = int(target.device.memory * config.memory_utilization)
        """Bytes of one device for weights, states and pages, as on the machine itself."""
        taken = self.counter.weight_bytes + self.design.workspace_bytes + self.design.code_bytes + self.adapter_bytes
        self.free = self.memory - taken - config.reserved_bytes
        """Bytes of one device for states and pages."""
        self._padding_notes = [padding.notice] if padding else []

    def _shapes(self, described: HybridConfig) -> dict[str, jax.ShapeDtypeStruct]:
        padding = HeadPadding.of(self._undivided, self.partition.shards)
        partition = Partition.of(padding.padded, self.partition.shards)
        checkpoint = checkpoint_of(self.config, self.dtype)
        found = checkpoint.shapes(functools.partial(padding.load_sharding, partition, self.mesh))
        if described.drafter is not None:
            found = {path: leaf for path, leaf in found.items() if not path.startswith("mtp.")}
            found |= drafter_shapes(described, self.dtype)
        return found

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

    def size(self) -> StoreSize:
        """The numbers of slots and pages that fit."""
        return self.design.size(memory=self.free, dtype=self.dtype)

    def plan(
        self,
        compile: bool = False,
        full: bool = False,
        context: int | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> CapacityPlan:
        design, device, drafts = self.design, self.target.device, self.config.num_speculative_tokens
        limit = int(device.memory * (reserved_share(self.config.memory_utilization) if device.platform == "gpu" else 1))
        try:
            size = self.size()
        except StoreTooSmallError as error:
            return self._too_small(error)
        batches = design.batches(design.scheduler(size))
        prefills, decodes, mixed = batches.prefill_shapes, batches.decode_shapes, batches.mixed_shapes
        if not full:  # only the widest ones, and of prefill the one for long prompts: most tokens, few rows
            prefills = [next(shape for shape in prefills if shape.tokens == prefills[-1].tokens)]
            decodes, mixed = decodes[-1:], mixed[-1:]
        rows = jax.eval_shape(lambda: design.rows(size))
        context = min(context or DEFAULT_CONTEXT, size.max_model_len)
        steps: list[Step] = []
        for shape in prefills:
            work = self.counter.prefill(tokens=shape.tokens, rows=shape.rows, tile_size=self.config.tile_size)
            steps.append(bounds(_prefill_name(shape), shape.tokens, work, device, counted=shape.tokens))
        for count in dict.fromkeys(min(rows, size.sequences_at(context)) for rows in decodes):
            work = self.counter.decode(rows=count, drafts=drafts, context=context, replay=self.replay)
            steps.append(bounds(_decode_name(count), count * (1 + drafts), work, device, counted=count))
        notes = [f"decoding keeps {design.replay.notice}", *size.notices, *self._padding_notes]
        programs: tuple[Program, ...] = ()
        kinds: tuple[Sequence[tuple[str, StepBatch]], ...] = ()
        kernels, begin = "", time.perf_counter()
        if compile:
            kinds = (
                [(_decode_name(count), batches.empty_decode(count, drafts)) for count in decodes],
                [(_prefill_name(shape), batches.empty_prefill(shape)) for shape in prefills],
                [(f"{_prefill_name(shape)}, with decode", batches.empty_mixed(shape)) for shape in mixed],
            )
            named: list[tuple[str, StepBatch]] = list(itertools.chain(*kinds))
            progress(f"compiling {len(named)} programs")
            compiler = self._compiler(size, rows)
            try:
                programs = tuple(compiler.compile(named, progress))
            except jax.errors.JaxRuntimeError as error:  # what does not fit is an answer, too
                notes.append("the compiler refuses a program: " + one_line(error))
            kernels = compiler.choice.report()
        refused = compile and not programs
        code = 0 if programs else design.code_bytes
        for kind, count in zip(kinds, batches.step_programs, strict=bool(kinds)):
            codes = [program.code for program in programs if program.name in dict(kind)]
            # Programs that are not compiled are narrower ones, and count as the largest.
            code += sum(codes) + (count - len(codes)) * max(codes, default=0)
        temporaries = max((p.temporaries for p in programs), default=design.workspace_bytes)
        places = jax.tree.leaves(rows_shardings(rows, self.mesh))
        other = _bytes_of_one(zip(jax.tree.leaves(rows), places, strict=True)) + self.adapter_bytes
        spare = limit - self.counter.weight_bytes - size.total_bytes - code - temporaries - other
        long_contexts = [
            self.counter.long_context(n, size, design.step_tokens, device, self.replay)
            for n in LONG_CONTEXTS
            if n <= size.max_model_len
        ]
        # Number of devices that have the same keys and values; of latents all have.
        attention, copies = self.model.attention, self.partition.shards
        copies //= 1 if LATENT in self.model.pattern else attention.num_kv_heads if attention else copies
        if long_contexts and copies > 1:
            notes.append(
                f"{copies} devices hold the same keys and values: there are fewer heads of them than devices"
                + self._with_members(copies * self.partition.members, long_contexts[-1])
            )
        return self._report(
            fits=spare >= 0 and not refused,
            spare=spare,
            limit=limit,
            store=size.total_bytes,
            bytes_off_device=StoreShape.of(design.stored).bytes_per_waiting_state(
                self.dtype, self.config.ssm_dtype, waiting_form(self.config)
            ),
            code=code,
            temporaries=temporaries,
            other=other,
            size=size,
            steps=tuple(steps),
            context=context,
            long_contexts=tuple(long_contexts),
            programs=programs,
            num_programs=sum(batches.step_programs),
            kernels=kernels,
            notes=tuple(notes),
            compile_seconds=time.perf_counter() - begin if compile else 0.0,
        )

    def _report(self, **figures: Any) -> CapacityPlan:
        return CapacityPlan(
            model=self.config.model,
            target=self.target,
            dtype=self._dtype_name,
            parameters=num_parameters(self.loaded),
            weights=self.counter.weight_bytes,
            members=self.config.context_parallel_size,
            **figures,
        )

    def _with_members(self, members: int, here: LongContext) -> str:
        """Whether divided pages hold more of the longest sequences, and what they cost; empty if nothing fits then."""
        config = self.config.model_copy(update={"context_parallel_size": members})
        try:
            found = _Planner(config, self.target, self._undivided, self.loaded).plan()
        except (ConfigError, ModelConfigError):
            return ""
        there = next((each for each in found.long_contexts if each.tokens == here.tokens and found.fits), None)
        if there is None:
            return ""
        use = "use" if there.sequences > here.sequences else "do not use"
        return (
            f"; {use} --context-parallel-size {members} for {here.tokens:,} tokens: {there.sequences:,} sequences at "
            f"once instead of {here.sequences:,}, first token after {there.first_token_s:,.1f} s instead of "
            f"{here.first_token_s:,.1f} s, next token after {there.decode_ms:.2f} ms instead of {here.decode_ms:.2f} ms"
        )

    def _too_small(self, error: StoreTooSmallError) -> CapacityPlan:
        """Not even one sequence fits: by how much, and where it would."""
        notes = [f"{self.config.memory_utilization:.0%} of the memory is used (memory_utilization)"]
        notes += self._padding_notes
        if self.free > 0:
            notes.append(str(error))
        for bigger in larger(self.target):
            with contextlib.suppress(ConfigError, ModelConfigError):
                _Planner(self.config, bigger, self._undivided, self.loaded).size()
                notes.append(f"the smallest of its kind that holds it: {bigger.name}")
                break
        return self._report(
            fits=False,
            spare=self.free - error.needed,
            limit=self.memory,
            store=error.needed,
            code=self.design.code_bytes,
            temporaries=self.design.workspace_bytes,
            other=self.adapter_bytes,
            notes=tuple(notes),
        )

    def _compiler(self, size: StoreSize, rows: Rows) -> SlicePrograms:
        arguments = self.design.store_arguments(size, dtype=self.dtype)
        described = StoreShape.of(self.design.stored, routed_experts=self.config.enable_return_routed_experts)
        shape, invariant = self.partition.store_shape(described), self.config.schedule_invariant
        try:
            return SlicePrograms(
                HybridModel.from_parameters(self.model, self.shapes),
                slice_mesh(self.target, self.config.context_parallel_size),
                store=jax.eval_shape(lambda: init_store(shape, **arguments)),
                rows=rows,
                tile_size=self.config.tile_size,
                source=self.design.source,
                kernels=INVARIANT if invariant and self.config.kernels == "auto" else self.config.kernels,
                adapters=functools.partial(adapters_of, self.config, abstract=True),
            )
        except UnsupportedError as error:
            raise ConfigError(str(error)) from None


def _bytes_of_one(arrays: Iterable[tuple[Any, Any]]) -> int:
    """Bytes on one device of arrays with their shardings."""
    return sum(math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf, place in arrays)


def _decode_name(rows: int) -> str:
    return f"decode, {rows} rows"


def _prefill_name(shape: PrefillShape) -> str:
    return f"prefill, {shape.tokens:,} tokens of {shape.rows} rows"
