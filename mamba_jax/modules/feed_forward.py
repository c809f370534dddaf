"""Feed-forward sublayers: MLPs, and mixtures of experts, which drop no token."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.expert_choice import Choice, Rule, choose_experts
from kernels_pallas.expert_mlp import expert_mlp, multiply_rows
from kernels_pallas.fixed_order import is_fixed, rounded, router_product, row_sum, sigmoid, softmax, weighted_sum
from kernels_pallas.quantized import Quantized
from mamba_jax.config import MLPConfig, MoEConfig
from mamba_jax.layout import Hidden, Layout
from mamba_jax.modules.basic import ExpertLoRA, Linear, activation, constant, normal, scaled
from mamba_jax.sharding.axis import axis_index
from mamba_jax.store import EXPERT, EXPERTS, SlotArrays


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
        self, x: Hidden, layout: Layout, state: None, *, added: Float[Array, "T 2 size"] | None = None
    ) -> tuple[Hidden, None]:
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


def balance_loss(shares: Float[Array, "T experts"], chosen: Int[Array, "T chosen"]) -> Float[Array, ""]:
    """Returns the auxiliary loss of Fedus et al. ("Switch Transformers", 2021): 1 if the load of all experts is equal.

    Args:
        shares: the router's scores, with a sum of 1 for each token.
        chosen: the experts that each token goes through.
    """
    experts = shares.shape[1]
    load = (chosen.reshape(-1, 1) == jnp.arange(experts)).mean(axis=0, dtype=jnp.float32)
    return experts * (load * shares.mean(axis=0)).sum()


@jax.custom_vjp
def _with_loss(x: Array, loss: Float[Array, ""]) -> Array:
    """Returns x. Its gradient includes that of `loss`, so that layers need not return the loss."""
    return x


_with_loss.defvjp(lambda x, loss: (x, None), lambda _, change: (change, jnp.ones((), jnp.float32)))


_FEW_TOKENS, _UNPADDED = 16, 512
"""XLA for GPU pads other products of a router before it divides them, and computes this with what precedes them."""


class Router(nnx.Module):
    """Chooses each token's experts and their weights, in float32 (small differences would change the choice)."""

    def __init__(self, config: MoEConfig, hidden_size: int, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.weight = nnx.Param(normal(rngs, (config.num_experts, hidden_size), jnp.float32))
        by_sigmoid = config.router == "sigmoid"
        self.correction_bias = nnx.Param(constant(0, (config.num_experts,), jnp.float32)) if by_sigmoid else None

    @property
    def rule(self) -> Rule:
        """How experts are chosen by their scores."""
        config = self.config
        if config.router != "sigmoid":
            return Rule(config.experts_per_token, "scores" if config.router == "softmax_all" else "softmax")
        return Rule(
            config.experts_per_token, "scores", normalize=config.normalize, scaling=config.scaling,
            num_groups=config.num_groups, top_groups=config.top_groups,
        )  # fmt: skip

    def __call__(self, x: Hidden, valid: Bool[Array, " T"], first: Int[Array, ""], *, own: int) -> Choice:
        """The experts of each token, of which this device has `own` from `first` on."""
        if x.shape[0] <= _FEW_TOKENS and x.shape[1] % _UNPADDED == 0:
            # Held in its dtype: XLA for GPU would otherwise keep x before its rounding for this product alone, and
            # round it for all others in one more kernel.
            x = jax.lax.platform_dependent(x, cuda=jax.lax.optimization_barrier, default=lambda x: x)
        logits = router_product(x, self.weight[...])
        scores = {"softmax": lambda v: v, "softmax_all": softmax, "sigmoid": sigmoid}[self.config.router](logits)
        # The bias balances the load: it affects the choice of experts, but not their weights.
        bias = None if self.correction_bias is None else self.correction_bias[...]
        choice = choose_experts(scores, bias, valid, first, own=own, rule=self.rule)
        if not self.config.balance:
            return choice
        shares = {"softmax": softmax, "softmax_all": lambda v: v, "sigmoid": lambda v: v / row_sum(v)}
        loss = self.config.balance * balance_loss(shares[self.config.router](scores), choice.chosen)
        return choice._replace(weights=_with_loss(choice.weights, loss))


_FEW = 4096
"""Up to this many rows are processed at once: as in decoding, they cost little compared with the experts' weights."""


def rows_at_once(rows: int, own: int, experts: int) -> int:
    """Returns how many of all tokens' rows a device with `own` of the experts processes at a time.

    This is 1.5 times its share, in whole blocks of a kernel; or all rows, unless most of them belong to other devices.
    """
    piece = -(-3 * rows * own // (2 * experts) // 128) * 128
    return piece if rows > _FEW and 2 * piece <= rows else rows


class Experts(nnx.Module):
    """The experts' weights: up [experts, size, inputs] (gated: [experts, 2, size, inputs], gate first), and down.

    They may be quantized.
    """

    quantizable = ("up", "down")
    lora_up: ExpertLoRA | None = None
    lora_down: ExpertLoRA | None = None
    """What adapters add to the products with `up` and `down`; see `mamba_jax.adapters`."""

    def __init__(self, config: MoEConfig, inputs: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        self.activation = activation(config.activation)
        self.gated, self.num_experts = config.gated, config.num_experts
        experts, size = config.num_experts, config.intermediate_size
        self.up = nnx.Param(normal(rngs, (experts, *([2] if config.gated else []), size, inputs), dtype))
        self.down = nnx.Param(normal(rngs, (experts, inputs, size), dtype))

    def __call__(
        self, x: Float[Array, "T inputs"], choice: Choice, adapter: Int[Array, " T"] | None = None
    ) -> Float[Array, "T inputs"]:
        """`adapter`: the entry of each token's adapter (`Layout.adapter`). Ignored by experts without adapters.

        Raises:
            ValueError: the experts have adapters and `adapter` is None.
        """
        if self.lora_up is None:
            adapter = None
        elif adapter is None:
            raise ValueError("experts with adapters were called without the tokens' adapters")
        rows = rows_at_once(choice.order.size, choice.sizes.size, self.num_experts)
        if rows == choice.order.size or is_fixed():
            return self._at_once(x, choice, adapter)
        # Otherwise a GPU would add up the rows of a token in an order that varies between runs.
        return jax.lax.platform_dependent(
            x, choice, adapter,
            cuda=self._at_once, rocm=self._at_once, default=functools.partial(self._in_pieces, rows=rows),
        )  # fmt: skip

    @property
    def _up_matrix(self) -> Float[Array, "experts outputs inputs"] | Quantized:
        """The weights of gates and up projections together."""
        up = self.up[...]
        return up.matrix(lead=1) if isinstance(up, Quantized) else up.reshape(up.shape[0], -1, up.shape[-1])

    def _at_once(
        self, x: Float[Array, "T inputs"], choice: Choice, adapter: Int[Array, " T"] | None
    ) -> Float[Array, "T inputs"]:
        """Processes all rows at once, including those of other devices' experts."""
        weights = choice.weights
        if adapter is None:
            rows = choice.order, choice.place, choice.sizes
            by_token = expert_mlp(x, self._up_matrix, self.down[...], *rows, activation=self.activation)
        else:
            out = self._products(x, choice.order // weights.shape[1], choice.sizes, adapter)
            by_token = out[choice.place].reshape(*weights.shape, x.shape[1])
        return weighted_sum(weights, by_token.astype(jnp.float32)).astype(x.dtype)

    def _products(
        self,
        x: Float[Array, "T inputs"],
        token: Int[Array, " rows"],
        sizes: Int[Array, " own"],
        adapter: Int[Array, " T"] | None,
    ) -> Float[Array, "rows inputs"]:
        """Applies each row's expert to the row's token.

        Rows are sorted by expert, `sizes` of them for each; later rows give 0.
        """
        adapters = {}
        if adapter is not None:
            for name, lora in (("add_up", self.lora_up), ("add_down", self.lora_down)):
                if lora is not None:
                    adapters[name] = functools.partial(lora, sizes=sizes, index=adapter[token])
        return multiply_rows(x[token], self._up_matrix, self.down[...], sizes, self.activation, **adapters)

    def _in_pieces(
        self, x: Float[Array, "T inputs"], choice: Choice, adapter: Int[Array, " T"] | None, *, rows: int
    ) -> Float[Array, "T inputs"]:
        """Processes only the rows of this device's experts, in pieces: one, unless it has far more than others.

        No row is left out: the loop processes all rows after the first piece.
        """
        weights, sizes = choice.weights, choice.sizes
        ends = jnp.cumsum(sizes)
        order = jnp.pad(choice.order, (0, rows))
        by_row = weights.reshape(-1)

        def add(number: Int[Array, ""] | int, y: Float[Array, "T inputs"]) -> Float[Array, "T inputs"]:
            start = number * rows
            own = jax.lax.dynamic_slice_in_dim(order, start, rows)
            here = jnp.clip(ends, start, start + rows) - jnp.clip(ends - sizes, start, start + rows)
            token = own // weights.shape[1]
            out = by_row[own][:, None] * self._products(x, token, here, adapter).astype(jnp.float32)
            return y.at[token].add(out)

        y = add(0, jnp.zeros(x.shape, jnp.float32))
        return jax.lax.fori_loop(1, -(-ends[-1] // rows), add, y).astype(x.dtype)


class MoE(nnx.Module):
    """Routed experts (on a smaller latent of the token if the config has one) plus one that all tokens share."""

    def __init__(self, config: MoEConfig, hidden_size: int, *, rngs: nnx.Rngs, dtype: DTypeLike) -> None:
        latent, bias = config.latent_size, config.bias
        self.router = Router(config, hidden_size, rngs=rngs)
        self.latent_in = Linear(hidden_size, latent, bias=bias, rngs=rngs, dtype=dtype) if latent else None
        self.experts = Experts(config, latent or hidden_size, rngs=rngs, dtype=dtype)
        self.latent_out = Linear(latent, hidden_size, bias=bias, rngs=rngs, dtype=dtype) if latent else None
        shared = MLPConfig(config.shared_size, config.activation, config.gated, bias) if config.shared_size else None
        self.shared = MLP(shared, hidden_size, rngs=rngs, dtype=dtype) if shared else None
        self.shared_gate = Linear(hidden_size, 1, rngs=rngs, dtype=dtype) if config.shared_gate else None

    def __call__(self, x: Hidden, layout: Layout, state: SlotArrays | None) -> tuple[Hidden, SlotArrays | None]:
        """With a state, its array becomes the numbers of the chosen experts."""
        own, experts = self.experts.up.shape[0], self.experts.num_experts
        choice = self.router(x, layout.valid, axis_index() * own if own < experts else jnp.int32(0), own=own)
        if state is not None:
            state = {EXPERTS: choice.chosen.astype(EXPERT)}
        latent = x if self.latent_in is None else self.latent_in(x, layout.adapter)
        y = self.experts(latent, choice, layout.adapter)
        if self.latent_out is not None:
            y = self.latent_out(y, layout.adapter)
        if self.shared is not None:
            shared, _ = self.shared(x, layout, None)
            if self.shared_gate is not None:
                gate = sigmoid(self.shared_gate(x, layout.adapter, out_dtype=jnp.float32))
                shared = rounded((gate * shared).astype(shared.dtype))
            y = y + shared
        return y, state
