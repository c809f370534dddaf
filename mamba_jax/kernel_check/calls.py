"""The calls of operations in a model's steps, as shapes: found by tracing, so that they are those of the model."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, use_abstract_mesh
from jax.typing import DTypeLike

from kernels_pallas.dispatch import Implementation, KernelChoice
from kernels_pallas.paged_attention.api import PARTS
from kernels_pallas.quantized import Quantized
from mamba_jax.batch import DecodeBatch, PrefillBatch
from mamba_jax.config import SHARED, HybridConfig
from mamba_jax.model import HybridModel, parameters
from mamba_jax.modules.quantized import quantize_in_place
from mamba_jax.programs import StepBatch, StepPrograms
from mamba_jax.rows import init_rows
from mamba_jax.sharding.axis import CONTEXT, TENSOR
from mamba_jax.store import Replay, StoreShape, init_store

NAMES = {
    "recurrence_scan": "entry store tiles",
    "recurrence_update": "entry store rows",
    "recurrence_replay": "entry store tail places",
    "gated_scan": "zx query key log_decay strength weights store windows packed",
    "gated_update": "projections weights store windows rows",
    "gated_replay": "projections weights store tail windows places",
    "selective_scan": "entry store tiles",
    "selective_update": "entry store rows",
    "selective_replay": "entry store tail places",
    "causal_conv1d_prefill": "x taps bias windows packed",
    "causal_conv1d_update": "x taps bias windows rows",
    "paged_attention": "x kv",
    "paged_attention_part": "x kv",
    "grouped_matmul": "x weight group_sizes",
    "quantized_grouped_matmul": "x weight group_sizes",
    "expert_choice": "scores bias valid first",
    "expert_mlp": "x up down order place sizes",
    "linear": "x weight",
    "quantized_linear": "x weight",
    "linear_pair": "x first_weight second_weight",
    "read_windows": "windows index",
    "write_windows": "windows x index",
    "gated_rms_norm": "y gate norm",
}
"""Names of the arguments by place. An operation that is not here has no kernel, and is not compared."""
_OTHERS = ("invariant", "invariant_interpreted", "narrow_inputs")
"""Implementations that are no kernels: by definition they round in another way than the plain form."""
STORES = ("store", "tail", "windows")
"""What an operation updates: results after y, in the order of its arguments."""


@dataclasses.dataclass(frozen=True)
class Call:
    """One operation with the shapes of its arguments."""

    phase: str
    """The step that makes it."""
    operation: str
    candidates: Sequence[Implementation]
    """The last one is the plain form."""
    arguments: Mapping[str, Any]
    """Arrays as `jax.ShapeDtypeStruct`, and other values; those with a name in `NAMES` are passed by place."""
    inner: bool = False
    """Only the plain form of another operation makes it, so that a model does where that one has no kernel."""

    @property
    def plain(self) -> str:
        """The name of the implementation in plain JAX."""
        return self.candidates[-1].name

    @property
    def label(self) -> str:
        """For reports."""
        return f"{self.operation}, {self.phase}"

    def kernels(self, platform: str, *, interpreted: bool = False) -> list[str]:
        """Names of the implementations that the automatic choice may take before the plain form; with `interpreted`,
        those of GPUs in Pallas' interpreter instead, or else those of TPUs."""
        args, kwargs = self.split(self.arguments)
        able = [
            one for one in self.candidates[:-1]
            if one.name not in _OTHERS and one.platform in (None, platform) and not one.why_not(args, kwargs)
        ]  # fmt: skip
        if interpreted:
            names = [one.name for one in able if one.name.endswith("_interpreted")]
            return sorted(names)[:1]
        return [one.name for one in able if one.automatic]

    @property
    def paths(self) -> list[tuple[tuple[Any, ...], jax.ShapeDtypeStruct]]:
        """The arrays among the arguments, first those of stores that the operation updates, each with its path."""
        leaves = jax.tree_util.tree_leaves_with_path(self._parts)
        return [(path[1:], leaf) for path, leaf in leaves if isinstance(leaf, jax.ShapeDtypeStruct)]

    @property
    def arrays(self) -> list[jax.ShapeDtypeStruct]:
        """The arrays of `paths`."""
        return [leaf for _, leaf in self.paths]

    def filled(self, arrays: Sequence[Any]) -> dict[str, Any]:
        """Returns the arguments with these in place of `arrays`."""
        given = iter(arrays)
        stores, others = jax.tree.map(
            lambda leaf: next(given) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, self._parts
        )
        return stores | others

    def apart(self, arrays: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Divides arrays, in the order of `arrays`, into those of stores and others."""
        count = len(jax.tree.leaves(self._parts[0]))
        return arrays[:count], arrays[count:]

    @property
    def _parts(self) -> list[dict[str, Any]]:
        """The stores that the operation updates, and the other arguments."""
        updated = STORES if self.operation != "read_windows" else ()
        return [{name: v for name, v in self.arguments.items() if (name in updated) is one} for one in (True, False)]

    def split(self, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns values by place and by name."""
        places = NAMES[self.operation].split()
        return tuple(values[name] for name in places), {n: v for n, v in values.items() if n not in places}

    def run(self, implementation: str, values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Returns y (None if there is none), and the stores by name. What the implementation calls is plain."""
        args, kwargs = self.split(values)
        with KernelChoice(named="xla").applied():
            run = next(one.run for one in self.candidates if one.name == implementation)
            out = run(*args, **kwargs)
        stores = [name for name in NAMES[self.operation].split() if name in STORES]
        if self.operation == "read_windows" or not stores:
            return out, {}
        if self.operation == "write_windows":
            return None, {"windows": out}
        return out[0], dict(zip(stores, out[1:], strict=True))


def recorded(trace: Callable[[KernelChoice], None], phase: str, platform: str) -> Iterator[Call]:
    """Yields each distinct call of an operation with a kernel that `trace`, given the choice to trace with, makes."""
    found: dict[Any, Call] = {}
    depth = 0

    def seen(operation: str, candidates: Sequence[Implementation], args: Any, kwargs: Any) -> Any:
        nonlocal depth
        before = depth
        if operation in NAMES:
            depth += bool(add(operation, candidates, args, kwargs).kernels(platform))
        try:
            return candidates[-1].run(*args, **kwargs)
        finally:
            depth = before

    def add(operation: str, candidates: Sequence[Implementation], args: Any, kwargs: Any) -> Call:
        named = {**dict(zip(NAMES[operation].split(), args, strict=True)), **kwargs}
        leaves, structure = jax.tree.flatten(named)
        arrays = (jax.Array, np.ndarray)
        leaves = [jax.ShapeDtypeStruct(v.shape, v.dtype) if isinstance(v, arrays) else v for v in leaves]
        call = Call(phase, operation, candidates, jax.tree.unflatten(structure, leaves), depth > 0)
        return _add(found, (operation, structure, *leaves), call)

    trace(KernelChoice(platform=platform, seen=seen))
    yield from found.values()


def _add(found: dict[Any, Call], key: Any, call: Call) -> Call:
    """Adds a call, also in place of an equal one that another operation makes."""
    if key not in found or (found[key].inner and not call.inner):
        found[key] = call
    return found[key]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The steps whose calls are wanted."""

    rows: tuple[int, ...] = (8,)
    """Of decode steps."""
    steps: tuple[int, ...] = (1,)
    """Tokens of each row of a decode step: 1 + drafts."""
    tokens: tuple[int, ...] = (2048,)
    """Of prefill steps."""
    context: int = 1024
    page_size: int = 64
    tile_size: int = 128
    intervals: tuple[int, ...] = (1,)
    """Of decode by replay; 1: a state after each token."""
    ssm_dtype: DTypeLike = jnp.float32
    kv_dtype: DTypeLike | None = None
    """Of keys and values in pages; None: that of activations."""
    members: int = 1
    """Over which pages are divided."""


def calls_of(
    config: HybridConfig,
    platform: str,
    sizes: Sizes,
    *,
    dtype: DTypeLike = jnp.bfloat16,
    weights: Mapping[str, Quantized] = MappingProxyType({}),
) -> list[Call]:
    """The calls of a model's decode and prefill steps, each once.

    Args:
        dtype: of activations, and of weights that are not among `weights`.
        weights: the quantized ones by dotted path, as shapes.
    """
    model = _one_layer_of_each_kind(config, dtype, weights)
    found: dict[Any, Call] = {}
    for phase, rows, state, batch in _steps(model, sizes):
        # Large steps divide their tokens over members, and small ones do not.
        for divided in (False, True) if sizes.members > 1 and isinstance(batch, PrefillBatch) else (False,):

            def trace(choice: KernelChoice, divided: bool = divided, step: Any = (*state, batch)) -> None:
                mesh = AbstractMesh((sizes.members, 1), (CONTEXT, TENSOR), (AxisType.Auto,) * 2)
                with use_abstract_mesh(mesh) if divided else nullcontext():
                    StepPrograms(model, tile_size=sizes.tile_size, kernels=choice).trace(*step)

            for call in recorded(trace, f"divided {phase}" if divided else phase, platform):
                if call.operation == "paged_attention" and sizes.members > 1:
                    # That of a mesh's first member, in place of one for all, as if rows had so many times the pages.
                    part = {"first_page": jax.ShapeDtypeStruct((), jnp.int32), "page_stride": sizes.members}
                    of_part: dict[str, Any] = {"arguments": {**call.arguments, **part}, "candidates": PARTS}
                    call = dataclasses.replace(call, operation="paged_attention_part", **of_part)
                _add(found, (call.operation, *jax.tree.leaves(call.arguments), rows), call)
    return list(found.values())


def _steps(model: HybridModel, sizes: Sizes) -> Iterator[tuple[str, int, tuple[Any, Any], StepBatch]]:
    """Yields a name, the number of rows, shapes of a store and of rows, and a batch, of each step."""
    pages = -(-(sizes.context + max(sizes.steps)) // sizes.page_size)
    stored: dict[str, Any] = {"page_size": sizes.page_size, "ssm_dtype": sizes.ssm_dtype, "kv_dtype": sizes.kv_dtype}

    def state(**room: Any) -> tuple[Any, Any]:
        store, seats = state_makers(model, **room, **stored)
        return jax.eval_shape(store), jax.eval_shape(seats)

    replayed = not StoreShape.of(model.config).unreplayable_state
    for rows, steps, interval in itertools.product(sizes.rows, sizes.steps, sizes.intervals):
        if interval > 1 and not replayed:
            continue
        batch = DecodeBatch.empty(rows=rows, num_speculative_tokens=steps - 1, pages_per_row=pages, replay=interval > 1)
        told = f", {steps - 1} drafts" * (steps > 1) + f", replay {interval}" * (interval > 1)
        room: dict[str, Any] = {"num_slots": 2 + rows + rows * steps, "num_pages": 1 + rows * pages}
        replay = Replay(interval, steps - 1) if interval > 1 else None
        yield f"decode of {rows} rows{told}", rows, state(rows=rows, drafts=steps - 1, replay=replay, **room), batch
    for tokens in sizes.tokens:
        tiles, rows = tokens // sizes.tile_size, 4
        prefill = PrefillBatch.empty(
            tokens=tokens, rows=rows, tiles=tiles + rows, pages_per_row=pages, tile_size=sizes.tile_size
        )
        each = 1 + rows * -(-pages // sizes.members)
        room = {"num_slots": 2 + rows + tiles + 8, "num_pages": each * sizes.members}
        yield f"prefill of {tokens} tokens", rows, state(rows=rows, **room), prefill


def state_makers(
    model: HybridModel, *, rows: int, drafts: int = 0, replay: Replay | None = None, num_pages: int, **store: Any
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Returns functions that make a store, of the sizes and dtypes that `init_store` takes, and rows."""
    store |= {"num_pages": max(2, num_pages), "replay": replay, "num_tails": rows + 1 if replay else 0}
    seats: dict[str, Any] = {"max_num_seqs": rows, "num_speculative_tokens": drafts, "replay": replay is not None}
    return (
        partial(init_store, StoreShape.of(model.config), dtype=model.dtype, **store),
        partial(init_rows, model.config, **seats),
    )


def _one_layer_of_each_kind(
    config: HybridConfig, dtype: DTypeLike, weights: Mapping[str, Quantized] = MappingProxyType({})
) -> HybridModel:
    """The model with one layer of each kind and form of weights, shared blocks in both of their forms, and few tokens.

    Weights are shapes.
    """

    def below(prefix: str) -> dict[str, Quantized]:
        return {path.removeprefix(prefix): v for path, v in sorted(weights.items()) if path.startswith(prefix)}

    layers: dict[Any, dict[str, Quantized]] = {}
    for index, kind in enumerate(config.pattern):
        own = below(f"blocks.{index}.")
        layers.setdefault((kind, *((path, *jax.tree.leaves(weight)) for path, weight in own.items())), own)
    pattern, kept = "", {f"shared.{path}": weight for path, weight in below("shared.").items()}
    for (kind, *_), own in layers.items():
        for _ in range(2 if kind == SHARED else 1):
            kept |= {f"blocks.{len(pattern)}.{path}": weight for path, weight in own.items()}
            pattern += kind
    config = dataclasses.replace(config, pattern=pattern, mtp_pattern="", vocab_size=min(config.vocab_size, 1024))
    model = HybridModel.abstract(config, dtype=dtype)
    wide = parameters(model)
    # A layer of a pruned model may have the size of another one's place.
    fitting = {path: weight for path, weight in kept.items() if path in wide and wide[path].shape == weight.shape}
    quantize_in_place(model, fitting)
    return model


def kernel_report(config: HybridConfig, platform: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields a phase, an operation, the name of an implementation, and why it is not one that comes before.

    Decode is that of 8 rows without drafts, prefill that of 2,048 tokens, in bfloat16, undivided. No program is
    compiled. A kernel is lowered for the platform by itself, so that one that cannot run is known; whether a device's
    compiler takes it is not.
    """
    model = _one_layer_of_each_kind(config, jnp.bfloat16)
    sizes = Sizes(context=4096, page_size=128 if platform == "tpu" else 64)
    for phase, _, state, batch in _steps(model, sizes):
        choice = KernelChoice(platform=platform)
        StepPrograms(model, tile_size=sizes.tile_size, kernels=choice).trace(*state, batch)
        for operation, chosen in sorted(choice.chosen.items()):
            yield from ((phase.split()[0], operation, name, why) for name, why in chosen.items())


def with_kernels(calls: Iterable[Call], platform: str, *, interpreted: bool = False) -> list[tuple[Call, str]]:
    """Each call with each of the kernels that it may run: a later one is used where an earlier one does not compile."""
    return [(call, name) for call in calls for name in call.kernels(platform, interpreted=interpreted)]
