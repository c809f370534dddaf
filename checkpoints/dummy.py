"""Random weights for any configuration, made on the devices themselves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from checkpoints.initial import initial_values
from checkpoints.placing import Shardings, nbytes, progress_bar, sharding_of


def dummy_parameters(
    parameters: Mapping[str, jax.ShapeDtypeStruct],
    *,
    seed: int = 0,
    tied: bool = False,
    shardings: Shardings = None,
    progress: bool = False,
) -> dict[str, jax.Array]:
    """Draw every parameter; equal seeds give equal weights, however they are sharded.

    Args:
        parameters: shape and dtype by dotted path.
        seed: of the draws.
        tied: the embedding is the output head too.
        shardings: where each parameter goes.
        progress: show a bar.
    """
    key = jax.random.key(seed)
    result = {}
    with progress_bar("Drawing weights", sum(map(nbytes, parameters.values())), progress) as advance:
        for path, target in parameters.items():
            own = jax.random.fold_in(key, zlib.crc32(path.encode()))
            draw = _compiled(_kind(path), target.shape, target.dtype, tied, sharding_of(shardings, path))
            result[path] = jax.block_until_ready(draw(own))
            advance(nbytes(target))
    return result


def _kind(path: str) -> str:
    """The end of a path, which decides the distribution: so layers of equal shape share one compiled program."""
    return ".".join(path.split(".")[-2:])


def _compiled(kind: str, shape: tuple[int, ...], dtype: Any, tied: bool, sharding: Sharding | None) -> Any:
    return jax.jit(partial(_draw, kind=kind, shape=shape, dtype=dtype, tied=tied), out_shardings=sharding)


def _draw(key: jax.Array, *, kind: str, shape: tuple[int, ...], dtype: Any, tied: bool) -> jax.Array:
    normal, uniform = partial(jax.random.normal, key), partial(jax.random.uniform, key)
    return initial_values(kind, shape, normal, uniform, jnp, tied).astype(dtype)
