"""The linear recurrence. For each token t of a row, per head (of group g = head // (heads / groups)):

    S_t = S_{t-1} * exp(log_decay_t)
    S_t = S_t + strength_t * (value_t - S_t . key_t[g]) (outer) key_t[g]    with `erase`: the delta rule
    S_t = S_t + strength_t * value_t (outer) key_t[g]                       without
    y_t = S_t . query_t[g] + skip * value_t

Mamba2 and lightning attention do not erase: query is C, key is B, value is x, strength is the step size dt, log_decay
is dt * a ("Transformers are SSMs", Dao and Gu, 2024, section 6 for the chunked form). Gated delta nets erase: what the
state has stored under a key moves towards the value by the share `strength` ("Gated Delta Networks", Yang, Kautz and
Hatamizadeh, 2024, section 3.3). Their keys are expected to have length 1 at most, and strengths to be at most 2: then
the state is bounded. A decay is one number for each head, or one for each channel of its keys ("Kimi Linear", Kimi
Team, 2025).

A token with strength 0 in all heads is padding: whatever its other numbers are (NaN included) it leaves the state
bitwise as it was, and its y is 0. The rules of `kernels_pallas.slots` apply to states: a row may write the slot that it
reads, and no slot that another row reads or writes. State mathematics is float32.

`skip` [heads] is the weight of a direct path from value to output; None, as it must be with `erase`: there is none.
Outputs are in the value's dtype. Stores are float32 or bfloat16. Donate them and tails: they are updated in place.
"""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels_pallas import dispatch
from kernels_pallas.places import Anchored, Rows, Tiles
from kernels_pallas.recurrence import native, token_by_token
from kernels_pallas.recurrence.entry import Entry, Tail
from kernels_pallas.recurrence.replay import pallas_gpu as replay_gpu
from kernels_pallas.recurrence.replay import pallas_tpu as replay_tpu
from kernels_pallas.recurrence.replay import xla as replay_xla
from kernels_pallas.recurrence.scan import pallas_gpu as scan_gpu
from kernels_pallas.recurrence.scan import pallas_tpu as scan_tpu
from kernels_pallas.recurrence.scan import xla as scan_xla
from kernels_pallas.recurrence.update import pallas_gpu as update_gpu
from kernels_pallas.recurrence.update import pallas_tpu as update_tpu
from kernels_pallas.recurrence.update import xla as update_xla
from kernels_pallas.shape_check import check_groups, check_shapes, shapes_checked
from kernels_pallas.tails import check_tail

States = Float[Array, "slots heads head_dim state"]
Outputs = Float[Array, "rows steps heads head_dim"]
Skip = Float[Array, " heads"] | None

SCAN = (
    *dispatch.kernels("tpu", scan_tpu, "scan"),
    *dispatch.kernels("gpu", scan_gpu, "scan"),
    *native.implementations(native.scan, token_by_token.scan, native.scan_unsupported),
    dispatch.Implementation("xla", scan_xla.scan),
)
SEQUENCE = (
    *native.implementations(native.sequence, token_by_token.sequence),
    dispatch.Implementation("xla", scan_xla.sequence),
)
UPDATE = (
    *dispatch.kernels("tpu", update_tpu, "update"),
    *dispatch.kernels("gpu", update_gpu, "update"),
    *native.implementations(native.update, token_by_token.update, native.update_unsupported),
    dispatch.Implementation("xla", update_xla.update),
)
REPLAY = (
    *dispatch.kernels("tpu", replay_tpu, "replay"),
    *dispatch.kernels("gpu", replay_gpu, "replay"),
    dispatch.Implementation("native", native.replay, native.replay_unsupported, "cpu"),
    dispatch.Implementation("xla", replay_xla.replay),
)


@shapes_checked
def recurrence_scan(
    entry: Entry, store: States, tiles: Tiles, *, erase: bool, skip: Skip = None, implementation: str | None = None
) -> tuple[Outputs, States]:
    """Scans rows cut into tiles, from states in the store to states in the store. The entry is [tiles, tile_size, ...].

    Returns y and the store. At the end of each tile the state is rounded to the store's dtype, so that cutting a row
    between tiles into several calls changes nothing.
    """
    number = (tiles.first, "tiles")
    check_shapes("recurrence_scan", first=number, strength=(entry.strength, "tiles tile_size heads"))
    return _call("recurrence_scan", SCAN, implementation, entry, store, tiles, erase=erase, skip=skip)


@shapes_checked
def recurrence_sequence(
    entry: Entry, *, erase: bool, skip: Skip = None,
    initial_state: Float[Array, "rows heads head_dim state"] | None = None, chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Outputs, Float[Array, "rows heads head_dim state"]]:  # fmt: skip
    """Scans whole sequences of any length, without a store; differentiable in every float argument.

    Args:
        initial_state: zeros if None.
        chunk_size: a blocking choice; the result does not depend on it but for rounding.
    Returns:
        y, and the final state in float32.
    """
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"recurrence_sequence: chunk_size is {chunk_size}, expected at least 1")
    if initial_state is None:
        initial_state = jnp.zeros((len(entry.value), *entry.value.shape[2:], entry.key.shape[3]), jnp.float32)
    return _call(
        "recurrence_sequence", SEQUENCE, implementation, entry,
        erase=erase, skip=skip, initial_state=initial_state, chunk_size=chunk_size,
    )  # fmt: skip


@shapes_checked
def recurrence_update(
    entry: Entry, store: States, rows: Rows, *, erase: bool, skip: Skip = None, implementation: str | None = None
) -> tuple[Outputs, States]:
    """Runs `steps` recurrent steps per row, and writes the state after each to its slot. Returns y and the store.

    After each step the state is rounded to the store's dtype, so that several steps in one call equal one step in each
    of several calls. A token's y may be read before this rounding.
    """
    return _call("recurrence_update", UPDATE, implementation, entry, store, rows, erase=erase, skip=skip)


@shapes_checked
def recurrence_replay(
    entry: Entry, store: States, tail: Tail, places: Anchored, *, erase: bool, skip: Skip = None,
    implementation: str | None = None,
) -> tuple[Outputs, States, Tail]:  # fmt: skip
    """y of `num_tokens` new tokens of each row, from S(anchor_length), which is read once, and the tail.

    Replaying what a tail holds is linear also if the recurrence erases; only what new tokens add is then computed one
    token after the other. The new tokens are appended to the tail. Where they reach the next multiple of the interval,
    m = (length // interval + 1) * interval <= length + num_tokens, S(m) goes to `write_slot`. No other slot, and no
    other entry of a tail, changes a bit.

    Only entries of a tail with anchor_length <= n < length are used; all others may contain anything, including NaN or
    another row's inputs. Rejected drafts are therefore discarded by not advancing `length`, and a tail needs no reset:
    with anchor_length = length, none of its entries is read.

    States are computed in float32 and rounded to their dtype where they are written; products take operands in the
    value's dtype.

    Args:
        tail: as many entries as a power of two, and at least anchor_length .. length + num_tokens - 1 at once; with
            anchor_length > length - interval, interval + steps - 1 suffice.
    Returns:
        y, store and tail.
    """
    (_, steps, heads, head_dim), (groups, state) = entry.value.shape, entry.key.shape[2:]
    channels = {"value": heads * head_dim, "key": groups * state, "log_decay": math.prod(entry.log_decay.shape[2:])}
    check_tail("recurrence_replay", tail._asdict(), channels, interval=places.interval, steps=steps)
    return _call("recurrence_replay", REPLAY, implementation, entry, store, tail, places, erase=erase, skip=skip)


def _call(operation, implementations, name, entry, *args, **options):
    check_groups(operation, entry.value.shape[2], entry.key.shape[2])
    if options["erase"] and options["skip"] is not None:
        raise ValueError(f"{operation}: skip is not supported with erase")
    return dispatch.call(operation, implementations, name, entry, *args, **options)
