"""Compiled programs of a step: one for each batch shape, with a donated store."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from kernels_pallas.dispatch import KernelChoice
from kernels_pallas.dispatch import UnsupportedError as UnsupportedError  # errors that the choice may raise
from kernels_pallas.fixed_order import COMPILER_OPTIONS as INVARIANT_OPTIONS
from kernels_pallas.fixed_order import INTERPRETED as INVARIANT_INTERPRETED
from kernels_pallas.fixed_order import NAME as INVARIANT
from kernels_pallas.native import WHY_MISSING as WHY_NOT_INVARIANT  # noqa: F401 - why they cannot run
from kernels_pallas.native import instructions as instructions  # of native operations
from mamba_jax.adapters import AdapterEntry, Adapters, LayerMatrices
from mamba_jax.batch import DecodeBatch, MixedBatch, Packing, PageTableBatch, PrefillBatch, SeatBatch, pack
from mamba_jax.drafts import DraftSource
from mamba_jax.model import HybridModel
from mamba_jax.program_cache import ProgramCache
from mamba_jax.rows import Rows, rows_shardings
from mamba_jax.sampling.masks import MaskBatch
from mamba_jax.sampling.table import DEFAULT_LOGPROBS
from mamba_jax.sequences import check_ids
from mamba_jax.sharding import replicated, use_mesh
from mamba_jax.sharding.axis import has_slow_links
from mamba_jax.step import mask, seat, set_page_table, step
from mamba_jax.store import Store, StoreShape
from mamba_jax.store_layout import is_pinned, places

_GRAPH_COMMANDS = "FUSION,CUBLAS,CUBLASLT,CUSTOM_CALL,CUDNN,DYNAMIC_SLICE_FUSION,COLLECTIVES,CONDITIONAL,WHILE"
RowsBatch = SeatBatch | MaskBatch | PageTableBatch
"""Batches that change only the seats."""
StepBatch = DecodeBatch | PrefillBatch | MixedBatch
Batch = StepBatch | RowsBatch


class StoredPrograms(Protocol):
    """Programs that outlive the process."""

    def find(
        self,
        arguments: tuple[Any, ...],
        lower: Callable[[], jax.stages.Lowered],
        compiler_options: Mapping[str, Any],
        kernels: KernelChoice,
    ) -> jax.stages.Compiled: ...


class StepPrograms:
    """Runs steps of one model by compiled programs, and counts the compilations.

    Programs are compiled ahead of time, one for each shape of batch (and of store and rows). `compilations` therefore
    counts exactly what XLA compiled; after `program` for every shape in use, it must not grow.

    Store and rows are donated: the arrays passed in are invalid afterwards, even if the step fails.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        tile_size: int = 128,
        source: DraftSource | None = None,
        compiler_options: Mapping[str, Any] | None = None,
        mesh: Mesh | None = None,
        kernels: KernelChoice | None = None,
        processed_logprobs: bool = False,
        sampling_masks: bool = False,
        adapters: Adapters | None = None,
        greedy: bool = False,
        max_logprobs: int = DEFAULT_LOGPROBS,
        slow_links: bool | None = None,
    ) -> None:
        """`source` makes drafts. `compiler_options` are XLA's, as `jax.stages.Lowered.compile` takes them, added to
        those of the platform (`platform_options`). `kernels` chooses the implementation of each operation,
        and can report it once programs have been compiled. `processed_logprobs`, `sampling_masks`, `max_logprobs`: see
        `mamba_jax.step.step`. With `adapters`, the programs add each row's adapter; loading and removing adapters
        compiles nothing. `greedy` programs leave out sampling, over a third of what is compiled, and refuse rows that
        sample.

        With a `mesh`, the model's parameters and the stores passed in must be sharded over it by `mamba_jax.sharding`.
        The model and the stores may be abstract: programs can then be compiled, even for devices that are absent.
        `slow_links`: whether links between its members are slow; None: as the devices say.
        """
        graphdef, state = nnx.split(model)
        # A plain tuple of arrays: flattening nnx's state for every call would cost more than dispatching the step.
        flat = nnx.to_flat_state(state)
        weights = [leaf.get_value() for _, leaf in flat]
        empty = [(path, leaf.replace(None)) for path, leaf in flat]
        self._place_of = {".".join(map(str, path)): place for place, (path, _) in enumerate(flat)}
        self.tile_size, self.source, self.mesh = tile_size, source, mesh
        self.kernels = kernels or KernelChoice()
        self._num_weights = len(weights)
        if adapters is not None:
            weights += adapters.arrays
        self.adapters = adapters
        self._weights = tuple(weights)
        """The model's parameters, then the arrays of the adapters."""
        # Compilation uses these in place of the weights, because a long compilation must not keep replaced ones alive.
        self._like_weights = abstract(self._weights)
        self.sampling_masks, self.max_logprobs = sampling_masks, max_logprobs
        self._reported = processed_logprobs, sampling_masks, max_logprobs
        self.slow_links = has_slow_links(mesh) if slow_links is None else slow_links
        self.greedy = greedy
        platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
        self._compiler_options = platform_options(platform) | dict(compiler_options or {})
        if self.kernels.named in (INVARIANT, INVARIANT_INTERPRETED):
            self._compiler_options |= INVARIANT_OPTIONS

        def run(weights: tuple[jax.Array, ...], store: Store, rows: Rows, batch: Any) -> tuple[Store, Rows, Any]:
            own, added = weights[: len(empty)], weights[len(empty) :]
            filled = [(path, leaf.replace(value)) for (path, leaf), value in zip(empty, own, strict=True)]
            model: Any = nnx.merge(graphdef, nnx.from_flat_state(filled))
            if adapters is not None:
                adapters.attach(model, added)
            options = processed_logprobs, sampling_masks, self.greedy, max_logprobs, self.slow_links
            return step(model, store, rows, batch, source, *options)

        self.kept: StoredPrograms | None = None
        """Programs on disk: read before a program is compiled, and written after."""
        self._graphdef = graphdef
        self._shape, self.vocab_size = StoreShape.of(model.config), model.config.vocab_size
        self._run = run
        self._change_rows: dict[type[RowsBatch], Callable[..., Rows]] = {
            SeatBatch: partial(seat, source=source),
            MaskBatch: mask,
            PageTableBatch: set_page_table,
        }
        self.cache = ProgramCache()

    @property
    def weights(self) -> dict[str, jax.Array]:
        """The weights of the programs, by dotted path as in `mamba_jax.model.parameters`."""
        return {path: self._weights[place] for path, place in self._place_of.items()}

    def replace_weight(self, path: str, value: jax.Array | jax.ShapeDtypeStruct) -> None:
        """Makes all later steps use another value of one parameter, of the same shape, dtype and sharding.

        The programs do not change. An abstract value releases the previous one; no step can run until it is replaced
        by a real value.

        Raises:
            ValueError: the value would need other programs.
        """
        place = self._place_of[path]
        held = self._weights[place]
        for what in ("shape", "dtype", "sharding"):
            new, old = getattr(value, what), getattr(held, what)
            if new != old:
                raise ValueError(f"{path} has {what} {new}, expected {old}")
        self._weights = (*self._weights[:place], value, *self._weights[place + 1 :])

    def replace_adapter(self, entry: int, adapter: LayerMatrices | AdapterEntry) -> None:
        """Makes all later steps use another adapter for rows with this entry; see `Adapters.put`.

        Raises:
            ValueError: the programs have no such entry, or a layer does not fit.
        """
        if self.adapters is None:
            raise ValueError("these programs have no adapters")
        self.adapters.put(entry, adapter, self.weights)
        self._weights = (*self._weights[: self._num_weights], *self.adapters.arrays)

    @property
    def compilations(self) -> int:
        """How many programs have been compiled so far, or taken from those that were kept."""
        return len(self.cache)

    @property
    def devices(self) -> list[jax.Device]:
        """The devices of the programs."""
        return list(self._weights[0].devices() if self.mesh is None else self.mesh.devices.flat)

    @property
    def description(self) -> str:
        """Everything that determines a program, except its arguments, the source text and JAX's settings."""
        parts = (
            self._graphdef,
            self.tile_size,
            self.source,
            self._compiler_options,
            self.mesh,
            self.slow_links,
            self.kernels.description,
            self._reported,
            self.greedy,
            *([] if self.adapters is None else self.adapters.layers),
        )
        # Functions among the model's attributes are described by name; their addresses vary between runs.
        return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(map(repr, parts)))

    def change_rows(self, rows: Rows, batch: RowsBatch) -> Rows:
        """Seats a request, or changes a row's masks or page table. Call it before the step that needs the change.

        Raises:
            ValueError: greedy programs, and the row samples or may not choose every token.
        """
        if self.greedy and samples(batch):
            raise ValueError("greedy programs cannot run a request that samples; make StepPrograms with greedy=False")
        found: Rows = self.cache.run(
            type(batch).__name__, (rows, batch), lambda: self._make(None, rows, batch), donated=1
        )
        return found

    def step(self, store: Store, rows: Rows, batch: StepBatch) -> tuple[Store, Rows, Any]:
        """One step of any kind, which reads the weights once; returns as soon as it is dispatched. The output is a
        `StepOutput`, of a mixed step one for the decode rows and one for the prefill rows.

        Raises:
            ValueError: a prefill batch of another tile size, or a token that is not in the vocabulary.
        """
        self._check(batch)
        words = (
            np.concatenate([pack(batch.decode), pack(batch.prefill)]) if isinstance(batch, MixedBatch) else pack(batch)
        )
        found: tuple[Store, Rows, Any] = self.cache.run(
            type(batch).__name__,
            (store, rows, batch),
            lambda: self._make(store, rows, batch),
            always=(self._weights,),
            sends=(store, rows, words),
            donated=2,
        )
        return found

    def program(self, store: Store | None, rows: Rows, batch: Batch) -> jax.stages.Compiled:
        """Returns the program for batches of this shape, compiled now unless it has been before. Nothing is run.

        Raises:
            ValueError: a prefill batch of another tile size.
        """
        self._check(batch)
        arguments = (rows, batch) if isinstance(batch, RowsBatch) else (store, rows, batch)
        return self.cache.find(type(batch).__name__, arguments, lambda: self._make(store, rows, batch))

    def _check(self, batch: Batch) -> None:
        for part in (batch.decode, batch.prefill) if isinstance(batch, MixedBatch) else (batch,):
            if isinstance(part, PrefillBatch) and part.tile_size != self.tile_size:
                raise ValueError(f"a batch with tiles of {part.tile_size}: the programs have {self.tile_size}")
            if isinstance(part, DecodeBatch | PrefillBatch) and isinstance(part.tokens, np.ndarray):
                given = part.tokens != -1 if isinstance(part, DecodeBatch) else True  # -1: it is on the device
                check_ids(self.vocab_size, part.tokens, given)

    def _make(self, store: Store | None, rows: Rows, batch: Batch) -> jax.stages.Compiled:
        def lower() -> jax.stages.Lowered:
            with self.kernels.applied():
                return self.lower(store, rows, batch)

        if self.kept is None:
            return lower().compile(self._compiler_options)
        arguments = (rows, batch) if isinstance(batch, RowsBatch) else (self._like_weights, store, rows, batch)
        return self.kept.find(arguments, lower, self._compiler_options, self.kernels)

    def lower(self, store: Store | None, rows: Rows, batch: Batch) -> jax.stages.Lowered:
        """Returns the program for batches of this shape before it is compiled."""
        whole = None if self.mesh is None else replicated(self.mesh)

        # Data from the host are replicated on all devices; the store keeps its sharding.
        def everywhere(leaf: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(leaf), leaf.dtype, sharding=whole)

        with use_mesh(self.mesh):
            seats = None if self.mesh is None else rows_shardings(rows, self.mesh)
            if isinstance(batch, RowsBatch):
                changing = jax.jit(self._change_rows[type(batch)], donate_argnums=(0,), out_shardings=seats)
                return changing.lower(rows, jax.tree.map(everywhere, batch))
            assert store is not None
            packing = Packing.of(batch)

            def run(weights: tuple[jax.Array, ...], store: Store, rows: Rows, words: jax.Array) -> Any:
                return self._run(weights, store, rows, packing.unpack(words))

            divided = self.mesh is not None or is_pinned(self._shape, store)
            out: Any = (places(self._shape, store), seats, whole) if divided else None
            stepping = jax.jit(run, donate_argnums=(1, 2), out_shardings=out)
            words = jax.ShapeDtypeStruct((packing.size,), np.int32, sharding=whole)
            return stepping.lower(self._like_weights, store, rows, words)

    def trace(self, store: Store, rows: Rows, batch: StepBatch) -> None:
        """Traces a step, which chooses the implementations of its operations (`kernels`), and compiles no program."""
        with self.kernels.applied(), use_mesh(self.mesh):
            jax.eval_shape(self._run, self._like_weights, store, rows, batch)


def samples(batch: RowsBatch) -> bool:
    """Whether steps after this change may choose another token than the model's most likely one."""
    return isinstance(batch, MaskBatch) or (isinstance(batch, SeatBatch) and not batch.sampling.is_greedy)


def abstract(tree: Any) -> Any:
    """Returns shapes, dtypes and shardings of arrays, to compile while other programs use and donate the arrays."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return leaf
        # On a TPU some arrays are pinned to an order of their axes.
        pinned = next(iter(leaf.devices())).platform == "tpu"
        lies = leaf.format if pinned else leaf.sharding
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=lies, weak_type=leaf.weak_type)

    return jax.tree.map(of, tree)


def platform_options(platform: str) -> dict[str, Any]:
    """Options for step programs on `platform`, as `jax.stages.Lowered.compile` takes them.

    On a GPU, XLA puts kernels into CUDA graphs, by default without conditionals, loops and collectives. A decode step
    has two conditionals (sampling and log-probabilities), so it would be several graphs with single kernels between
    them, each of which the host launches. With these options a decode step is one graph. XLA leaves out what the
    driver does not support.
    """
    return {"xla_gpu_enable_command_buffer": _GRAPH_COMMANDS} if platform in ("gpu", "cuda") else {}
