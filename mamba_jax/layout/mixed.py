"""The tokens of a step with decode rows and prefill rows: the decode rows' tokens first."""

from dataclasses import dataclass, replace
from typing import Any, Self

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from mamba_jax.layout.base import Inputs, Keys, Operation, Pages, Parameters, Queries, Span
from mamba_jax.layout.decode import DecodeLayout, ReplayLayout
from mamba_jax.layout.member import Member
from mamba_jax.layout.prefill import PrefillLayout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MixedLayout:
    """The packed tokens of `decode`, then those of `prefill`.

    Operations per token (projections, norms, experts) get one array of tokens, so a step reads the weights once.
    Recurrences, convolutions and attention run over each part in turn, decode first.
    """

    decode: DecodeLayout
    prefill: PrefillLayout

    @property
    def positions(self) -> Int[Array, " T"]:
        return jnp.concatenate([self.decode.positions, self.prefill.positions])

    @property
    def valid(self) -> Bool[Array, " T"]:
        return jnp.concatenate([self.decode.valid, self.prefill.valid])

    @property
    def adapter(self) -> Int[Array, " T"] | None:
        if self.decode.adapter is None or self.prefill.adapter is None:
            return None
        return jnp.concatenate([self.decode.adapter, self.prefill.adapter])

    def on_member(self, member: Member) -> Self:
        """Returns the layout on a device that has one member's pages."""
        return replace(self, decode=self.decode.on_member(member), prefill=self.prefill.on_member(member))

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        ours = [jnp.split(x, [len(self.decode.valid)]) for x in inputs]
        of_rows, state = self.decode.run(operation, tuple(x for x, _ in ours), parameters, state)
        # Prefill does not use tails; it reads and writes only slots.
        slots = jax.tree.map(lambda own: own[0] if _is_pair(own) else own, state, is_leaf=_is_pair)
        of_tiles, slots = self.prefill.run(operation, tuple(x for _, x in ours), parameters, slots)
        state = jax.tree.map(lambda own, new: (new, own[1]) if _is_pair(own) else new, state, slots, is_leaf=_is_pair)
        return jnp.concatenate([of_rows, of_tiles.astype(of_rows.dtype)]), state

    def record(
        self, values: Shaped[Array, "T 1 choices"], pages: Shaped[Array, "pages page_size 1 choices"]
    ) -> Shaped[Array, "pages page_size 1 choices"]:
        of_rows, of_tiles = jnp.split(values, [len(self.decode.valid)])
        return self.prefill.record(of_tiles, self.decode.record(of_rows, pages))

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: Pages, span: Span) -> tuple[Queries, Pages]:
        at = [len(self.decode.valid)]
        layouts: list[DecodeLayout | PrefillLayout] = [self.decode, self.prefill]
        values = [None, None] if v is None else jnp.split(v, at)
        # All writes come first. A write after a read of the same pages could make the compiler copy them.
        for layout, own_k, own_v in zip(layouts, jnp.split(k, at), values, strict=True):
            kv = layout.write_kv(own_k, own_v, kv)
        parts = zip(layouts, jnp.split(q, at), strict=True)
        return jnp.concatenate([layout.read_kv(own, kv, span) for layout, own in parts]), kv


def has_tails(layout: Any) -> bool:
    """Returns whether a layout's operations take, with each array in slots, the tails of its inputs."""
    return isinstance(layout.decode if isinstance(layout, MixedLayout) else layout, ReplayLayout)


def _is_pair(state: Any) -> bool:
    """Returns whether this is an array in slots with its tails, as a replay takes it."""
    return isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict)
