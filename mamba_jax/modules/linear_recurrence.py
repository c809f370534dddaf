"""Mixers with a linear recurrence: Mamba2 (Dao and Gu, "Transformers are SSMs", 2024), gated delta nets (Yang, Kautz
and Hatamizadeh, "Gated Delta Networks", 2024), Kimi Delta Attention (Kimi Team, "Kimi Linear", 2025), and lightning
attention, as MiniMax-01 (MiniMax, 2025) has it.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels_pallas.fixed_order import rounded, row_sum, silu
from kernels_pallas.gated_recurrence import DeltaGates, Mamba2Gates, Projections, gated_scan
from mamba_jax.config import MambaConfig
from mamba_jax.config.linear_recurrence import DeltaConfig, LightningConfig
from mamba_jax.layout import Hidden, Inputs, Layout, Parameters, PrefillLayout, SequenceLayout
from mamba_jax.modules.basic import Linear, LowRank, RMSNorm, Weight, both, constant, initial, scaled
from mamba_jax.modules.conv import Conv
from mamba_jax.modules.recurrence import LINEAR, RecurrentMixer, States, initial_dt_bias, recurrence
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

    def projections(self, inputs: Inputs) -> Projections:
        zx, bc, dt = inputs
        # Flat: a TPU would change the layout of [T, 2, inner] for each half.
        z, x = jnp.split(zx.reshape(len(zx), -1), 2, axis=1)
        return Projections(z, x, bc.reshape(len(bc), -1), None, dt)

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
        config, devices = self.config, self.config.inner_size // y.shape[1]
        if self.norm is None or config.num_groups % devices == 0:
            return super().output(y, gate)
        # As `gated_rms_norm`, for groups whose channels lie on several devices, which add up their squares.
        gate = silu(gate.astype(jnp.float32))
        value = y.astype(jnp.float32) * (1.0 if config.norm_before_gate else gate)
        own = jnp.arange(config.num_groups) == axis_index() * config.num_groups // devices
        squares = sum_over_devices(jnp.where(own, row_sum(jnp.square(value)), 0))
        mean = rounded(row_sum(jnp.where(own, squares, 0)) / (config.inner_size // config.num_groups))
        out = value * jax.lax.rsqrt(mean + config.norm_eps) * self.norm.weight[...].astype(jnp.float32)
        return (out * gate if config.norm_before_gate else out).astype(y.dtype)


class Delta(RecurrentMixer):
    """Projections, convolution, recurrence, gated norm of each head, projection.

    Queries and keys are normalized to length 1 (queries are also scaled by the root of their size). The recurrence's
    parameters (a_log, dt_bias) are float32 for any dtype of the model.
    """

    config: DeltaConfig

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

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        v = self.v_proj(x, layout.adapter)
        qk = jnp.concatenate([project(x, layout.adapter) for project in (self.q_proj, self.k_proj)], axis=1)
        if isinstance(self.a_proj, LowRank) and isinstance(self.z_proj, LowRank):
            few_z, few_a = both(self.z_proj.down, self.a_proj.down, x, layout.adapter)
            z, a = self.z_proj.up(few_z, layout.adapter), self.a_proj.up(few_a, layout.adapter, out_dtype=jnp.float32)
            b = self.b_proj(x, layout.adapter, out_dtype=jnp.float32)
        else:
            z = self.z_proj(x, layout.adapter)
            a, b = both(self.a_proj, self.b_proj, x, layout.adapter, out_dtype=jnp.float32)
        y, state = self.between((qk, v, z, a, b), layout, state)
        return self.out_proj(y, layout.adapter), state

    @property
    def gates(self) -> DeltaGates:
        config = self.config
        return DeltaGates(config.beta_scale, config.log_decay_bound, config.output_gate, config.norm_eps)

    def projections(self, inputs: tuple[Array, ...]) -> Projections:
        qk, v, z, a, b = inputs
        return Projections(z, v, qk, a, b)


class Lightning(nnx.Module):
    """Projection, SiLU, recurrence, a norm over all heads, gate, projection.

    With the weights divided over devices, each has some of the heads; the norm adds up their squares.
    """

    def __init__(self, config: LightningConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.config = config
        inner = config.inner_size
        self.qkv_proj = Linear(hidden_size, 3 * inner, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, inner, rngs=rngs, dtype=dtype)
        self.norm = RMSNorm(inner, config.norm_eps, dtype=dtype)
        self.out_proj = Linear(inner, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        tokens = x.shape[0]
        # Each head has its query, then its key, then its value.
        qkv = jax.nn.silu(self.qkv_proj(x, layout.adapter)).reshape(tokens, -1, 3 * self.config.head_dim)
        q, k, v = jnp.split(qkv, 3, axis=2)
        rates, heads = jnp.asarray(self.config.decay_rates(0), jnp.float32), v.shape[1]
        if heads < self.config.num_heads:  # those of this device
            rates = jax.lax.dynamic_slice_in_dim(rates, axis_index() * heads, heads)
        strength = jnp.ones(v.shape[:2], jnp.float32)  # the layout makes it 0 where a token is padding
        old = None if state is None else state["ssm"]
        inputs = q, k, v, jnp.broadcast_to(-rates, strength.shape), strength
        y, ssm = layout.run(recurrence("ssm", LINEAR[False]), inputs, {}, old)
        y = self.norm.of_part(y.reshape(tokens, -1), self.config.inner_size)
        gate = jax.nn.sigmoid(self.gate_proj(x, layout.adapter, out_dtype=jnp.float32))
        return self.out_proj((y * gate).astype(x.dtype), layout.adapter), None if state is None else {"ssm": ssm}
