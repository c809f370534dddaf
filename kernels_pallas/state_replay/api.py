"""Replay: compute outputs of a few new tokens from an anchor, which is only read, and a tail of inputs.

The recurrence is that of `kernels_pallas.state_update`. A row of c tokens is not stored as S(c) but as its
anchor S(a), a <= c, in a slot, and its tail, the inputs of tokens a .. c-1. A step reads both, appends its own tokens'
inputs to the tail, and writes a whole state only when it reaches a multiple of the interval.
"""

from typing import NamedTuple, Unpack

from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.shape_check import check_groups, shapes_checked
from kernels_pallas.state_replay import native, pallas_gpu, pallas_tpu, xla
from kernels_pallas.tails import Places, check_tail

REPLAY = (
    *dispatch.kernels("tpu", pallas_tpu, "state_replay"),
    *dispatch.kernels("gpu", pallas_gpu, "state_replay"),
    dispatch.Implementation("native", native.state_replay, native.unsupported, "cpu"),
    dispatch.Implementation("xla", xla.state_replay),
    dispatch.Implementation("xla_row_blocks", xla.row_blocks),
    dispatch.Implementation("xla_all_rows", xla.all_rows),
)


class Tail(NamedTuple):
    """The tails of one layer: rings of inputs. A row's token n is at entry n % L. Tail 0 belongs to no row.

    Channels are flat, as a layer has them: with heads and head_dim as axes of their own, a TPU would pad each head to
    128 channels. The log of the decay, dt * a, is computed from dt.
    """

    x: Float[Array, "tails entries inner"]
    """[.., heads * head_dim], in the precision that the layer computes in."""
    b: Float[Array, "tails entries size"]
    """[.., groups * state], likewise."""
    dt: Float[Array, "tails entries heads"]
    """float32, after softplus."""


@shapes_checked
def state_replay(
    states: Float[Array, "slots heads head_dim state"],
    tail: Tail,
    x: Float[Array, "rows steps heads head_dim"],
    dt: Float[Array, "rows steps heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows steps groups state"],
    c: Float[Array, "rows steps groups state"],
    d: Float[Array, " heads"],
    *,
    implementation: str | None = None,
    **places: Unpack[Places],
) -> tuple[Float[Array, "rows steps heads head_dim"], Float[Array, "slots heads head_dim state"], Tail]:
    """y of `num_tokens` new tokens of each row, from S(anchor_length) and the tail's inputs since then.

    The new tokens' inputs are appended to the tail. Where they reach the next multiple of the interval,
    m = (length // interval + 1) * interval <= length + num_tokens, S(m) goes to `write_slot`. No other slot, and no
    other entry of a tail, changes a bit.

    Only entries of a tail with anchor_length <= n < length are used; all others may contain anything, including NaN or
    another row's inputs. Rejected drafts are therefore discarded by not advancing `length`, and a tail needs no reset:
    with anchor_length = length, none of its entries is read.

    The rules of `kernels_pallas.slots` apply: no row writes a slot that another row reads; a row may write the one
    that it reads itself (it does so where no other slot is left). States are computed in float32 and rounded to their
    dtype where they are written; products take operands in x's dtype.

    Args:
        states: float32 or bfloat16. Donate it, and the tail: they are updated in place.
        tail: as many entries as a power of two, and at least anchor_length .. length + num_tokens - 1 at once; with
            anchor_length > length - interval, interval + steps - 1 suffice.
        x: any float dtype; so are b and c.
        dt: step sizes after softplus.
        a: -exp(A_log).
        d: the skip weight.
        places: see `kernels_pallas.tails.Places`.
    Returns:
        y in x's dtype, states and tail.
    Raises:
        ValueError: the shapes do not match, or the interval or the number of entries is impossible.
        UnsupportedError: the named implementation does not exist or cannot run this call.
    """
    (_, steps, heads, head_dim), (groups, state) = x.shape, b.shape[2:]
    check_groups("state_replay", heads, groups)
    tail = Tail(*tail)
    channels = {"x": heads * head_dim, "b": groups * state, "dt": heads}
    check_tail("state_replay", tail._asdict(), channels, interval=places["interval"], steps=steps)
    inputs = x, dt, a, b, c, d
    return dispatch.call("state_replay", REPLAY, implementation, states, tail, *inputs, **places)
