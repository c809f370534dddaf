"""The mixer: a gated moving average, with what it declares of its state and its parameters."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from mamba_jax.config import Division, RecurrenceConfig, Role, StateArray
from mamba_jax.layout import Operation
from mamba_jax.modules.basic import Linear, constant
from mamba_jax.modules.blocks import MIXERS
from tests.extending.average import average_scan, average_sequence, average_update


@dataclass(frozen=True)
class AverageConfig(RecurrenceConfig):
    """`num_heads` averages of `head_dim` channels, each with its own rate."""

    num_heads: int
    head_dim: int
    letter: str = "A"

    @property
    def inner_size(self):
        return self.num_heads * self.head_dim

    def state(self):
        return (StateArray("average", (self.num_heads, self.head_dim), Role.ACCUMULATED, self._heads(0)),)

    def parameters(self):
        return {
            "in_proj.weight": self._heads(0),
            "gate_proj.weight": self._heads(0),
            "log_rate": self._heads(0),
            "out_proj.weight": self._heads(1),
        }

    def _heads(self, axis):
        return Division(axis, self.num_heads, "heads of moving averages")


class Average(nnx.Module):
    """out(average(in(x)) * silu(gate(x))). On several devices, each has some of the heads, and gives a partial sum."""

    def __init__(self, config, hidden_size, *, rngs, dtype):
        self.config = config
        self.in_proj = Linear(hidden_size, config.inner_size, rngs=rngs, dtype=dtype)
        self.gate_proj = Linear(hidden_size, config.inner_size, rngs=rngs, dtype=dtype)
        self.log_rate = nnx.Param(constant(0, (config.num_heads,), jnp.float32))
        self.out_proj = Linear(config.inner_size, hidden_size, rngs=rngs, dtype=dtype)

    def __call__(self, x, layout, state):
        inner = self.in_proj(x).reshape(x.shape[0], -1, self.config.head_dim)
        dt = jnp.ones(inner.shape[:2], jnp.float32)  # the layout makes it 0 where a token is padding
        rate = 0.05 * jnp.exp(self.log_rate[...])
        y, new = layout.run(AVERAGE, (inner, dt), (rate,), None if state is None else state["average"])
        out = self.out_proj(y.reshape(x.shape[0], -1) * jax.nn.silu(self.gate_proj(x)))
        return out, None if state is None else {"average": new}


MIXERS[AverageConfig] = Average


def _sequences(layout, inputs, parameters):
    return layout.by_token(average_sequence(*map(layout.by_sequence, inputs), *parameters))


def _tiles(layout, inputs, parameters, state):
    y, state = average_scan(*map(layout.by_tile, inputs), *parameters, state, layout.packed.tiles)
    return layout.by_token(y), state


def _rows(layout, inputs, parameters, state):
    y, state = average_update(*map(layout.by_row, inputs), *parameters, state, layout.rows)
    return layout.by_token(y), state


AVERAGE = Operation(_sequences, _tiles, _rows)
