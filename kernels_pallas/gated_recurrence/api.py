"""The operations between the projections of a layer with a linear recurrence.

    value, vectors = convolution(value, vectors)                  `kernels_pallas.causal_conv1d`
    log_decay, strength; query, key = of the vectors              `kernels_pallas.gated_recurrence.gates`
    y = recurrence(query, key, value, log_decay, strength)        `kernels_pallas.recurrence`
    out = norm and gate of y                                      `kernels_pallas.gated_norm`

At a few rows a GPU needs longer to launch these operations one by one than to run them; as one operation they are two
kernels. In prefill, each reads and writes [tokens, inner]; on TPU, `gated_scan` is one kernel for Mamba2, and only its
inputs and the output are stored in memory. Sources: the Mamba2 block (Dao and Gu, 2024), "Gated Delta Networks" (Yang,
Kautz and Hatamizadeh, 2024), "Kimi Linear" (Kimi Team, 2025).

Sums, states, gate and norm are computed in float32; values and vectors after the convolution, vectors of length 1, and
y before the gate are rounded to the value's dtype. The rules of `kernels_pallas.slots` apply: a row may write the slot
that it reads, and no slot that another row reads or writes. Stores, windows and tails are updated in place: donate
them.
"""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float

from kernels_pallas import dispatch, fixed_order
from kernels_pallas.gated_recurrence import pallas_gpu, pallas_tpu, xla
from kernels_pallas.gated_recurrence.gates import Gates, Mamba2Gates
from kernels_pallas.places import Anchored, Packed, Rows
from kernels_pallas.recurrence import Tail
from kernels_pallas.shape_check import check_groups, shapes_checked

States = Float[Array, "slots heads head_dim state"]
Outputs = Float[Array, "rows steps inner"]

GATED_SCAN = (
    *dispatch.kernels("tpu", pallas_tpu, "gated_scan"),
    *fixed_order.implementations(xla.gated_scan, xla.gated_scan),
    dispatch.Implementation("xla", xla.gated_scan),
)
GATED_UPDATE = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_update"),
    *fixed_order.implementations(xla.gated_update, xla.gated_update),
    dispatch.Implementation("xla", xla.gated_update),
)
GATED_REPLAY = (
    *dispatch.kernels("gpu", pallas_gpu, "gated_replay"),
    dispatch.Implementation("xla", xla.gated_replay),
)


class Projections(NamedTuple):
    """The outputs of a layer's input projections."""

    gate: Float[Array, "rows steps inner"]
    """Of the output; value and vectors have the same dtype."""
    value: Float[Array, "rows steps inner"]
    vectors: Float[Array, "rows steps 2 groups state"]
    """Query and key, or key and query (`Gates.query_first`)."""
    decay: Float[Array, "rows steps decays"] | None
    """float32, before bias and activation: of each head, or of each channel of its keys. None: the strength gives it.
    """
    strength: Float[Array, "rows steps heads"]
    """float32, before bias and activation."""


class Weights(NamedTuple):
    """The weights between the projections. Both convolutions have SiLU."""

    a_log: Float[Array, " heads"]
    dt_bias: Float[Array, " decays"]
    skip: Float[Array, " heads"] | None
    value_taps: Float[Array, "inner width"]
    value_bias: Float[Array, " inner"] | None
    vector_taps: Float[Array, "channels width"]
    vector_bias: Float[Array, " channels"] | None
    norm: Float[Array, " n"] | None
    """Of all channels, or of one head; None: gate only."""


class Windows(NamedTuple):
    """The inputs of the two convolutions: in slots, the last ones before a state; in tails, those since the anchor."""

    value: Float[Array, "slots width-1 inner"]
    vectors: Float[Array, "slots width-1 channels"]
    value_ring: Float[Array, "tails ring_entries inner"] | None = None
    """As `causal_conv1d_replay` has it; None in updates."""
    vector_ring: Float[Array, "tails ring_entries channels"] | None = None


@shapes_checked
def gated_scan(
    zx: Float[Array, "tokens 2 inner"], query: Float[Array, "tokens groups state"],
    key: Float[Array, "tokens groups state"], log_decay: Float[Array, "tokens heads"],
    strength: Float[Array, "tokens heads"], weights: Weights, store: States,
    windows: Float[Array, "slots width-1 inner"], packed: Packed, *, gates: Mamba2Gates,
    implementation: str | None = None,
) -> tuple[Float[Array, "tokens inner"], States, Float[Array, "slots width-1 inner"]]:  # fmt: skip
    """Convolves the values of packed rows, scans, gates and normalizes, from slots to slots.

    Args:
        zx: the gate, and the convolution's input. Padding may contain any finite values.
        query, ..., strength: as of `kernels_pallas.recurrence`, convolved already; the strength is never 0 for a token.
        windows: inputs of the convolution of values, oldest first.
    Returns:
        The output in zx's dtype (of padding it is meaningless but finite), and both stores.
    """
    check_groups("gated_scan", strength.shape[1], key.shape[1])
    args = zx, query, key, log_decay, strength, weights, store, windows, packed
    return dispatch.call("gated_scan", GATED_SCAN, implementation, *args, gates=gates)


@shapes_checked
def gated_update(
    projections: Projections, weights: Weights, store: States, windows: Windows, rows: Rows, *,
    valid: Bool[Array, "rows steps"], gates: Gates, implementation: str | None = None,
) -> tuple[Outputs, States, Windows]:  # fmt: skip
    """Runs `steps` recurrent steps per row; states and windows after each go to its slot.

    Args:
        valid: which steps are tokens: those in front. Others have `write_slot` 0, and their output is meaningless.
    Returns:
        The output in the value's dtype, the store and the windows.
    """
    check_groups("gated_update", store.shape[1], projections.vectors.shape[3])
    args = projections, weights, store, windows, rows
    return dispatch.call("gated_update", GATED_UPDATE, implementation, *args, valid=valid, gates=gates)


@shapes_checked
def gated_replay(
    projections: Projections, weights: Weights, store: States, tail: Tail, windows: Windows, places: Anchored, *,
    gates: Gates, implementation: str | None = None,
) -> tuple[Outputs, States, Tail, Windows]:  # fmt: skip
    """Runs a few new tokens per row from its anchor and tail, as `recurrence_replay` does.

    Returns:
        The output in the value's dtype, meaningless for padding; store, tail and windows.
    """
    check_groups("gated_replay", store.shape[1], projections.vectors.shape[3])
    args = projections, weights, store, tail, windows, places
    return dispatch.call("gated_replay", GATED_REPLAY, implementation, *args, gates=gates)
