"""The common part of both sides of a split: an engine with programs for resumption points, manifest and transports."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mamba_jax.version import version
from serving.engine.assembly.build import AssembledEngine
from serving.engine.assembly.design import row_rounding
from serving.split.transports import Transport
from serving.split.wire import LAYOUT, PROTOCOL, Manifest, StateRequest
from serving.state_transfer.programs import Arrangement, Piece, PointPrograms, pieces, state_spec

Specs = list[jax.ShapeDtypeStruct]


class Worker:
    """An engine that exchanges states. Create it before the engine's loop runs.

    Args:
        built: the engine.
        transports: by kind.
        model: digest of the engine's weights, if already computed.
    """

    def __init__(self, built: AssembledEngine, transports: dict[str, Transport], *, model: str = "") -> None:
        self.engine, self.loop, config = built.engine, built.engine.loop, built.model.config
        store = self.loop.store
        assert store is not None
        self.arrangement = arrangement = Arrangement.of(config, store)
        self.programs, self.transports = PointPrograms(arrangement), transports
        self.verify = built.config.debug_state
        """Compare checksums of all fetched arrays (for debugging: it copies them to the host)."""
        self.kv: jax.ShapeDtypeStruct | None = None  # keys and values of one token in one layer; None without attention
        if store.kv:
            self.kv = jax.ShapeDtypeStruct(arrangement.kv_shape, store.kv[0].dtype)
        self.state = state = state_spec(store, arrangement)  # the transferred arrays of a state
        layers = config.num_attention_uses
        accumulated = [str(state[name].dtype) for name in arrangement.shape.accumulated]
        rounding = row_rounding(built.config)
        self.manifest = Manifest(
            protocol=PROTOCOL,
            layout=LAYOUT,
            model=model or built.weights_digest,
            dtype=str(store.hidden.dtype),
            kv_dtype=str(store.kv[0].dtype) if store.kv else "none",
            ssm_dtype=accumulated[0] if accumulated else "none",
            rounding="off" if rounding is None else f"{rounding[0].dtype} every {rounding[1]} tokens",
            state={name: tuple(spec.shape) for name, spec in state.items()},
            attention_layers=min(layers, len(store.kv)),
            draft_layers=max(0, len(store.kv) - layers),
            page_size=store.page_size,
            state_block_size=built.config.state_block_size,
            shards=arrangement.shards,
            max_model_len=built.size.max_model_len,
            versions={"mamba-jax": version(), "jax": jax.__version__},
            transports={name: transport.address for name, transport in transports.items()},
        )

    def close(self) -> None:
        """Stops listening."""
        for transport in self.transports.values():
            transport.close()


def point_specs(worker: Worker, want: StateRequest, position: int, ssm_dtype: str) -> tuple[Specs, list[Piece]]:
    """Returns the specs of the transferred arrays, those of the state and then one per piece, as both sides compute
    them. `ssm_dtype`: dtype of recurrent states on the sending side."""
    declared = worker.arrangement.shape.arrays
    specs = [
        jax.ShapeDtypeStruct(spec.shape, jnp.dtype(declared[name].dtype(spec.dtype, ssm_dtype)))
        if name in declared
        else spec
        for name, spec in worker.state.items()
    ]
    if worker.kv is None:
        return specs, []
    cut, kv = pieces(want.start, position, want.unit), worker.kv
    specs += [jax.ShapeDtypeStruct((want.layers, piece.tokens, *kv.shape), kv.dtype) for piece in cut]
    return specs, cut


def shapes_of(arrays: Sequence[Any]) -> list[tuple[tuple[int, ...], str]]:
    """Returns the shape and dtype of each array, as sent and compared."""
    return [(tuple(array.shape), str(array.dtype)) for array in arrays]


def checksums(arrays: Sequence[Any]) -> list[int]:
    """Returns the CRC-32 of each array's bytes."""
    return [zlib.crc32(np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data) for array in arrays]
