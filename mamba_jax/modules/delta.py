"""The mixer of gated delta nets (Yang, Kautz and Hatamizadeh, "Gated Delta Networks", 2024), and of Kimi Delta
Attention (Kimi Team, "Kimi Linear", 2025).
"""

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array

from kernels_pallas.gated_recurrence import DeltaGates, Projections
from mamba_jax.config.linear_recurrence import DeltaConfig
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.basic import Linear, LowRank, Weight, both, constant, initial
from mamba_jax.modules.conv import Conv
from mamba_jax.modules.recurrence import RecurrentMixer, initial_dt_bias
from mamba_jax.store import SlotArrays


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

    def convolutions(self) -> tuple[Conv, Conv]:
        return self.conv_v, self.conv_qk

    def projections(self, inputs: tuple[Array, ...]) -> Projections:
        qk, v, z, a, b = inputs
        return Projections(z, v, qk, a, b)
