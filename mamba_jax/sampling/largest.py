"""The largest of logits, also where each device has those of its part of the vocabulary.

Devices exchange the largest logit of their part and its index, not the logits. The result equals that over all logits:
of equal logits, the first. A flag says whether all of them are finite.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from mamba_jax.sharding.axis import TENSOR, axis_index, axis_mesh

WIDTH = 32
"""Size of the blocks that are searched first."""
_NARROW = 4
"""Size of the blocks that the best of these are cut into."""


def largest(logits: Float[Array, "n vocab"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
    """Returns the index of the first of the largest logits (float32), and whether all are finite.

    On several devices each looks at a part of the vocabulary, where that divides evenly.
    """
    mesh = axis_mesh()
    if mesh is None or logits.shape[-1] % mesh.shape[TENSOR]:
        return argmax(logits), jnp.isfinite(logits).all(axis=-1)

    def on_each_device(part: Float[Array, "n part"]) -> tuple[Int[Array, " n"], Bool[Array, " n"]]:
        place = argmax(part) + axis_index() * part.shape[1]
        # In one exchange, and so as integers: as floats, small ones could be taken for zeros on the way.
        best = lax.bitcast_convert_type(part.max(axis=-1), jnp.int32)
        found = lax.all_gather(jnp.stack([best, place, jnp.isfinite(part).all(axis=-1).astype(jnp.int32)]), TENSOR)
        # Parts are in the order of the vocabulary: the first device with the largest has the first of them.
        device = jnp.argmax(lax.bitcast_convert_type(found[:, 0], jnp.float32), axis=0)
        return jnp.take_along_axis(found[:, 1], device[None], axis=0)[0], found[:, 2].all(axis=0)

    divided = jax.shard_map(on_each_device, mesh=mesh, in_specs=P(None, TENSOR), out_specs=(P(), P()), check_vma=False)
    return divided(logits)


def argmax(logits: Float[Array, "*rows vocab"]) -> Int[Array, "*rows"]:
    """Returns the first of the largest, in two levels: XLA:CPU's own argmax takes 20 times as long.

    On a TPU blocks would be a copy of the logits, and its own argmax is one pass over them.
    """

    def by_blocks(logits: Array) -> Array:
        blocks = in_blocks(logits, WIDTH, -jnp.inf)
        block = jnp.argmax(blocks.max(axis=-1), axis=-1)
        within = jnp.take_along_axis(blocks, block[..., None, None], axis=-2)[..., 0, :]
        return (block * WIDTH + jnp.argmax(within, axis=-1)).astype(jnp.int32)

    def at_once(logits: Array) -> Array:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)

    return lax.platform_dependent(logits, tpu=at_once, default=by_blocks)


def most_likely(
    logits: Float[Array, "*rows vocab"], count: int
) -> tuple[Float[Array, "*rows count"], Int[Array, "*rows count"]]:
    """Computes `lax.top_k` in levels, because on GPU `lax.top_k` sorts the whole vocabulary with its indices.

    The first `count` lie in the `count` blocks with the largest maxima; of equals the first, there as here.
    """
    ids = None
    for width in (WIDTH, _NARROW):
        if logits.shape[-1] <= count * width:
            continue  # all blocks would be chosen
        blocks = in_blocks(logits, width, -jnp.inf)
        _, chosen = lax.top_k(blocks.max(axis=-1), count)
        chosen = jnp.sort(chosen, axis=-1)
        logits = jnp.take_along_axis(blocks, chosen[..., None], axis=-2).reshape(*logits.shape[:-1], -1)
        place = (chosen[..., None] * width + jnp.arange(width)).reshape(logits.shape)
        ids = place if ids is None else jnp.take_along_axis(ids, place, axis=-1)
    best, place = lax.top_k(logits, count)
    return best, place if ids is None else jnp.take_along_axis(ids, place, axis=-1)


def in_blocks(x: Float[Array, "*rows vocab"], width: int, fill: float = 0) -> Float[Array, "*rows blocks width"]:
    """Divides the vocabulary into blocks. The last block is padded."""
    padding = [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % width)]
    return jnp.pad(x, padding, constant_values=fill).reshape(*x.shape[:-1], -1, width)
