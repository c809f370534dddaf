"""The LoRA adapters of a model's dense layers and routed experts, stacked on the device, and their own tables.

Each row of a step can use another adapter.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas.quantized import Quantized
from mamba_jax.model import HybridModel
from mamba_jax.modules.basic import ExpertLoRA, Linear, LoRA, OwnTables
from mamba_jax.modules.feed_forward import Experts
from mamba_jax.sharding import parameter_shardings
from mamba_jax.sharding.axis import settled

M = TypeVar("M")

_DRAFTS = ("mtp", "drafter")
"""Drafts are made by the base model: the next step verifies them with the row's adapter."""
TABLES = ("embed", "lm_head")
"""The embedding and the head, which an adapter may replace as a whole. Each is [vocab, hidden], also if the model has
one table for both."""
_TABLE, _WHOLE = "embed.weight", "final_norm.weight"
"""Parameters: one that is divided over devices as tables are, and one that is not divided."""


def adaptable_layers(model: HybridModel) -> dict[str, Linear]:
    """Returns the dense layers that adapters can change, by their dotted path: all but those of the draft layer.

    Routed experts, routers, convolutions, norms, the embedding and the head are not dense layers in this sense.
    """
    return _modules(model, Linear)


@dataclass(frozen=True)
class Target:
    """A weight that adapters can change: of a dense layer, or of all routed experts of a layer."""

    lora: str
    """The dotted path of the module that computes what adapters add: a `LoRA` or an `ExpertLoRA`."""
    lead: tuple[int, ...]
    """The number of experts; empty for a dense layer."""
    outputs: tuple[int, ...]
    inputs: int
    ranks: int = 1
    """Number of A matrices, which follow each other in one stack: two for the gate and the up projection of experts."""

    @property
    def size(self) -> int:
        """Numbers of the weight."""
        return math.prod((*self.lead, *self.outputs, self.inputs))

    def shapes(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the shapes of A and B of one adapter, for `rank` rows of A."""
        return (*self.lead, rank, self.inputs), (*self.lead, math.prod(self.outputs), rank)


def targets(model: HybridModel, *, experts: bool = False) -> dict[str, Target]:
    """Returns the weights that adapters can change, by dotted path.

    Those of dense layers have the path of the layer. With `experts`, also the routed experts' `up` and `down`.
    """
    found = {path: Target(f"{path}.lora", (), layer.weight.shape[:-1], layer.weight.shape[-1])
             for path, layer in adaptable_layers(model).items()}  # fmt: skip
    for path, module in _modules(model, Experts).items() if experts else ():
        for part, ranks in (("up", 2 if module.gated else 1), ("down", 1)):
            number, *outputs, inputs = getattr(module, part).shape
            found[f"{path}.{part}"] = Target(f"{path}.lora_{part}", (number,), tuple(outputs), inputs, ranks)
    return found


def _modules(model: HybridModel, kind: type[M]) -> dict[str, M]:
    found = ((".".join(map(str, path)), module) for path, module in nnx.iter_graph(model))
    return {path: module for path, module in found if isinstance(module, kind) and path.split(".")[0] not in _DRAFTS}


LayerMatrices = Mapping[
    str, tuple[Float[np.ndarray, "*experts rank inputs"], Float[np.ndarray, "*experts outputs rank"]]
]
"""(A, B) by the path of a layer or of the experts' weight; B includes the adapter's scale."""


@dataclass(frozen=True)
class AdapterEntry:
    """An adapter in the form of an entry, made by `Adapters.entry_of`: padded, in the dtype of the device's arrays, and
    without a number that is not finite."""

    values: Mapping[str, Shaped[np.ndarray, "..."]]
    """By the name of the array on the device."""


class Adapters:
    """`count` adapters of up to `rank` for each dense layer, and optionally for routed experts.

    Entry 0 is no adapter; adapters have entries from 1 on.

    The arrays have the dtype of the model's activations and lie on its devices, divided like the layers' weights.
    """

    def __init__(
        self,
        model: HybridModel,
        *,
        count: int,
        rank: int,
        experts: bool = False,
        magnitudes: bool = False,
        tables: bool = False,
        mesh: Mesh | None = None,
        abstract: bool = False,
    ) -> None:
        """`experts`: adapters can change routed experts, too. `magnitudes`: they can have magnitudes (DoRA).
        `tables`: they can have an embedding and a head of their own (`TABLES`).
        `abstract`: describe the arrays without allocating them, to compile programs.

        Raises:
            ValueError: `count` or `rank` is less than 1.
        """
        if count < 1 or rank < 1:
            raise ValueError(f"{count} adapters of rank {rank}: at least 1 of each is expected")
        self.count, self.rank, self.dtype = count, rank, model.dtype
        self._targets = targets(model, experts=experts)
        self._sharding: Callable[[str], NamedSharding | None] = (
            (lambda name: None) if mesh is None else parameter_shardings(model.config, mesh)
        )
        self._arrays: dict[str, Array] = {}
        self.magnitudes = magnitudes
        """Whether adapters can have magnitudes."""
        self.tables = tables
        """Whether adapters can have tables."""
        self._table_shape = model.config.vocab_size, model.config.hidden_size

        def allocate(name: str, shape: tuple[int, ...], dtype: Any, like: str = "", fill: int = 0) -> None:
            sharding = self._sharding(like or name)
            described: Any = jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            self._arrays[name] = described if abstract else jnp.full(shape, fill, dtype, device=sharding)

        for target in self._targets.values():
            whole = rank * target.ranks
            allocate(f"{target.lora}.a", (*target.lead, 1 + count, whole, target.inputs), self.dtype)
            allocate(f"{target.lora}.b", (*target.lead, *target.outputs, 1 + count, whole), self.dtype)
            if magnitudes and not target.lead:
                allocate(f"{target.lora}.factor", (*target.outputs, 1 + count), jnp.float32, fill=1)
        for name in TABLES if tables else ():
            allocate(f"{name}.has", (1 + count,), jnp.bool_, like=_WHOLE)
            for entry in range(1, 1 + count):
                allocate(f"{name}.{entry}", self._table_shape, self.dtype, like=_TABLE)

    @property
    def layers(self) -> tuple[str, ...]:
        """The dotted paths of the layers, and of the weights of routed experts."""
        return tuple(self._targets)

    @property
    def table_bytes(self) -> int:
        """Bytes of the tables that adapters can have, or would have with `tables`, over all devices."""
        return self.count * len(TABLES) * math.prod(self._table_shape) * self.dtype.itemsize

    @property
    def arrays(self) -> list[Array]:
        """All arrays, in an order that stays."""
        return list(self._arrays.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays, over all devices."""
        return sum(array.nbytes for array in self._arrays.values())

    def attach(self, model: HybridModel, arrays: Sequence[Any]) -> None:
        """Gives a model's layers these values of `arrays`, which may be traced."""
        values = dict(zip(self._arrays, arrays, strict=True))
        for path, layer in adaptable_layers(model).items():
            a, b = (values[f"{path}.lora.{part}"] for part in "ab")
            layer.lora = LoRA(a, b, values.get(f"{path}.lora.factor"))
        for path, module in _modules(model, Experts).items():
            for part in ("up", "down"):
                if f"{path}.{part}" in self._targets:
                    added = ExpertLoRA(*(values[f"{path}.lora_{part}.{each}"] for each in "ab"))
                    setattr(module, f"lora_{part}", added)
        for name in TABLES if self.tables else ():
            tables = [values[f"{name}.{entry}"] for entry in range(1, 1 + self.count)]
            setattr(model, f"own_{name}", OwnTables(values[f"{name}.has"], tables))

    def entry_of(
        self,
        layers: LayerMatrices,
        magnitudes: Mapping[str, np.ndarray] | None = None,
        tables: Mapping[str, np.ndarray] | None = None,
    ) -> AdapterEntry:
        """Checks and converts an adapter. May be called from any thread.

        All entries take part in the product of each row, masked by zeros. So a number that is not finite in one entry
        would make the rows of all others NaN.

        Args:
            layers: the adapted layers. Others are not adapted.
            magnitudes: of the outputs of adapted dense layers [outputs].
            tables: by name (see `TABLES`), [vocab, hidden].
        Raises:
            ValueError: there is no such layer, a shape does not fit, or a number is not finite in the arrays' dtype.
        """
        if magnitudes and not self.magnitudes:
            raise ValueError("these adapters have no magnitudes (DoRA)")
        if unknown := layers.keys() - self._targets.keys():
            raise ValueError(f"the model has no layer {sorted(unknown)[0]} that adapters can change")
        values: dict[str, np.ndarray] = {}
        for name, table in (tables or {}).items():
            expected = self._table_shape if self.tables and name in TABLES else None
            if table.shape != expected:
                raise ValueError(f"{name} is a table of {list(table.shape)}, expected {expected}")
            values[name] = _cast(name, table, self.dtype)
        for path, target in self._targets.items():
            a, b = layers.get(path) or map(np.zeros, target.shapes(0))
            rank, most = a.shape[-2], self.rank * target.ranks
            if rank > most or (a.shape, b.shape) != target.shapes(rank):
                of_a, of_b = map(list, target.shapes(rank))
                raise ValueError(
                    f"{path}: A is {list(a.shape)} and B {list(b.shape)}; expected {of_a} and {of_b}, "
                    f"with a rank of at most {most}"
                )
            whole, rest = [(0, 0)] * len(target.lead), (0, most - rank)
            padded_b = np.pad(b, (*whole, (0, 0), rest)).reshape(*target.lead, *target.outputs, -1)
            for part, value in (("a", np.pad(a, (*whole, rest, (0, 0)))), ("b", padded_b)):
                values[f"{target.lora}.{part}"] = _cast(path, value, self.dtype)
            if magnitudes and path in magnitudes:
                values[f"{target.lora}.factor"] = _cast(
                    path, magnitudes[path].reshape(target.outputs), np.dtype(np.float32)
                )
        return AdapterEntry(values)

    def put(
        self, entry: int, adapter: LayerMatrices | AdapterEntry, weights: Mapping[str, Array] | None = None
    ) -> None:
        """Writes an adapter into an entry from 1 to `count`, in place of the one before.

        `weights` are the model's, by dotted path: magnitudes need the norms of the changed weights' rows.

        Raises:
            ValueError: there is no such entry, or as `entry_of`. Nothing has changed.
        """
        if not 1 <= entry <= self.count:
            raise ValueError(f"adapter entry {entry}: expected 1 to {self.count}")
        values = (adapter if isinstance(adapter, AdapterEntry) else self.entry_of(adapter)).values
        new = dict(self._arrays)
        for target in self._targets.values():
            for part, axis in (("a", len(target.lead)), ("b", len(target.lead) + len(target.outputs))):
                name = f"{target.lora}.{part}"
                write = _writer(axis, self._sharding(name))
                new[name] = write(self._arrays[name], values[name], np.int32(entry))
            if (name := f"{target.lora}.factor") in self._arrays:
                factor: Any = np.ones(target.outputs, np.float32)
                if name in values:
                    weight = _weight(weights or {}, f"{target.lora.removesuffix('.lora')}.weight")
                    parts = (values[f"{target.lora}.{part}"] for part in "ab")
                    factor = settled(_factors(weight, *parts, values[name]))
                write = _writer(len(target.outputs), self._sharding(name))
                new[name] = write(self._arrays[name], factor, np.int32(entry))
        for name in TABLES if self.tables else ():
            if name in values:  # otherwise the table of an earlier adapter stays, and is not read
                new[f"{name}.{entry}"] = jax.device_put(values[name], self._sharding(_TABLE))
            has, is_there = f"{name}.has", np.asarray(name in values)
            new[has] = _writer(0, self._sharding(_WHOLE))(new[has], is_there, np.int32(entry))
        self._arrays = new


def _weight(weights: Mapping[str, Array], path: str) -> Array | Quantized:
    parts = {name.removeprefix(f"{path}."): value for name, value in weights.items() if name.startswith(f"{path}.")}
    return Quantized(**parts) if parts else weights[path]


@jax.jit
def _factors(
    weight: Any, a: Float[Array, "rank inputs"], b: Float[Array, "*outputs rank"], magnitude: Float[Array, "*outputs"]
) -> Float[Array, "*outputs"]:
    """Returns the factors that give the rows of W + B A their magnitudes as norms."""
    wide = weight.dequantize() if isinstance(weight, Quantized) else weight
    change = jnp.einsum("...r,ri->...i", b, a, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
    norm = jnp.linalg.norm(wide.astype(jnp.float32) + change, axis=-1)
    factors = magnitude / norm
    return jnp.where(jnp.isfinite(factors), factors, 0)


def _cast(path: str, value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    with np.errstate(over="ignore"):
        cast = value.astype(dtype)
    if not np.isfinite(cast).all():
        raise ValueError(f"{path} has numbers that are not finite in {np.dtype(dtype).name}")
    return cast


@cache
def _writer(axis: int, sharding: NamedSharding | None) -> Callable[[Array, np.ndarray, np.int32], Array]:
    """Returns a program that writes one entry of a stack along an axis."""

    def write(stack: Array, value: Array, entry: Int[Array, ""]) -> Array:
        return jax.lax.dynamic_update_index_in_dim(stack, value, entry, axis)

    return jax.jit(write, out_shardings=sharding)
