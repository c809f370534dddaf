"""Replay of the delta rule. `kernels_pallas.state_replay` describes anchors and tails.

The rule (Yang et al., 2024) adds u[n] k[n] to the decayed state, where u[n] = beta (v - S k) is the difference between
a token's value and the stored one. A tail stores the u of each token, so replaying it is linear, as in Mamba2. Only
the u of new tokens are computed, one after the other. Their k and q are known beforehand, so the anchor is read once.
"""

import math
from typing import NamedTuple, Unpack

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.delta_replay import pallas_gpu, pallas_tpu, xla
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.tails import Places, check_tail

REPLAY = (
    *dispatch.kernels("tpu", pallas_tpu, "delta_replay"),
    *dispatch.kernels("gpu", pallas_gpu, "delta_replay"),
    dispatch.Implementation("xla", xla.delta_replay),
    dispatch.Implementation("xla_row_blocks", xla.row_blocks),
    dispatch.Implementation("xla_all_rows", xla.all_rows),
)


class DeltaTail(NamedTuple):
    """The tails of one layer. A row's token n is at entry n % L. Tail 0 belongs to no row."""

    u: Float[Array, "tails entries inner"]
    """[.., heads * head_dim]: what a token added to the state, by its k. Any float dtype; float32 loses nothing."""
    k: Float[Array, "tails entries size"]
    """[.., groups * state], in the precision that the layer computes in."""
    log_decay: Float[Array, "tails entries decays"]
    """[.., heads], or [.., heads * state] where channels decay on their own. float32."""


@shapes_checked
def delta_replay(
    states: Float[Array, "slots heads head_dim state"],
    tail: DeltaTail,
    q: Float[Array, "rows steps groups state"],
    k: Float[Array, "rows steps groups state"],
    v: Float[Array, "rows steps heads head_dim"],
    log_decay: Float[Array, "rows steps heads"] | Float[Array, "rows steps heads state"],
    beta: Float[Array, "rows steps heads"],
    *,
    implementation: str | None = None,
    **places: Unpack[Places],
) -> tuple[Float[Array, "rows steps heads head_dim"], Float[Array, "slots heads head_dim state"], DeltaTail]:
    """y of `num_tokens` new tokens of each row, from S(anchor_length) and the tail's tokens since then.

    Slots, tails, lengths and the interval have the meaning and the conditions of `kernels_pallas.state_replay`.

    Args:
        states: float32 or bfloat16. Donate it, and the tail: they are updated in place.
        q: any float dtype; so are k and v.
        log_decay: at most 0; one number for each head, or for each channel of its keys.
        places: see `kernels_pallas.tails.Places`.
    Returns:
        y in v's dtype, states and tail.
    Raises:
        ValueError: the shapes do not match, or the interval or the number of entries is impossible.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    (_, steps, heads, head_dim), (groups, state) = v.shape, q.shape[2:]
    check_groups("delta_replay", heads, groups)
    tail = DeltaTail(*tail)
    channels = {"u": heads * head_dim, "k": groups * state, "log_decay": math.prod(log_decay.shape[2:])}
    check_tail("delta_replay", tail._asdict(), channels, interval=places["interval"], steps=steps)
    inputs = q, k, v, log_decay, beta
    return dispatch.call("delta_replay", REPLAY, implementation, states, tail, *inputs, **places)
