"""The mixer of gated delta nets (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), and of Kimi Delta
Attention (Kimi Team, "Kimi Linear", 2025).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels_pallas.delta_replay import DeltaTail, delta_replay
from kernels_pallas.delta_scan import delta_scan, delta_scan_sequence
from kernels_pallas.delta_update import delta_update
from kernels_pallas.gated_delta_replay import gated_delta_replay
from kernels_pallas.gated_delta_update import Gates, decays_and_strengths, gated_delta_update, unit
from kernels_pallas.gated_norm import gated_rms_norm
from mamba_jax.config.delta import DeltaConfig
from mamba_jax.layout import DecodeLayout, Layout, Operation, PrefillLayout, ReplayLayout, SequenceLayout
from mamba_jax.modules.basic import Linear, Weight, both, constant, initial
from mamba_jax.modules.conv import Conv, flat, nested
from mamba_jax.modules.mamba import initial_dt_bias
from mamba_jax.sharding.axis import axis_index
from mamba_jax.store import SlotArrays

ARRAYS = ("delta", "conv_v", "conv_qk")
"""Names of the layer's arrays in the store: states, and windows of the convolutions of values, and of queries and
keys."""


def _sequences(layout: SequenceLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...]) -> Array:
    q, k, v, log_decay, beta = map(layout.by_sequence, inputs)
    y, _ = delta_scan_sequence(q, k, v, log_decay, beta, initial_state=layout.initial_state("delta"))
    return layout.by_token(y)


def _tiles(
    layout: PrefillLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: Array
) -> tuple[Array, Array]:
    q, k, v, log_decay, beta = map(layout.by_tile, inputs)
    y, state = delta_scan(
        q,
        k,
        v,
        log_decay,
        beta,
        state,
        tile_first=layout.tile_first,
        read_slot=layout.tile_read_slot,
        write_slot=layout.tile_write_slot,
    )
    return layout.by_token(y), state


def _rows(
    layout: DecodeLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], state: Array
) -> tuple[Array, Array]:
    q, k, v, log_decay, beta = map(layout.by_row, inputs)
    y, state = delta_update(q, k, v, log_decay, beta, state, read_slot=layout.read_slot, write_slot=layout.write_slot)
    return layout.by_token(y), state


def _replay(
    layout: ReplayLayout,
    inputs: tuple[Array, ...],
    parameters: tuple[Any, ...],
    state: tuple[Array, dict[str, Array]],
) -> tuple[Array, tuple[Array, dict[str, Array]]]:
    q, k, v, log_decay, beta = map(layout.by_row, inputs)
    states, tail = state
    old = DeltaTail(tail["delta_u"], tail["delta_k"], tail["delta_decay"])
    y, states, new = delta_replay(states, old, q, k, v, log_decay, beta, **layout.places)
    return layout.by_token(y), (states, {"delta_u": new.u, "delta_k": new.k, "delta_decay": new.log_decay})


DELTA_RULE = Operation(_sequences, _tiles, _rows, _replay)
"""The gated delta rule. Inputs: q and k [T, groups, state], v [T, heads, head_dim], log_decay [T, heads] or [T, heads,
state], beta [T, heads]; no parameters; state: [slots, heads, head_dim, state]. With beta = 0 a token of padding is
exactly a no-op."""


class LowRank(nnx.Module):
    """A product of two matrices, with few channels between them."""

    def __init__(self, inputs: int, rank: int, outputs: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.down = Linear(inputs, rank, rngs=rngs, dtype=dtype)
        self.up = Linear(rank, outputs, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "*batch inputs"],
        adapter: Int[Array, " batch"] | None = None,
        *,
        out_dtype: DTypeLike | None = None,
    ) -> Array:
        """As `Linear`."""
        return self.up(self.down(x, adapter), adapter, out_dtype=out_dtype)


class Delta(nnx.Module):
    """Projections, convolution, recurrence, gated norm of each head, projection.

    Queries and keys are normalised to length 1 (queries are also scaled by the root of their size). The recurrence's
    parameters (a_log, dt_bias) are float32 for any dtype of the model.

    If the weights are divided over devices, each device has some of the value heads and the key heads that they need.
    """

    def __init__(self, config: DeltaConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner, keys, heads, width = config.inner_size, config.key_size, config.num_heads, config.conv_width

        def project(outputs: int) -> Linear:
            return Linear(hidden_size, outputs, rngs=rngs, dtype=dtype)

        def project_gate(outputs: int) -> Linear | LowRank:
            if config.gate_rank:
                return LowRank(hidden_size, config.gate_rank, outputs, rngs=rngs, dtype=dtype)
            return project(outputs)

        self.q_proj, self.k_proj = project(keys), project(keys)
        self.v_proj, self.z_proj = project(inner), project_gate(inner)
        self.b_proj, self.a_proj = project(heads), project_gate(config.num_decays)
        self.conv_v = Conv(inner, width, window="conv_v", bias=False, rngs=rngs, dtype=dtype)
        self.conv_qk = Conv(2 * keys, width, window="conv_qk", parts=2, bias=False, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(initial_dt_bias(rngs, config.num_decays))
        self.a_log = nnx.Param(initial((heads,), jnp.float32, lambda: jnp.log(jnp.linspace(1, 16, heads))))
        self.norm = Weight(constant(1, (config.head_dim,), dtype))
        self.out_proj = Linear(inner, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(
        self, x: Float[Array, "T hidden"], layout: Layout, state: SlotArrays | None
    ) -> tuple[Float[Array, "T hidden"], SlotArrays | None]:
        # Without a store there is no state to return.
        old: SlotArrays | dict[str, None] = dict.fromkeys(ARRAYS) if state is None else state

        v = self.v_proj(x, layout.adapter)
        qk = jnp.concatenate([project(x, layout.adapter) for project in (self.q_proj, self.k_proj)], axis=1)
        if isinstance(self.a_proj, LowRank) and isinstance(self.z_proj, LowRank):
            few_z, few_a = both(self.z_proj.down, self.a_proj.down, x, layout.adapter)
            z, a = self.z_proj.up(few_z, layout.adapter), self.a_proj.up(few_a, layout.adapter, out_dtype=jnp.float32)
            b = self.b_proj(x, layout.adapter, out_dtype=jnp.float32)
        else:
            z = self.z_proj(x, layout.adapter)
            a, b = both(self.a_proj, self.b_proj, x, layout.adapter, out_dtype=jnp.float32)
        between = Operation(self._whole, self._apart, self._rows, self._anchored)
        y, states = layout.run(between, (qk, v, z, a, b), (), tuple(old[name] for name in ARRAYS))
        out = self.out_proj(y, layout.adapter)
        return out, None if state is None else dict(zip(ARRAYS, states, strict=True))

    # Forms of the operations between the projections. Inputs: qk [T, 2 * groups * state], v and z [T, inner], a [T,
    # decays], b [T, heads]; states by `ARRAYS`. The result is [T, inner].

    def _whole(self, layout: SequenceLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...]) -> Array:
        return self._apart(layout, inputs, parameters, (None, None, None))[0]

    def _rows(
        self, layout: DecodeLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Array, ...]
    ) -> tuple[Array, tuple[Array, ...]]:
        if self._divides_groups(inputs[4].shape[1]):
            return self._apart(layout, inputs, parameters, states)
        y, *new = gated_delta_update(
            *self._by_row(layout, inputs),
            *states,
            valid=layout.valid.reshape(layout.shape),
            read_slot=layout.read_slot,
            write_slot=layout.write_slot,
            gates=self._gates(),
        )
        return layout.by_token(y), tuple(new)

    def _anchored(
        self, layout: ReplayLayout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        if self._divides_groups(inputs[4].shape[1]):
            return self._apart(layout, inputs, parameters, states)
        (delta, tail), *windows = states
        old = DeltaTail(tail["delta_u"], tail["delta_k"], tail["delta_decay"])
        stores: tuple[Any, ...] = delta, old, *flat(windows)
        y, delta, new, *others = gated_delta_replay(
            *self._by_row(layout, inputs),
            *stores,
            **layout.places,
            gates=self._gates(),
        )
        replayed = delta, {"delta_u": new.u, "delta_k": new.k, "delta_decay": new.log_decay}
        return layout.by_token(y), (replayed, *nested(windows, others))

    def _divides_groups(self, heads: int) -> bool:
        """Whether groups lie on several devices, each of which has this number of heads."""
        groups, devices = self.config.num_groups, self.config.num_heads // heads
        return groups > 1 and bool(groups % devices)

    def _by_row(self, layout: DecodeLayout, inputs: tuple[Array, ...]) -> tuple[Any, ...]:
        """The first arguments of `gated_delta_update` and `gated_delta_replay`."""
        (qk, v, *others), shape = inputs, layout.shape
        return (
            qk.reshape(*shape, 2, -1, self.config.state_size),
            *(one.reshape(*shape, -1) for one in (v, *others)),
            self.a_log[...],
            self.dt_bias[...],
            self.conv_v.own(v.shape[1])[0],
            self.conv_qk.own(qk.shape[1])[0],
            self.norm.weight[...],
        )

    def _apart(
        self, layout: Layout, inputs: tuple[Array, ...], parameters: tuple[Any, ...], states: tuple[Any, ...]
    ) -> tuple[Array, tuple[Any, ...]]:
        config, (qk, v, z, a, b), (delta, conv_v, conv_qk) = self.config, inputs, states
        v, conv_v = self.conv_v(v, layout, conv_v)
        qk, conv_qk = self.conv_qk(qk, layout, conv_qk)
        v, z = (one.reshape(len(one), -1, config.head_dim) for one in (v, z))
        q, k = (self._own_groups(one, v.shape[1]) for one in jnp.split(qk, 2, axis=1))
        log_decay, beta = decays_and_strengths(a, b, self.a_log[...], self.dt_bias[...], self._gates())
        q, k = unit(q, config.state_size**-0.5), unit(k)
        y, delta = layout.run(DELTA_RULE, (q, k, v, log_decay, beta), (), delta)
        y = gated_rms_norm(
            y,
            z,
            self.norm.weight[...],
            groups=1,
            eps=config.norm_eps,
            norm_before_gate=True,
            activation=config.output_gate,
        )
        return y.reshape(len(y), -1), (delta, conv_v, conv_qk)

    def _gates(self) -> Gates:
        config = self.config
        return Gates(config.beta_scale, config.log_decay_bound, config.output_gate, config.norm_eps)

    def _own_groups(self, v: Float[Array, "T channels"], heads: int) -> Float[Array, "T groups state"]:
        """Queries or keys by heads. If the device has all of them but few value heads: the head that these share."""
        groups = v.reshape(v.shape[0], -1, self.config.state_size)
        devices = self.config.num_heads // heads
        if groups.shape[1] * devices <= self.config.num_groups or devices == 1:
            return groups
        return jax.lax.dynamic_slice_in_dim(groups, axis_index() * self.config.num_groups // devices, 1, axis=1)
