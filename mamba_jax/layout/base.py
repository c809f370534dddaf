"""The one thing that a mixer knows about batching."""

from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int

from mamba_jax.layout.operation import Inputs, Operation, Parameters


class Layout(Protocol):
    """How T packed tokens are arranged in sequences, and where their state is.

    Two verbs carry information from one token to a later one of its sequence. Each takes this layer's piece of the
    store (None for whole sequences without a store) and returns it updated.
    """

    @property
    def positions(self) -> Int[Array, " T"]:
        """Absolute position of each token in its sequence; -1 = padding."""
        ...

    @property
    def valid(self) -> Bool[Array, " T"]:
        """False for padding, which must not matter to any other token."""
        ...

    @property
    def adapter(self) -> Int[Array, " T"] | None:
        """Entry of each token's adapter (see `mamba_jax.adapters`), 0 = none; None for a model without adapters."""
        ...

    def run(self, operation: Operation, inputs: Inputs, parameters: Parameters, state: Any) -> tuple[Array, Any]:
        """Returns an operation over each sequence. Inputs and the result are [T, ...], the state is [slots, ...]."""
        ...

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"] | None,
        kv: Any,
        *,
        scale: float,
        first_key: int = 0,
        window: int | None = None,
    ) -> tuple[Float[Array, "T heads head_dim"], Any]:
        """Keeps k and v, then attends to all keys of the sequence from `first_key` up to each query's own position, or
        to the last `window` of them.

        State: [pages, page_size, 2 * kv_heads, head_dim]. Without v, k [T, 1, head_dim] are latents, which are keys and
        values at once: [pages, page_size, 1, head_dim].
        """
        ...
