"""What mixers with a linear recurrence share: its forms, and the operations between their projections."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from kernels_pallas.gated_recurrence import Gates, Projections, Weights, Windows, gated_replay, gated_update
from kernels_pallas.gated_recurrence.gates import LEAST
from kernels_pallas.recurrence import (
    Entry,
    Tail,
    recurrence_replay,
    recurrence_scan,
    recurrence_sequence,
    recurrence_update,
)
from mamba_jax.config.linear_recurrence import GroupedRecurrence
from mamba_jax.layout import (
    Along,
    Anchors,
    DecodeLayout,
    Divisible,
    Inputs,
    Layout,
    Operation,
    Parameters,
    PrefillLayout,
    ReplayLayout,
    SequenceLayout,
    ShareLayout,
    Transition,
)
from mamba_jax.modules.basic import Weight, initial
from mamba_jax.modules.conv import Conv, convolution
from mamba_jax.sharding.axis import axis_index
from mamba_jax.store import SlotArrays

LEAST_DT = LEAST
"""A step size of exactly 0 marks padding, so a step size of a token must not underflow to 0."""


class Forms(NamedTuple):
    """The operations of a recurrence, and what they take of tokens and keep of them."""

    entry: Any
    tail: Any
    sequence: Callable[..., Any]
    scan: Callable[..., Any]
    update: Callable[..., Any]
    replay: Callable[..., Any]
    divisible: Divisible | None = None


def _decay(total: Array, _: Parameters, state: Array) -> Array:
    return state * jnp.exp(total).reshape(len(state), 1, -1)


def _erasing(inputs: Inputs, scan: Callable[[Inputs, Array], Array]) -> Array:
    """Returns what the state's last axis is multiplied with: what identity becomes, with values of zeros."""
    query, key, value, log_decay, strength = inputs
    heads, size = value.shape[1], key.shape[-1]
    nothing, identity = jnp.zeros((len(value), heads, size), value.dtype), jnp.eye(size, dtype=jnp.float32)
    return scan((query, key, nothing, log_decay, strength), jnp.broadcast_to(identity, (heads, size, size)))


def _multiply(matrix: Array, _: Parameters, state: Array) -> Array:
    return jnp.einsum("hpk,hkn->hpn", state, matrix, precision=jax.lax.Precision.HIGHEST)


_DECAYING = Transition(lambda inputs, _: inputs[3].sum(0), _decay)
_TRANSITIONS = {False: _DECAYING, True: Transition(_erasing, _multiply, scans=1)}
LINEAR = {
    erase: Forms(
        Entry, Tail, partial(recurrence_sequence, erase=erase), partial(recurrence_scan, erase=erase),
        partial(recurrence_update, erase=erase), partial(recurrence_replay, erase=erase),
        Divisible(Along(1), Along(0), transition=_TRANSITIONS[erase]),
    )
    for erase in (False, True)
}  # fmt: skip
"""The recurrence of `kernels_pallas.recurrence`, by whether it erases."""
_UNMASKED = 3
"""Arrays of an entry, the first ones, by which no operation recognizes padding."""


@cache
def recurrence(name: str, forms: Forms) -> Operation:
    """Returns the operation of a recurrence.

    Inputs: the arrays of an entry, [T, ...]; parameters: the operations' other arguments by name; state: [slots, ...],
    called `name` in the store. With zeros in its last array a token of padding is exactly a no-op.
    """

    def sequences(layout: SequenceLayout, inputs: Inputs, parameters: Parameters) -> Array:
        entry, start = forms.entry(*map(layout.by_sequence, inputs)), layout.initial_state(name)
        y, _ = forms.sequence(entry, initial_state=start, **parameters)
        return layout.by_token(y)

    def tiles(layout: PrefillLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
        # Masking all arrays would be one more pass over them.
        others, known = map(layout.gather_unmasked, inputs[:_UNMASKED]), map(layout.by_tile, inputs[_UNMASKED:])
        y, state = forms.scan(forms.entry(*others, *known), state, layout.packed.tiles, **parameters)
        return layout.by_token(y), state

    def rows(layout: DecodeLayout, inputs: Inputs, parameters: Parameters, state: Array) -> tuple[Array, Array]:
        y, state = forms.update(forms.entry(*map(layout.by_row, inputs)), state, layout.rows, **parameters)
        return layout.by_token(y), state

    def replay(layout: ReplayLayout, inputs: Inputs, parameters: Parameters, state: Anchors) -> tuple[Array, Anchors]:
        entry, (states, arrays) = forms.entry(*map(layout.by_row, inputs)), state
        tail = tail_of(name, arrays, forms.tail)
        y, states, tail = forms.replay(entry, states, tail, layout.anchored, **parameters)
        return layout.by_token(y), (states, arrays_of(name, tail))

    return Operation(sequences, tiles, rows, replay, divisible=forms.divisible)


States = tuple[Any, ...]
"""By `GroupedRecurrence.arrays`; under replay, each with its tail."""


def tail_of(name: str, arrays: dict[str, Array], kind: Any = Tail) -> Any:
    """Returns the tail of the states called `name`, whose arrays have names after it."""
    return kind(*(arrays.get(f"{name}_{field}") for field in kind._fields))


def arrays_of(name: str, tail: Any) -> dict[str, Array]:
    """Returns a tail's arrays by name."""
    return {f"{name}_{field}": array for field, array in tail._asdict().items() if array is not None}


class RecurrentMixer(nnx.Module):
    """A mixer with convolution, recurrence, norm and gate between its projections.

    If the weights are divided over devices, each device has some of the heads and the groups that these heads need.
    Subclasses have projections, the parameters below, and convolutions called as their windows in `config.arrays`.
    """

    config: GroupedRecurrence
    a_log: nnx.Param
    dt_bias: nnx.Param
    norm: Weight | None
    d: nnx.Param | None = None
    """Weights of the direct path."""

    @property
    def gates(self) -> Gates:
        """What the layer makes of its projections, and of the recurrence's output."""
        raise NotImplementedError

    def projections(self, inputs: Inputs) -> Projections:
        """Returns the inputs of `between` as projections [T, ...]; vectors are [T, channels]."""
        raise NotImplementedError

    @property
    def _recurrence(self) -> Operation:
        return recurrence(self.config.arrays[0], LINEAR[self.gates.erase])

    def between(
        self, inputs: Inputs, layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T inner"], SlotArrays | None]:
        """Runs the operations between the projections."""
        # Without a store there is no state to return.
        old: SlotArrays | dict[str, None] = dict.fromkeys(self.config.arrays) if state is None else state
        operation = Operation(self._whole, self._tiles, self._rows, self._anchored, self._shares)
        y, states = layout.run(operation, inputs, (), tuple(old[name] for name in self.config.arrays))
        return y, None if state is None else dict(zip(self.config.arrays, states, strict=True))

    # Forms of the operations between the projections. The result is [T, inner].

    def _whole(self, layout: SequenceLayout, inputs: Inputs, _: Parameters) -> Array:
        # The compiler divides the layer over devices, each axis for itself.
        return self._apart(layout, self.projections(inputs), (None, None, None))[0]

    def _tiles(self, layout: PrefillLayout, inputs: Inputs, _: Parameters, states: States) -> tuple[Array, States]:
        return self._apart(layout, self.projections(inputs), states)

    def _shares(self, layout: ShareLayout, inputs: Inputs, _: Parameters, states: States) -> tuple[Array, States]:
        """If heads divide by members, and do not go by pairs, one exchange serves convolutions and recurrence."""
        given, members = self.projections(inputs), layout.member.count
        heads, groups = given.strength.shape[1], given.vectors.shape[1] // (2 * self.config.state_size)
        of_group, own = self.config.num_heads // self.config.num_groups, heads // members
        exchanged, store = given._replace(gate=None), states[0]  # type: ignore[arg-type]
        apart = layout.prefers_pairs(self._recurrence, exchanged, store)
        if apart or heads % members or (own % of_group and of_group % own):
            return self._apart(layout, given, states)
        all_used = groups == max(1, heads // of_group)
        first = jnp.arange(heads) + (0 if all_used else axis_index() * heads)
        # With fewer groups than members, each member convolves all vectors.
        divides = all_used and groups % members == 0
        of_heads: Any = [Along(axis) for axis in range(3)]
        of_vectors: Any = [Along(axis, parts=2) if divides else Along(None) for axis in range(3)]
        along = Divisible(
            (of_heads[1], of_heads[2], of_vectors[2]),
            (Weights(*of_heads[:1] * 8)._replace(vector_taps=of_vectors[0], vector_bias=of_vectors[0]), of_heads[0]),
            Projections(*of_heads[1:2] * 5)._replace(vectors=of_vectors[1]),
        )

        def tiles(layout: PrefillLayout, given: Projections, parameters: Parameters, states: States) -> Any:
            weights, first = parameters
            return self._ungated(layout, given, weights, states, first[0])

        parameters = self.weights(given)._replace(norm=None), first
        y, states = layout.by_heads(tiles, along, exchanged, parameters, states)
        return self.output(y, given.gate), states

    def _rows(self, layout: DecodeLayout, inputs: Inputs, _: Parameters, states: States) -> tuple[Array, States]:
        given = self.projections(inputs)
        if self._divides_groups(given):
            return self._apart(layout, given, states)
        projections, weights = self._by_row(layout, given)
        store, *windows = states
        y, store, new = gated_update(
            projections, weights, store, Windows(*windows), layout.rows, valid=layout.valid.reshape(layout.shape),
            gates=self.gates,
        )  # fmt: skip
        return layout.by_token(y), (store, new.value, new.vectors)

    def _anchored(self, layout: ReplayLayout, inputs: Inputs, _: Parameters, states: States) -> tuple[Array, States]:
        given = self.projections(inputs)
        if self._divides_groups(given):
            return self._apart(layout, given, states)
        projections, weights = self._by_row(layout, given)
        name, ((store, arrays), (values, value_rings), (vectors, vector_rings)) = self.config.arrays[0], states
        rings = [ring for rings in (value_rings, vector_rings) for ring in rings.values()]
        y, store, tail, new = gated_replay(
            projections, weights, store, tail_of(name, arrays), Windows(values, vectors, *rings), layout.anchored,
            gates=self.gates,
        )  # fmt: skip
        return layout.by_token(y), (
            (store, arrays_of(name, tail)),
            (new.value, dict.fromkeys(value_rings, new.value_ring)),
            (new.vectors, dict.fromkeys(vector_rings, new.vector_ring)),
        )

    def _apart(self, layout: Layout, given: Projections, states: States) -> tuple[Array, States]:
        """Each operation by itself."""
        y, states = self._ungated(layout, given, self.weights(given), states)
        return self.output(y, given.gate), states

    def _ungated(
        self, layout: Layout, given: Projections, weights: Weights, states: States, first: Array | None = None
    ) -> tuple[Float[Array, "T inner"], States]:
        """Returns the output of the recurrence, and the new states; `first` is as `convolved_vectors` has it."""
        store, value_window, vector_window = states
        query, key, vector_window = self.convolved_vectors(given, weights, layout, vector_window, first)
        taps = weights.value_taps, weights.value_bias
        value, value_window = layout.run(convolution("silu", self.config.arrays[1]), (given.value,), taps, value_window)
        value = value.reshape(len(value), -1, self.config.head_dim)
        decays = self.gates.decays_and_strengths(given.decay, given.strength, weights.a_log, weights.dt_bias)
        y, store = layout.run(self._recurrence, (query, key, value, *decays), {"skip": weights.skip}, store)
        return y.reshape(len(y), -1), (store, value_window, vector_window)

    def convolved_vectors(
        self, given: Projections, weights: Weights, layout: Layout, window: Any, first: Int[Array, ""] | None = None
    ) -> tuple[Float[Array, "T groups state"], Float[Array, "T groups state"], Any]:
        """Returns queries and keys of this device's heads after the convolution, and its new state.

        `first` is the first one of these heads, counted from that of the first group; None: from this device's place.
        """
        taps = weights.vector_taps, weights.vector_bias
        vectors, window = layout.run(convolution("silu", self.config.arrays[2]), (given.vectors,), taps, window)
        heads, order = given.strength.shape[1], 1 if self.gates.query_first else -1
        query, key = (self._own_groups(v, heads, first) for v in jnp.split(vectors, 2, axis=1)[::order])
        return *self.gates.vectors(query, key), window

    def output(self, y: Float[Array, "T inner"], gate: Float[Array, "T inner"]) -> Float[Array, "T inner"]:
        """Normalizes and gates the output of the recurrence."""
        devices = self.config.inner_size // y.shape[1]
        return self.gates.output(y, gate, self.norm_weight(), groups=max(1, self.config.num_groups // devices))

    def norm_weight(self) -> Float[Array, " n"] | None:
        """Returns the norm's weight; None: there is no norm."""
        return None if self.norm is None else self.norm.weight[...]

    def _divides_groups(self, given: Projections) -> bool:
        """Whether groups, or a norm over all heads, lie on several devices."""
        groups, heads = self.config.num_groups, given.strength.shape[1]
        over_heads = self.norm is not None and not self.gates.erase
        return bool(groups % (self.config.num_heads // heads)) and (over_heads or groups > 1)

    def weights(self, given: Projections) -> Weights:
        """Returns the weights between the projections, those of this device."""
        of_values, of_vectors = (cast(Conv, getattr(self, name)) for name in self.config.arrays[1:])
        skip = None if self.d is None else self.d[...]
        return Weights(
            self.a_log[...], self.dt_bias[...], skip, *of_values.own(given.value.shape[1]),
            *of_vectors.own(given.vectors.shape[1]), self.norm_weight(),
        )  # fmt: skip

    def _by_row(self, layout: DecodeLayout, given: Projections) -> tuple[Projections, Weights]:
        rows = [None if v is None else v.reshape(*layout.shape, -1) for v in given]
        vectors = given.vectors.reshape(*layout.shape, 2, -1, self.config.state_size)
        return Projections(*rows)._replace(vectors=vectors), self.weights(given)  # type: ignore[arg-type]

    def _own_groups(
        self, v: Float[Array, "T channels"], heads: int, first: Int[Array, ""] | None
    ) -> Float[Array, "T groups state"]:
        """Returns queries or keys by groups: those of this number of heads, from the first on."""
        groups = v.reshape(len(v), -1, self.config.state_size)
        of_group = self.config.num_heads // self.config.num_groups
        own = max(1, heads // of_group)
        if groups.shape[1] == own:
            return groups
        first = axis_index() * heads if first is None else first
        return jax.lax.dynamic_slice_in_dim(groups, first // of_group, own, axis=1)


def initial_dt_bias(rngs: nnx.Rngs, heads: int) -> Float[Array, " heads"]:
    """Step sizes log-uniform in [0.001, 0.1], through the inverse of softplus (as in the Mamba2 reference code)."""

    def values() -> Array:
        low, high = math.log(0.001), math.log(0.1)
        dt = jnp.exp(jax.random.uniform(rngs.params(), (heads,), jnp.float32, low, high))
        return dt + jnp.log(-jnp.expm1(-dt))

    return initial((heads,), jnp.float32, values)
