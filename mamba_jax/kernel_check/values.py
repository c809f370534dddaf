"""Numbers for a recorded call: places that exist, and floats of the ranges that a model has.

With `classes` the rows are of all classes: a fresh one, two that share a slot, padding with NaN, a strong decay, a
dropped draft, a tile that ends early, a row at a boundary of replay; null slots and pages hold NaN. Without them every
row is full, for timing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kernels_pallas import expert_choice
from kernels_pallas.places import Anchored, Packed, Rows, Tiles
from kernels_pallas.quantized import bits_of
from mamba_jax.kernel_check.calls import STORES, Call
from mamba_jax.layout import PrefillLayout

STRONG = -40.0
"""A log decay after which nothing is left in float32."""
_RANGES = {
    "log_decay": (-0.2, -0.01),
    "strength": (0.05, 0.9),
    "dt": (0.01, 0.2),
    "dt_bias": (-3.0, -1.0),
    "a": (-2.0, -0.05),
    "a_log": (0.0, 1.0),
    "channel_scale": (0.01, 0.02),
    "group_scale": (0.01, 0.02),
    "input_scale": (0.9, 1.1),
    "norm": (0.5, 1.5),
}
"""Lowest and highest value by the name of an array; others are symmetric around 0."""


def _names(path: Any) -> tuple[str, ...]:
    """The names of an argument and of the parts that lead to one of its arrays."""
    return tuple(str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", "")))) for key in path)


def _floats(names: tuple[str, ...], leaf: jax.ShapeDtypeStruct, seed: jax.Array, call: Call) -> jax.Array:
    """Numbers without a visible order: a hash of their places, which is quicker to compile than a generator."""
    count = math.prod(leaf.shape)
    bits = jnp.arange(count, dtype=jnp.uint32) * jnp.uint32(2654435761) + (seed * 40503 + 12345)
    bits = (bits ^ (bits >> 15)) * jnp.uint32(2246822519)
    bits = (bits ^ (bits >> 13)) * jnp.uint32(3266489917)
    share = ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) / 2**24
    name = names[-1]
    if leaf.dtype == bool:
        return jnp.ones(leaf.shape, bool)
    if jnp.issubdtype(leaf.dtype, jnp.integer):
        most = 2 ** (jax.dtypes.iinfo(leaf.dtype).bits - 2) if name in ("values", "group_zero") else 0
        return (share * 2 * most - most).astype(leaf.dtype).reshape(leaf.shape)
    raw = names[0] == "projections"  # before activations, so that no range is needed
    low, high = (-1.7, 1.7) if raw else _RANGES.get(name, (-1.7, 1.7))
    if name in ("query", "key"):
        size = leaf.shape[-1] if names[0] != "tail" else call.arguments["store"].shape[-1]
        low, high = -1.7 / size**0.5, 1.7 / size**0.5
    if name.endswith("weight") or name in ("up", "down"):
        low, high = -1.7 / leaf.shape[-1] ** 0.5, 1.7 / leaf.shape[-1] ** 0.5
    return (low + (high - low) * share).reshape(leaf.shape).astype(leaf.dtype)


def _same_kind(places: Any, *arrays: np.ndarray) -> Any:
    """Returns `places` with these arrays in place of its shapes."""
    return jax.tree.unflatten(jax.tree.structure(places), arrays)


class Values:
    """The arrays of a call."""

    def __init__(self, call: Call, *, classes: bool) -> None:
        self.call, self.classes = call, classes
        self._padding: np.ndarray | None = None
        """Which tokens [rows, steps] or [tiles, tile_size] are padding."""
        self.real: np.ndarray | None = None
        """Which leading places of y are those of tokens, where y of padding has no meaning; None: all of y has one."""
        self._strong = -1
        """The row or tile with a strong decay."""
        self._touched: dict[str, float] = {}
        """How many slots, tails and pages are read and written."""
        arguments = call.arguments
        places: dict[type, Callable[[Any], Any]] = {
            Rows: self._rows, Tiles: self._tiles, Anchored: self._anchored, Packed: self._packed
        }  # fmt: skip
        self.known = {name: places[type(v)](v) for name, v in arguments.items() if type(v) in places}
        """The arguments that say where things lie."""
        for name, find in (("page_table", self._pages), ("group_sizes", self._groups), ("order", self._choice)):
            if name in arguments:
                self.known |= find()
        if "index" in arguments:
            (rows,) = arguments["index"].shape
            index = 1 + np.arange(rows)
            if classes:
                index[-1] = 0
            self._touched["windows"] = rows
            self.known["index"] = index.astype(np.int32)
        if "valid" in arguments and classes:
            tokens = np.arange(arguments["valid"].shape[0])
            self.known["valid"] = tokens != 1 if self._padding is None else ~self._padding
        if self._padding is not None and call.operation in ("gated_update", "gated_replay"):
            self.real = ~self._padding

    def make(self, seed: Any) -> list[jax.Array]:
        """Returns the call's arrays, of a seed for their floats; to be traced, so that a device makes large ones."""
        known = {_names(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(self.known)}
        arrays = []
        for number, (path, leaf) in enumerate(self.call.paths):
            names = _names(path)
            if names[0] in self.known:
                arrays.append(jnp.asarray(known[names], leaf.dtype))
                continue
            made = _floats(names, leaf, jnp.uint32(number) + jnp.asarray(seed, jnp.uint32) * 64, self.call)
            arrays.append(self._with_classes(names, made) if self.classes else made)
        return arrays

    def _with_classes(self, names: tuple[str, ...], array: jax.Array) -> jax.Array:
        """NaN in null slots and padding, a strong decay, no strength in padding."""
        name = names[-1]
        if names[0] in (*STORES, "kv") and jnp.issubdtype(array.dtype, jnp.floating):
            return array.at[0].set(jnp.nan)
        if self._padding is None or names[0] != "entry" or array.ndim < 3 or array.shape[:2] != self._padding.shape:
            return array
        padding = self._padding.reshape(*self._padding.shape, *[1] * (array.ndim - 2))
        if name == "log_decay" and self._strong >= 0:
            array = array.at[self._strong, 0].set(STRONG)
        if name in ("strength", "dt"):
            return jnp.where(padding, 0, array).astype(array.dtype)
        return jnp.where(padding, jnp.nan, array).astype(array.dtype)

    @property
    def moved(self) -> int:
        """Bytes that must be read and written at least: all arguments once, of stores the slots and pages in use."""
        total = 0.0
        for path, leaf in self.call.paths:
            names, nbytes = _names(path), math.prod(leaf.shape) * bits_of(leaf.dtype) / 8
            for key in (names[-1], names[0]):
                if key in self._touched:
                    nbytes = nbytes / leaf.shape[0] * self._touched[key]
                    break
            total += nbytes
        leaf = self._y
        return int(total + (0 if leaf is None else math.prod(leaf.shape) * leaf.dtype.itemsize))

    @property
    def _y(self) -> Any:
        """The argument whose shape y has; None if there is none."""
        given = (self.call.arguments.get(name) for name in ("x", "entry", "projections"))
        found = next((one for one in given if one is not None), None)
        return getattr(found, "value", getattr(found, "x", found))

    @property
    def _slots(self) -> int:
        arguments = self.call.arguments
        store = arguments.get("store", arguments.get("windows"))
        return int(jax.tree.leaves(store)[0].shape[0])

    def _rows(self, rows: Rows) -> Any:
        """Row i writes slots of its own, the last of which it also reads."""
        count, steps = rows.write_slot.shape
        if count * steps >= self._slots:
            raise ValueError(f"{self.call.label}: {self._slots} slots for {count} rows of {steps} steps; give it more")
        write = 1 + np.arange(count * steps, dtype=np.int32).reshape(count, steps)
        read = write[:, -1].copy()
        padding = np.zeros((count, steps), bool)
        if self.classes:
            read[0] = 0
            if steps > 1:
                write[0, 0] = 0
            if count > 3:
                # Rows 1 and 2 read one slot, which no row writes; row 1 and 2 write those that the last one, padding,
                # leaves, and that row 0 has.
                free = [int(write[-1, -1]), self._slots - 1]
                read[1] = read[2]
                write[1, -1], write[2, -1] = free[0], free[1]
                read[-1], write[-1], padding[-1], self._strong = 0, 0, True, 2
        self._padding = padding
        self._touched |= dict.fromkeys(("store", "windows"), count * (1 + steps))
        return _same_kind(rows, read, write)

    def _tiles(self, tiles: Tiles) -> Any:
        """Three rows of tiles; every other tile and the last of a row write."""
        count, size = self._y.shape[:2]
        number = np.arange(count)
        first = (number % max(2, count // 3) == 0) & (number < 3 * max(2, count // 3))
        row = np.cumsum(first) - 1
        last = np.append(first[1:], True)
        read = np.where(first, np.minimum(row, 1), 0)  # row 0 is fresh; the others share slot 1
        if not self.classes:
            read = np.where(first, 1 + row, 0)
        write = np.where(last | (number % 2 == 1), 4 + number, 0)
        if 4 + count >= self._slots:
            raise ValueError(f"{self.call.label}: {self._slots} slots for {count} tiles; give it at least {5 + count}")
        padding = np.zeros((count, size), bool)
        if self.classes:
            padding[last, size // 2 + 1 :] = True
            if count > 3:
                first[-1], read[-1], write[-1], padding[-1] = True, 0, 0, True
                write[-2] = 4 + count - 2
            self._strong = min(1, count - 1)
        self._padding = padding
        self._touched |= dict.fromkeys(("store", "windows"), int(first.sum()) + int((write > 0).sum()))
        return _same_kind(tiles, first, read.astype(np.int32), write.astype(np.int32))

    def _anchored(self, places: Anchored) -> Any:
        """Rows at every place between two boundaries."""
        (count,), interval = places.length.shape, places.interval
        steps = self._y.shape[1]
        row = np.arange(count)
        since = row * interval // count
        anchor, write = 1 + row, 1 + count + row
        if 2 * count >= self._slots:
            anchor, write = 1 + row, 1 + row
        length, tokens = interval + since, steps + 0 * row
        begin, tail = interval + 0 * row, 1 + row
        if self.classes:
            anchor[0], begin[0], length[0] = 0, 0, since[0]
            if count > 3 and 2 * count < self._slots:
                anchor[1] = anchor[2]
            if count > 3:
                tokens[-1], tail[-1], write[-1], anchor[-1] = 0, 0, 0, 0
                self._strong = 2
            if steps > 1 and count > 2:
                tokens[1] = steps - 1
        self._padding = np.arange(steps) >= tokens[:, None]
        due = int((since + steps >= interval).sum())
        entries = jax.tree.leaves(self.call.arguments["tail"])[0].shape[1] if "tail" in self.call.arguments else 1
        self._touched |= {"store": count + due, "windows": count, "tail": (since + steps).sum() / entries}
        numbers = (anchor, tail, begin, length, tokens, write)
        return _same_kind(places, *(each.astype(np.int32) for each in numbers))

    def _packed(self, packed: Packed) -> Packed:
        """As `_tiles`, of ragged rows."""
        (tokens,), (rows,), (tiles, size) = packed.token_row.shape, packed.row_start.shape, packed.tile_tokens.shape
        each = np.full(rows, tokens // rows)
        if self.classes and rows > 1:
            each[0] -= 3
            each[-1] = max(0, each[-1] - size // 2)
        used = -(-each // size)
        write = np.zeros(tiles, np.int32)
        write[: used.sum()] = 1 + rows + np.arange(used.sum())
        read = 1 + np.arange(rows)
        if self.classes:
            read[0] = 0
            read[1:3] = 2
        with jax.ensure_compile_time_eval():
            layout = PrefillLayout.of(
                num_packed=tokens, tile_size=size, length=jnp.zeros(rows, jnp.int32),
                num_tokens=jnp.asarray(each, jnp.int32), read_slot=jnp.asarray(read, jnp.int32),
                tile_write_slot=jnp.asarray(write), page_table=jnp.zeros((rows, 1), jnp.int32),
            )  # fmt: skip
        self.real = np.arange(tokens) < each.sum()
        self._touched |= dict.fromkeys(("store", "windows"), rows + int((write > 0).sum()))
        return jax.tree.map(np.asarray, layout.packed)

    def _pages(self) -> dict[str, np.ndarray]:
        arguments = self.call.arguments
        (blocks, queries), (rows, width) = arguments["positions"].shape, arguments["page_table"].shape
        pages, size = arguments["kv"].shape[:2]
        table = 1 + np.random.default_rng(0).permutation(max(pages - 1, rows * width))[: rows * width] % (pages - 1)
        table, row = table.reshape(rows, width), np.arange(blocks) * rows // blocks
        of_row = -(-blocks // rows)
        begin = max(0, width * size - of_row * queries)
        positions = begin + (np.arange(blocks) % of_row)[:, None] * queries + np.arange(queries)
        positions = np.minimum(positions, width * size - 1)
        if self.classes:
            positions[row == 0] -= begin  # a short context
            if rows > 3:
                table[2] = table[1]
                positions[row == rows - 1] = -1
                table[rows - 1] = 0
            positions[-1, -1] = -1
            read = [max(positions[row == each].max() + 1, 0) for each in range(rows)]
            for each, end in enumerate(read):
                table[each, -(-int(end) // size) :] = 0
        self._touched["kv"] = sum(max(int(positions[row == each].max()) + 1, 0) for each in range(rows)) / size
        return {
            name: v.astype(np.int32)
            for name, v in (("positions", positions), ("page_table", table), ("block_row", row))
        }

    def _groups(self) -> dict[str, np.ndarray]:
        tokens, (experts,) = self.call.arguments["x"].shape[0], self.call.arguments["group_sizes"].shape
        chosen = np.random.default_rng(0).integers(0, experts, tokens - self.classes)
        if self.classes:
            chosen[chosen == 1] = 0  # an expert without tokens
        sizes = np.bincount(chosen, minlength=experts)
        self._touched["weight"] = int((sizes > 0).sum())
        return {"group_sizes": sizes.astype(np.int32)}

    def _choice(self) -> dict[str, np.ndarray]:
        arguments = self.call.arguments
        tokens, pairs, experts = (arguments[name].shape[0] for name in ("x", "order", "sizes"))
        scores = np.random.default_rng(0).normal(size=(tokens, experts)).astype(np.float32)
        valid = np.ones(tokens, bool)
        if self.classes and tokens > 2:
            valid[1] = False
        rule = expert_choice.Rule(pairs // tokens, "softmax")
        with jax.ensure_compile_time_eval():
            known = jnp.asarray(scores), None, jnp.asarray(valid), jnp.int32(0)
            choice = expert_choice.choose_experts(*known, own=experts, rule=rule, implementation="xla")
        sizes = np.asarray(choice.sizes)
        self._touched |= dict.fromkeys(("up", "down"), int((sizes > 0).sum()))
        return {"order": np.asarray(choice.order), "place": np.asarray(choice.place), "sizes": sizes}
