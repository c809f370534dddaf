"""Feed-forward sublayers."""

from __future__ import annotations

from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from mamba_jax.config import MLPConfig
from mamba_jax.layout import Layout
from mamba_jax.modules.basic import Linear, activation, scaled


class MLP(nnx.Module):
    """down(act(up x)), or gated: down(act(gate x) * up x)."""

    def __init__(self, config: MLPConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        size = config.size(0)
        self.config = config
        self.activation = activation(config.activation)
        self.gate_proj = Linear(hidden_size, size, bias=config.bias, rngs=rngs, dtype=dtype) if config.gated else None
        self.up_proj = Linear(hidden_size, size, bias=config.bias, rngs=rngs, dtype=dtype)
        self.down_proj = Linear(size, hidden_size, bias=config.bias, rngs=rngs, dtype=dtype)

    def __call__(
        self,
        x: Float[Array, "T hidden"],
        layout: Layout,
        state: None,
        *,
        added: Float[Array, "T 2 size"] | None = None,
    ) -> tuple[Float[Array, "T hidden"], None]:
        """`added` is what an adapter adds to gate and up."""
        up = self.up_proj(x, layout.adapter)
        if self.gate_proj is None:
            inner = self.activation(up)
        else:
            gate = self.gate_proj(x, layout.adapter)
            if added is not None:
                gate, up = gate + added[:, 0], up + added[:, 1]
            inner = self.activation(scaled(gate, self.config.gate_multiplier)) * up
        return scaled(self.down_proj(inner, layout.adapter), self.config.output_multiplier), None
