"""The state store: every sequence's recurrent state in slots, every token's keys and values in pages.

One slot holds a complete resumption point S(n) of one sequence: the state that each mixer declares
(`mamba_jax.config.StateArray`), and the final hidden state of token n. One page holds `page_size` tokens of every
attention layer. Index 0 of both is null: padding uses it, reads of it return zeros, and writes to it are dropped.

Under replay, a row that has absorbed c tokens has a slot with S(a), a <= c, its anchor, and a tail with the inputs of
tokens a .. c-1; its next step computes what it needs of S(c) from both. Each seat has a tail, which consists of ring
buffers: token n is at entry n modulo their length. Values written to tail 0 are discarded. Tails are never cleared: a
step reads only the positions that the row's own numbers name, and these start again with each prefill.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Shaped

from kernels_pallas import native
from kernels_pallas.slots import load, put, read_slots, take, write_slots  # noqa: F401 - for users of the store
from mamba_jax.config import HybridConfig, ModelConfigError, Role, StateArray, StateUnit
from mamba_jax.rounding import NarrowDtype, RoundedRows

EXPERTS, EXPERT = "experts", np.dtype(np.int16)
"""The name of recorded experts in the state of a sublayer, and their dtype."""
SlotArrays = dict[str, Shaped[Array, "slots ..."]]
"""One sublayer's part of every slot: the arrays that its mixer declares, by name."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Store:
    """All slots and pages of a model; donated to every step and updated in place."""

    slots: tuple[SlotArrays, ...]
    """The arrays of each sublayer with state in slots, in model order."""
    kv: tuple[Float[Array, "pages page_size kv2 head_dim"], ...]
    """One for each use of attention, in model order, then the draft layers'; K at even, V at odd index of axis 2."""
    hidden: Float[Array, "slots hidden"]
    """The hidden state, after the final norm, of the last token each slot has absorbed; then what a drafter reads of
    it, if the model has one."""
    tags: Int[Array, "slots 2"] | None
    """Debugging only: how often each slot has been written, and how many tokens it holds."""
    tails: Tails | None = None
    """With replay: the inputs since the anchors of running rows."""
    experts: Int[Array, "pages page_size 1 choices"] | None = None
    """The routed experts of each token, layer by layer in model order; None if they are not recorded."""
    rounded: RoundedRows | None = field(default=None, metadata={"static": True})
    """Rounding of running rows' states to the form of waiting states, if any."""

    @property
    def num_slots(self) -> int:
        """Number of slots, including the null slot."""
        return self.hidden.shape[0]

    @property
    def num_pages(self) -> int:
        """Number of pages, including the null page; 0 for a model without attention."""
        return self.kv[0].shape[0] if self.kv else 0

    @property
    def page_size(self) -> int:
        """Tokens in a page; 0 for a model without attention."""
        return self.kv[0].shape[1] if self.kv else 0


@dataclass(frozen=True)
class StoreShape:
    """The arrays of one slot and one page of a model, to make a store and to count its bytes."""

    slots: tuple[tuple[StateArray, ...], ...]
    """The arrays of each sublayer with state in slots."""
    pages: tuple[StateArray, ...]
    """The array of each use of attention, including the draft layers', whose shape may be another."""
    hidden: StateArray
    tails: tuple[tuple[StateArray, ...], ...] = ()
    """The arrays that replay keeps of each token, for each sublayer with state in slots."""
    experts: int = 0
    """Number of recorded experts of each token in all layers; 0: they are not recorded."""
    lanes: int = 1
    """A device pads some arrays to a multiple of this (see `store_layout`). Only used to count bytes."""

    @classmethod
    def of(cls, config: HybridConfig, *, routed_experts: bool = False) -> StoreShape:
        """Returns the shape of a model's state, its draft layers included.

        `routed_experts`: record the experts of each token, except those of draft layers.

        Raises:
            ModelConfigError: two mixers declare different arrays under the same name.
        """
        kinds = config.pattern + config.mtp_pattern
        drafter = () if config.drafter is None else config.drafter.state()
        shape = cls(
            slots=tuple(arrays for kind in kinds if (arrays := config.state(kind, StateUnit.SLOT))),
            pages=(*(array for kind in kinds for array in config.state(kind, StateUnit.TOKEN)), *drafter),
            hidden=StateArray("hidden", (config.step_size,), Role.ACTIVATION, None),
            tails=tuple(config.state(kind, StateUnit.TAIL) for kind in kinds if config.state(kind, StateUnit.SLOT)),
            experts=config.experts_per_token if routed_experts else 0,
        )
        for array in (*shape._in_slots, *shape._in_tails, *shape.pages):
            if shape.arrays_and_tails[array.name] != array:
                raise ModelConfigError(f"mixers of this model declare different states under the name {array.name!r}")
        if len({array.name for array in shape.pages[: len(shape.pages) - len(drafter)]}) > 1:
            raise ModelConfigError("mixers of this model declare different arrays in pages")
        return shape

    @cached_property
    def arrays(self) -> Mapping[str, StateArray]:
        """The distinct arrays by name, in the order of sublayers; the hidden state is last."""
        return MappingProxyType({array.name: array for array in (*self._in_slots, *self.pages, self.hidden)})

    @cached_property
    def arrays_and_tails(self) -> Mapping[str, StateArray]:
        """The same, with the tails that replay keeps."""
        return MappingProxyType({**self.arrays, **{array.name: array for array in self._in_tails}})

    @property
    def _in_slots(self) -> tuple[StateArray, ...]:
        return tuple(array for arrays in self.slots for array in arrays)

    @property
    def _in_tails(self) -> tuple[StateArray, ...]:
        return tuple(array for arrays in self.tails for array in arrays)

    def map(self, change: Callable[[StateArray], StateArray]) -> StoreShape:
        """Returns the shape with every array changed."""
        return replace(
            self,
            slots=tuple(tuple(map(change, arrays)) for arrays in self.slots),
            pages=tuple(map(change, self.pages)),
            hidden=change(self.hidden),
            tails=tuple(tuple(map(change, arrays)) for arrays in self.tails),
        )

    @property
    def last_hidden(self) -> StateArray:
        """The array of hidden states in tails."""
        return replace(self.hidden, per=StateUnit.TAIL, of=self.hidden.name, last=1)

    @property
    def unreplayable_state(self) -> str | None:
        """The name of a state that cannot be computed again from inputs; None where all can."""
        replayed = {tail.of for tail in self._in_tails}
        return next((array.name for array in self._in_slots if array.name not in replayed), None)

    def has_replay_kernels(self, platform: str) -> bool:
        """Returns whether a platform has a kernel to replay every recurrent state; on CPU, whether it is built."""
        if platform == "cpu" and native.WHY_MISSING:
            return False
        return all(platform in self.arrays[name].replay_kernels for name in self.accumulated)

    def bytes_per_tail(self, dtype: Any, ssm_dtype: Any, replay: Replay, *, debug_state: bool = False) -> int:
        """Returns bytes of one row's tail over all layers."""
        arrays = (*self._in_tails, self.last_hidden)
        kept = sum(replay.entries(array) * self._bytes(array, dtype, ssm_dtype) for array in arrays)
        return kept + (4 * replay.longest if debug_state else 0)

    def bytes_per_slot(self, dtype: Any, ssm_dtype: Any = jnp.float32, *, debug_state: bool = False) -> int:
        """Returns bytes of one slot over all layers. `ssm_dtype` is for recurrent states, `dtype` for all else."""
        arrays = (*self._in_slots, self.hidden)
        return sum(self._bytes(array, dtype, ssm_dtype) for array in arrays) + (8 if debug_state else 0)

    @property
    def accumulated(self) -> tuple[str, ...]:
        """Names of the arrays in slots that accumulate."""
        return tuple(dict.fromkeys(array.name for array in self._in_slots if array.role is Role.ACCUMULATED))

    def bytes_per_waiting_state(self, dtype: Any, ssm_dtype: Any, narrow: NarrowDtype | None) -> int:
        """Returns bytes of one state that is kept elsewhere than in a slot: without padding, and in the narrow form."""

        def of(array: StateArray) -> int:
            if narrow is not None and array.role is Role.ACCUMULATED:
                return narrow.bytes(array.shape)
            return math.prod(array.shape) * jnp.dtype(array.dtype(dtype, ssm_dtype)).itemsize

        return sum(map(of, (*self._in_slots, self.hidden)))

    def bytes_per_page(self, page_size: int, dtype: Any) -> int:
        """Returns bytes of one page over all attention layers; 0 for a model without attention."""
        experts = -(-self.experts // self.lanes) * self.lanes * EXPERT.itemsize
        return page_size * (sum(self._bytes(array, dtype, dtype) for array in self.pages) + experts)

    def _bytes(self, array: StateArray, dtype: Any, ssm_dtype: Any) -> int:
        return array.size(self.lanes) * jnp.dtype(array.dtype(dtype, ssm_dtype)).itemsize


def init_store(
    config: HybridConfig | StoreShape,
    *,
    num_slots: int,
    num_pages: int,
    page_size: int,
    dtype: Any,
    ssm_dtype: Any = jnp.float32,
    kv_dtype: Any = None,
    debug_state: bool = False,
    replay: Replay | None = None,
    num_tails: int = 0,
    rounding: tuple[NarrowDtype, int] | None = None,
    routed_experts: bool = False,
) -> Store:
    """Returns a store of zeros.

    Args:
        config: the model's config, or the shape of its state.
        num_slots: slots, the null slot included (at least 2).
        num_pages: pages, the null page included; ignored by a model without attention.
        page_size: tokens in a page.
        dtype: of keys, values, convolution windows and hidden states.
        kv_dtype: of keys and values, if another.
        ssm_dtype: of the recurrent states; anything below float32 trades accuracy for memory.
        debug_state: also tag each slot with what was written to it, and check the tag at each read.
        replay: hold running rows by anchors and tails; None = by states alone.
        num_tails: tails, the null tail included: one for each seat.
        rounding: round states of running rows, like waiting states, at every multiple of this many tokens.
        routed_experts: record the experts of each token. Ignored if `config` is a shape.

    Raises:
        ValueError: fewer than two slots or pages, an empty page, or a state that replay cannot compute.
    """
    shape = config if isinstance(config, StoreShape) else StoreShape.of(config, routed_experts=routed_experts)
    if num_slots < 2:
        raise ValueError(f"num_slots is {num_slots}: at least 2 are needed, the null slot and one more")
    if shape.pages and (num_pages < 2 or page_size < 1):
        raise ValueError(f"{num_pages} pages of {page_size} tokens: at least the null page and one more are needed")
    if replay is not None and (shape.unreplayable_state or num_tails < 2):
        state = shape.unreplayable_state
        raise ValueError(f"replay with {num_tails} tails (at least 2 are needed) and no way for {state}")

    # Every array is its own allocation: donation cannot alias two outputs to one buffer.
    def zeros(array: StateArray) -> Array:
        if array.per is StateUnit.TAIL:
            assert replay is not None
            return jnp.zeros((num_tails, replay.entries(array), *array.shape), array.dtype(dtype, ssm_dtype))
        if array.per is StateUnit.SLOT:
            return jnp.zeros((num_slots, *array.shape), array.dtype(dtype, ssm_dtype))
        return jnp.zeros((num_pages, page_size, *array.shape), dtype if kv_dtype is None else kv_dtype)

    return Store(
        slots=tuple({array.name: zeros(array) for array in arrays} for arrays in shape.slots),
        kv=tuple(zeros(array) for array in shape.pages),
        hidden=zeros(shape.hidden),
        tags=jnp.zeros((num_slots, 2), jnp.int32) if debug_state else None,
        tails=None
        if replay is None
        else Tails(
            layers=tuple({array.name: zeros(array) for array in arrays} for arrays in shape.tails),
            hidden=zeros(shape.last_hidden),
            tags=jnp.full((num_tails, replay.longest), -1, jnp.int32) if debug_state else None,
            interval=replay.interval,
        ),
        experts=jnp.zeros((num_pages, page_size, 1, shape.experts), EXPERT) if shape.experts else None,
        rounded=rounding and RoundedRows(*rounding, shape.accumulated),
    )


def declarations(shape: StoreShape, store: Store) -> Store:
    """Returns the declaration of each array of a store, in the store's structure.

    Arrays without one (tags, recorded experts, hidden states in tails) get that of hidden states: devices have all of
    them.
    """
    named, found = shape.arrays_and_tails, jax.tree.map(lambda _: shape.hidden, store)

    def layers(of_each: Any) -> Any:
        return tuple({name: named[name] for name in arrays} for arrays in of_each)

    tails = store.tails and replace(found.tails, layers=layers(store.tails.layers))
    # Without drafts, a store has no keys and values of the draft layers, which are the last.
    kv: Any = shape.pages[: len(store.kv)]
    return replace(found, slots=layers(store.slots), kv=kv, tails=tails)


def store_bytes(store: Store) -> int:
    """Returns bytes of all arrays of a store (which may be abstract)."""
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(store))


TailArrays = dict[str, Shaped[Array, "tails entries ..."]]
"""One sublayer's part of every tail, by name."""


@dataclass(frozen=True)
class Replay:
    """Replay settings of running rows; None: a state after each token."""

    interval: int
    """R: a decode step writes a state where it reaches a multiple of it."""
    num_drafts: int
    """K, the most drafts of a step."""

    def entries(self, array: StateArray) -> int:
        """Length of a ring: the tokens that count before a step, and those of one step; a power of two."""
        before = self.interval if array.last is None else array.last
        return 1 << (before + self.num_drafts - 1).bit_length()

    @property
    def longest(self) -> int:
        """Length of the longest rings."""
        return 1 << (self.interval + self.num_drafts - 1).bit_length()


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tails:
    """The tails of all seats."""

    layers: tuple[TailArrays, ...]
    """One for each sublayer that keeps something in slots, in model order."""
    hidden: Float[Array, "tails entries hidden"]
    """The hidden states, after the final norm, of each seat's last tokens."""
    tags: Int[Array, "tails entries"] | None
    """Debugging only: which token of its sequence each entry of the longest rings is; -1 = wrong."""
    interval: int = field(metadata={"static": True})
