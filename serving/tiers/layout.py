"""The parts of a state and its keys and values below the device, and the models that can use them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from mamba_jax.store import Store
from serving.core.tiers.tier import Sizes
from serving.state_transfer.identity import STATE_PACKAGES, source_digest
from serving.state_transfer.programs import Arrangement, state_spec

FORMAT = "mamba-jax checkpoint 1: state[layer]; kv[layer, token, K even V odd, head_dim]"
_FILE = 4096  # bytes of a file's header, at most, the names of its blocks not counted


@dataclass(frozen=True)
class Layout:
    """Of one store."""

    arrangement: Arrangement
    state: Mapping[str, jax.ShapeDtypeStruct]  # a state's arrays by name, as the model defines them
    kv: jax.ShapeDtypeStruct | None
    """Keys and values of a whole block, of all layers: [layer, B, ...]; None without attention."""
    page_size: int
    block: int  # B, in tokens

    @classmethod
    def of(cls, arrangement: Arrangement, store: Store, block: int) -> Layout:
        """That of a running engine."""
        kv = None
        if store.kv:
            shape = (len(store.kv), block, *arrangement.kv_shape)
            kv = jax.ShapeDtypeStruct(shape, store.kv[0].dtype)
        return cls(arrangement, state_spec(store, arrangement), kv, store.page_size or block, block)

    @property
    def layers(self) -> int:
        """Layers that have keys and values."""
        return self.kv.shape[0] if self.kv is not None else 0

    @property
    def pages_per_block(self) -> int:
        """Pages that a block fills."""
        return self.block // self.page_size

    def sizes(self, *, in_files: bool) -> Sizes:
        """Bytes of all parts in memory."""
        state = sum(_bytes(spec) for spec in self.state.values())
        page = _bytes(self.kv) // self.pages_per_block if self.kv is not None else 0
        return Sizes(state, page, self.page_size, self.block, _FILE if in_files else 0)

    def fingerprint(self, model: str) -> str:
        """What must be the same for one process to go on from a state that another one wrote: a release that computes
        or reads weights differently never goes on from older states. `model`: a digest of its weights."""
        state = [(name, spec.shape, str(spec.dtype)) for name, spec in self.state.items()]
        kv = None if self.kv is None else (self.kv.shape, str(self.kv.dtype))
        text = repr((FORMAT, model, source_digest(STATE_PACKAGES), state, kv, self.page_size, self.block))
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def _bytes(spec: jax.ShapeDtypeStruct) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize
