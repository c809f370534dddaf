"""How often each token was emitted, in a table of all seats for penalties."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from mamba_jax.sharding.axis import TENSOR, axis_index, axis_mesh


def count_tokens(
    counts: Int[Array, "seats vocab"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
) -> Int[Array, "seats vocab"]:
    """One more of each token at its seat; past the last seat nothing is counted.

    On several devices each counts the tokens of its part of the vocabulary, where that divides evenly.
    """
    mesh = axis_mesh()
    if mesh is None or counts.shape[1] % mesh.shape[TENSOR]:
        return counts.at[seat, tokens].add(1, mode="drop")

    def on_each_device(
        part: Int[Array, "seats part"], seat: Int[Array, "rows H"], tokens: Int[Array, "rows H"]
    ) -> Int[Array, "seats part"]:
        place = tokens - axis_index() * part.shape[1]
        mine = (place >= 0) & (place < part.shape[1])
        return part.at[jnp.where(mine, seat, part.shape[0]), place].add(1, mode="drop")

    own = P(None, TENSOR)
    divided = jax.shard_map(on_each_device, mesh=mesh, in_specs=(own, P(), P()), out_specs=own, check_vma=False)
    return divided(counts, seat, tokens)
