"""The Mamba2 mixer (Dao and Gu, "Transformers are SSMs", 2024)."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import rounded, row_sum, silu
from kernels_pallas.gated_recurrence import Mamba2Gates, Projections, gated_scan
from mamba_jax.config import MambaConfig, need
from mamba_jax.layout import Hidden, Inputs, Layout, Parameters, PrefillLayout, SequenceLayout
from mamba_jax.modules.basic import Linear, Weight, constant, initial, scaled
from mamba_jax.modules.conv import Conv
from mamba_jax.modules.recurrence import RecurrentMixer, States, initial_dt_bias
from mamba_jax.sharding.axis import axis_index, sum_over_devices
from mamba_jax.store import SlotArrays


class Mamba(RecurrentMixer):
    """Projection, convolution, recurrence, gated norm, projection.

    The input projection and the convolution are split into parts that can be sharded: z and x by heads, B and C by
    groups, dt by heads. The recurrence's parameters (a_log, d, dt_bias) are float32 for any dtype of the model.
    """

    config: MambaConfig

    def __init__(self, config: MambaConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner, group, heads, width = config.inner_size, config.key_size, config.num_heads, config.conv_width

        def project(outputs: tuple[int, ...]) -> Linear:
            return Linear(hidden_size, outputs, bias=config.in_bias, rngs=rngs, dtype=dtype)

        self.in_proj_zx = project((2, inner))
        self.in_proj_bc = project((2, group))
        self.in_proj_dt = project((heads,))
        self.conv_x = Conv(inner, width, window="conv_x", bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.conv_bc = Conv(2 * group, width, window="conv_bc", parts=2, bias=config.conv_bias, rngs=rngs, dtype=dtype)
        self.dt_bias = nnx.Param(initial_dt_bias(rngs, heads))
        self.a_log = nnx.Param(initial((heads,), jnp.float32, lambda: jnp.log(jnp.arange(1.0, heads + 1))))
        self.d = nnx.Param(constant(1, (heads,), jnp.float32))
        self.norm = Weight(constant(1, (inner,), dtype)) if config.norm else None
        self.out_proj = Linear(inner, hidden_size, bias=config.out_bias, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        config = self.config
        times_z, times_x, times_b, times_c, times_dt = config.projection_multipliers

        x = scaled(x, config.input_multiplier)
        zx, bc = self.in_proj_zx(x, layout.adapter), self.in_proj_bc(x, layout.adapter)
        dt = scaled(self.in_proj_dt(x, layout.adapter, out_dtype=jnp.float32), times_dt)
        if times_z != 1.0 or times_x != 1.0:
            zx = zx * jnp.asarray([times_z, times_x], zx.dtype)[:, None]
        if times_b != 1.0 or times_c != 1.0:
            bc = bc * jnp.asarray([times_b, times_c], bc.dtype)[:, None]
        y, state = self.between((zx, bc, dt), layout, state)
        return scaled(self.out_proj(y, layout.adapter), config.output_multiplier), state

    @property
    def gates(self) -> Mamba2Gates:
        return Mamba2Gates(self.config.dt_limit, self.config.norm_eps, self.config.norm_before_gate)

    def convolutions(self) -> tuple[Conv, Conv]:
        return self.conv_x, self.conv_bc

    def projections(self, inputs: Inputs) -> Projections:
        zx, bc, dt = inputs
        # Flat: a TPU would change the layout of [T, 2, inner] for each half.
        z, x = jnp.split(zx.reshape(len(zx), -1), 2, axis=1)
        return Projections(z, x, bc.reshape(len(bc), -1), None, dt)

    def skip(self) -> Float[Array, " heads"]:
        return self.d[...]

    def _whole(self, layout: SequenceLayout, inputs: Inputs, _: Parameters) -> Array:
        # Not flat: the compiler divides [T, 2, inner] over devices by its last axis.
        zx, bc, dt = inputs
        given = Projections(zx[:, 0], zx[:, 1], bc.reshape(len(bc), -1), None, dt)
        return self._apart(layout, given, (None, None, None))[0]

    def _tiles(self, layout: PrefillLayout, inputs: Inputs, _: Parameters, states: States) -> tuple[Array, States]:
        config, given, (ssm, conv_x, conv_bc) = self.config, self.projections(inputs), states
        if self.norm is not None and config.num_groups % (config.num_heads // given.strength.shape[1]):
            return self._apart(layout, given, states)  # groups of the norm lie on several devices
        weights = self.weights(given)
        query, key, conv_bc = self.convolved_vectors(given, weights, layout, conv_bc)
        decays = self.gates.decays_and_strengths(None, given.strength, weights.a_log, weights.dt_bias)
        y, ssm, conv_x = gated_scan(
            inputs[0], query, key, *decays, weights, ssm, conv_x, layout.packed, gates=self.gates
        )
        return y, (ssm, conv_x, conv_bc)

    def output(self, y: Float[Array, "T inner"], gate: Float[Array, "T inner"]) -> Float[Array, "T inner"]:
        devices = self.config.inner_size // y.shape[1]
        if self.norm is not None and self.config.num_groups % devices:
            return self._norm_over_devices(y, gate, devices)
        return super().output(y, gate)

    def _norm_over_devices(
        self, y: Float[Array, "T inner"], z: Float[Array, "T inner"], devices: int
    ) -> Float[Array, "T inner"]:
        """As `gated_rms_norm`, for groups whose channels lie on several devices, which add up their squares."""
        config = self.config
        gate = silu(z.astype(jnp.float32))
        value = y.astype(jnp.float32) * (1.0 if config.norm_before_gate else gate)
        own = jnp.arange(config.num_groups) == axis_index() * config.num_groups // devices
        squares = sum_over_devices(jnp.where(own, row_sum(jnp.square(value)), 0))
        mean = rounded(row_sum(jnp.where(own, squares, 0)) / (config.inner_size // config.num_groups))
        out = value * jax.lax.rsqrt(mean + config.norm_eps) * need(self.norm).weight[...].astype(jnp.float32)
        return (out * gate if config.norm_before_gate else out).astype(y.dtype)
