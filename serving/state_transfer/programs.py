"""Taking a resumption point out of a store and putting one in: a few small programs of fixed shapes.

A point is one state (the arrays that mixers declare by slot, each [layers, ...], and the hidden state) and keys and
values in *pieces*: arrays [layers, tokens, ...] of a few fixed sizes, so that after a warm-up nothing compiles. Page
sizes of the two sides may differ, and so may how devices divide arrays, and members pages: transferred arrays are
logical.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Shaped

from mamba_jax.config import Division, HybridConfig, StateArray
from mamba_jax.layout.member import Member
from mamba_jax.program_cache import ProgramCache
from mamba_jax.rounding import NarrowDtype
from mamba_jax.sharding import TENSOR, use_mesh
from mamba_jax.sharding.across import on_members
from mamba_jax.sharding.axis import settled
from mamba_jax.store import Store, StoreShape, load, put, read_slots, take, write_slots
from mamba_jax.store_layout import is_pinned, places


@dataclass(frozen=True)
class Arrangement:
    """The layout of a model's state on this number of devices. With one device, it is that of the logical arrays.

    Divided over devices, an array of several parts (the convolution's B and C, for example) has them device by device,
    and a unit that devices share several times: such an array cannot be cut by bytes.
    """

    shape: StoreShape
    """Of the logical arrays."""
    shards: int = 1
    """Devices that share each layer (of each member)."""
    narrow: NarrowDtype | None = None
    """The form in which accumulated states are transferred; None: the form of the slots."""

    @classmethod
    def of(cls, config: HybridConfig, store: Store, narrow: NarrowDtype | None = None) -> Arrangement:
        """That of a store, wherever it lies."""
        sharding = store.hidden.sharding
        shards = sharding.mesh.shape[TENSOR] if isinstance(sharding, NamedSharding) else 1
        return cls(StoreShape.of(config), shards, narrow)

    @property
    def names(self) -> tuple[str, ...]:
        """Of the arrays of a state that travels, in their order."""
        forms = ((name, self._form(name)) for name in self.shape.arrays)
        return tuple(each for name, form in forms for each in ((name,) if form is None else form.names(name)))

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """Shape of a token's keys and values of one layer as they travel. Layers may differ, as those of a drafter do
        from the model's: then all have as many numbers as the largest."""
        shapes = {array.shape for array in self.shape.pages}
        return shapes.pop() if len(shapes) == 1 else (max(map(math.prod, shapes)),)

    def traveling_kv(self, array: StateArray, values: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """Returns a layer's keys and values [tokens, ...] as they travel."""
        if array.shape == self.kv_shape:
            return values
        flat = values.reshape(len(values), -1)
        return jnp.pad(flat, ((0, 0), (0, self.kv_shape[0] - flat.shape[1])))

    def arrived_kv(self, array: StateArray, values: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """The inverse, with any axes before those of a token."""
        if array.shape == self.kv_shape:
            return values
        return values[..., : math.prod(array.shape)].reshape(*values.shape[:-1], *array.shape)

    def traveling(self, state: Mapping[str, Array]) -> dict[str, Array]:
        """Arrays of slots, as they travel."""
        found: dict[str, Array] = {}
        for name, values in state.items():
            form = self._form(name)
            found |= {name: values} if form is None else form.parts(name, values)
        return found

    def arrived(self, name: str, state: Mapping[str, Array]) -> Array:
        """The inverse, of one array of slots."""
        form = self._form(name)
        return state[name] if form is None else form.widened(name, state)

    def _form(self, name: str) -> NarrowDtype | None:
        return self.narrow if name in self.shape.accumulated else None

    def logical(self, array: StateArray, stored: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """Values of `array`, any number of them, as the store has them -> as the model defines them."""
        division = self._division(array)
        if division is None:
            return stored
        lead, rest = _around(stored, array, division)
        if division.repeat > 1:
            by_unit = stored.reshape(*lead, division.units, division.repeat, -1, *rest)
            each_once = by_unit[(slice(None),) * (len(lead) + 1) + (0,)]
            return each_once.reshape(*lead, -1, *rest)
        by_device = stored.reshape(*lead, self.shards, division.parts, -1, *rest)
        return jnp.swapaxes(by_device, len(lead), len(lead) + 1).reshape(stored.shape)

    def stored(self, array: StateArray, logical: Shaped[Array, "*sizes"]) -> Shaped[Array, "*sizes"]:
        """The inverse of `logical`."""
        division = self._division(array)
        if division is None:
            return logical
        lead, rest = _around(logical, array, division)
        if division.repeat > 1:
            by_unit = logical.reshape(*lead, division.units, 1, -1, *rest)
            return jnp.repeat(by_unit, division.repeat, axis=len(lead) + 1).reshape(*lead, -1, *rest)
        by_part = logical.reshape(*lead, division.parts, self.shards, -1, *rest)
        return jnp.swapaxes(by_part, len(lead), len(lead) + 1).reshape(logical.shape)

    def _division(self, array: StateArray) -> Division | None:
        """How the array is divided, where the store has it otherwise than the model."""
        division = array.over(self.shards).division
        if self.shards == 1 or division is None or (division.parts == 1 and division.repeat == 1):
            return None
        return division


def _around(
    values: Shaped[Array, "*sizes"], array: StateArray, division: Division
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    axis = values.ndim - len(array.shape) + division.axis
    return values.shape[:axis], values.shape[axis + 1 :]


SIZES = (64, 16, 4, 1)
"""Pieces by the units that they hold."""

State = dict[str, Array]


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + tokens) of a sequence; all their units are complete."""

    start: int
    tokens: int


def pieces(start: int, end: int, unit: int) -> list[Piece]:
    """Cover the tokens [start, end) with as few pieces as there are sizes for. Both ends are widened to whole units.

    `unit` is a multiple of both sides' page sizes.
    """
    if start >= end:
        return []
    at, last = start // unit, -(-end // unit)
    found = []
    while at < last:
        size = next(size for size in SIZES if size <= last - at)
        found.append(Piece(at * unit, size * unit))
        at += size
    return found


def common_unit(page_size: int, other: int) -> int:
    """The smallest number of tokens that fills whole pages on both sides. Without attention (0) any will do."""
    return math.lcm(page_size or 1, other or 1)


class PointPrograms:
    """The compiled programs of one store. They are compiled when first needed, or before by `warm_up`."""

    def __init__(self, arrangement: Arrangement) -> None:
        self.arrangement = arrangement
        self.cache = ProgramCache()

    # -- out --

    def read_state(self, store: Store, slot: int) -> State:
        """A copy of the state in a slot."""
        return _first_device(self._run(_read_state, (store, np.int32(slot))))

    def read_piece(self, store: Store, pages: Sequence[int], count: int, layers: int) -> Array:
        """A copy of the keys and values in some pages, of the first `layers` layers.

        Only the first `count` tokens mean anything: what lies behind them is sent as zeros.
        """
        arguments = (store, np.asarray(pages, np.int32), np.int32(count))
        return _first_device(self._run(_read_piece, arguments, layers))

    # -- in --

    def write_state(self, store: Store, slot: int, state: State, position: int) -> Store:
        """Returns the store with a state in a slot, which then holds S(position). Donates the given store."""
        return self._run(_write_state, (store, _for_store(store, state), np.int32(slot), np.int32(position)))

    def write_piece(self, store: Store, pages: Sequence[int], piece: Array) -> Store:
        """Returns the store with a piece in some pages; tokens of page 0 are dropped. Donates the given store."""
        return self._run(_write_piece, (store, _for_store(store, piece), np.asarray(pages, np.int32)))

    def warm_up(
        self,
        store: Store,
        *,
        unit: int,
        layers: int,
        reading: bool,
        sizes: Sequence[int] = SIZES,
    ) -> None:
        """Compile all that one role needs; nothing is run. `sizes` are the pieces that there will be, in units."""
        zero, place = np.int32(0), whole(store)

        def there(spec: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=place)

        for size in sizes if store.kv else ():
            table = np.zeros(size * unit // store.page_size, np.int32)
            if reading:
                self._find(_read_piece, (store, table, zero), layers)
            else:
                shape = (layers, size * unit, *self.arrangement.kv_shape)
                piece = there(jax.ShapeDtypeStruct(shape, store.kv[0].dtype))
                self._find(_write_piece, (store, piece, table))
        if reading:
            self._find(_read_state, (store, zero))
        else:
            state = {name: there(spec) for name, spec in state_spec(store, self.arrangement).items()}
            self._find(_write_state, (store, state, zero, zero))

    def _run(self, run: Callable[..., Any], arguments: tuple[Any, ...], *fixed: int) -> Any:
        compile = partial(self._compile, run, arguments, *fixed)
        return self.cache.run((run.__name__, *fixed), arguments, compile, donated=int(_donates(run)))

    def _find(self, run: Callable[..., Any], arguments: tuple[Any, ...], *fixed: int) -> None:
        self.cache.find((run.__name__, *fixed), arguments, partial(self._compile, run, arguments, *fixed))

    def _compile(self, run: Callable[..., Any], arguments: tuple[Any, ...], *fixed: int) -> jax.stages.Compiled:
        store: Store = arguments[0]
        sharding = store.hidden.sharding
        options: dict[str, Any] = {"donate_argnums": (0,)} if _donates(run) else {}
        if isinstance(sharding, NamedSharding) or is_pinned(self.arrangement.shape, store):
            options["out_shardings"] = places(self.arrangement.shape, store) if _donates(run) else whole(store)
        mesh: Any = sharding.mesh if isinstance(sharding, NamedSharding) else None
        with use_mesh(mesh):
            return jax.jit(partial(run, self.arrangement, *fixed), **options).lower(*arguments).compile()


def _donates(run: Callable[..., Any]) -> bool:
    """Whether a program takes the store by donation, and returns it."""
    return run in (_write_state, _write_piece)


def state_spec(store: Store, arrangement: Arrangement) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes and dtypes of a state of this store as it travels, in the order in which its arrays are declared."""
    spec = jax.eval_shape(partial(_read_state, arrangement), store, jax.ShapeDtypeStruct((), jnp.int32))
    return {name: spec[name] for name in arrangement.names if name in spec}


def num_bytes(specs: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Returns the size of arrays with these specs."""
    return sum(spec.size * spec.dtype.itemsize for spec in specs)


def _read_state(arrangement: Arrangement, store: Store, slot: Int[Array, ""]) -> State:
    layers: dict[str, list[Array]] = {}
    for arrays in store.slots:
        for name, array in arrays.items():
            layers.setdefault(name, []).append(take(array, slot))
    declared = arrangement.shape.arrays
    state = {name: arrangement.logical(declared[name], jnp.stack(each)) for name, each in layers.items()}
    return {**arrangement.traveling(state), "hidden": take(store.hidden, slot)}


def _read_piece(
    arrangement: Arrangement, layers: int, store: Store, pages: Int[Array, " n"], count: Int[Array, ""]
) -> Array:
    tokens = len(pages) * store.page_size
    there = (jnp.arange(tokens) < count)[:, None, None]

    def pages_of(member: Member | None, kv: tuple[Array, ...], pages: Array) -> list[Array]:
        return [
            read_slots(each, pages, divided=True) if member is None else member.read_pages(each, pages) for each in kv
        ]

    read = []
    stored = on_members(pages_of, store.kv[:layers], pages, reads=True)
    for array, kv in zip(arrangement.shape.pages, stored, strict=False):
        logical = arrangement.logical(array, kv)
        flat = logical.reshape(tokens, *logical.shape[2:])
        read.append(arrangement.traveling_kv(array, jnp.where(there, flat, jnp.zeros((), kv.dtype))))
    return jnp.stack(read)


def _write_state(
    arrangement: Arrangement, store: Store, state: State, slot: Int[Array, ""], position: Int[Array, ""]
) -> Store:
    names = dict.fromkeys(name for arrays in store.slots for name in arrays)
    layers = {name: iter(arrangement.arrived(name, state)) for name in names}

    def write(name: str, array: Array) -> Array:
        return put(array, arrangement.stored(arrangement.shape.arrays[name], next(layers[name])), slot)

    slots = tuple({name: write(name, array) for name, array in arrays.items()} for arrays in store.slots)
    tags = store.tags
    if tags is not None:
        times = load(tags, slot)[0] + 1
        tags = put(tags, jnp.stack([times, position]), slot)
    hidden = put(store.hidden, state["hidden"], slot)
    return replace(store, slots=slots, hidden=hidden, tags=tags)


def _write_piece(arrangement: Arrangement, store: Store, piece: Array, pages: Int[Array, " n"]) -> Store:
    count, declared = len(pages), arrangement.shape.pages
    paged = piece.reshape(-1, store.page_size, *piece.shape[2:])

    def of_layer(layer: int, paged: Array) -> Array:
        return arrangement.stored(declared[layer], arrangement.arrived_kv(declared[layer], paged))

    def at_once(layer: int, kv: Array, paged: Array, pages: Array) -> Array:
        return write_slots(kv, of_layer(layer, paged[layer * count :][:count]), pages, divided=True)

    def one_by_one(layer: int, kv: Array, paged: Array, pages: Array) -> Array:
        # Read directly from the piece: XLA:CPU would copy one layer's part first, which takes longer than the rest. A
        # conditional that skips null pages would copy it, too, so the other pages are sorted to the front.
        wanted = jnp.nonzero(pages > 0, size=count, fill_value=0)[0]

        def write(i: Int[Array, ""], kv: Array) -> Array:
            return put(kv, of_layer(layer, load(paged, layer * count + wanted[i])), pages[wanted[i]])

        return jax.lax.fori_loop(0, (pages > 0).sum(), write, kv)

    def write(member: Member | None, kv: tuple[Array, ...], paged: Array, pages: Array) -> tuple[Array, ...]:
        own = pages if member is None else member.own_pages(pages, len(kv[0]))
        return tuple(
            jax.lax.platform_dependent(
                each, paged, own, cpu=partial(one_by_one, layer), default=partial(at_once, layer)
            )
            for layer, each in enumerate(kv)
        )

    return replace(store, kv=on_members(write, store.kv, paged, pages))


def whole(store: Store) -> jax.sharding.Sharding:
    """Where whole arrays lie for this store: on each device of its mesh, or on its only device."""
    sharding = store.hidden.sharding
    return NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding


def _for_store(store: Store, tree: Any) -> Any:
    place = whole(store)

    def move(leaf: Any) -> Array:
        # Arrays that are already there, as those of the transfer engine are, need no call.
        return leaf if getattr(leaf, "sharding", None) == place else jax.device_put(leaf, place)

    return jax.tree.map(move, tree)


def _first_device(tree: Any) -> Any:
    """Whole arrays that several devices have, on the first of them alone."""

    def pick(leaf: Array) -> Array:
        return leaf.addressable_shards[0].data if len(leaf.sharding.device_set) > 1 else leaf

    return jax.tree.map(pick, settled(tree))
