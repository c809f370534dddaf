"""The one thing that a mixer knows about batching."""

from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int


class Layout(Protocol):
    """How T packed tokens are arranged in sequences, and where their state is.

    Three verbs carry information from one token to a later one of its sequence. Each takes this layer's piece of the
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

    def conv(
        self,
        x: Float[Array, "T channels"],
        weight: Float[Array, "channels width"],
        bias: Float[Array, " channels"] | None,
        state: Any,
    ) -> tuple[Float[Array, "T channels"], Any]:
        """Causal depthwise convolution of each sequence, and SiLU. State: [slots, width - 1, channels]."""
        ...

    def scan(
        self,
        x: Float[Array, "T heads head_dim"],
        dt: Float[Array, "T heads"],
        a: Float[Array, " heads"],
        b: Float[Array, "T groups state"],
        c: Float[Array, "T groups state"],
        d: Float[Array, " heads"],
        state: Any,
    ) -> tuple[Float[Array, "T heads head_dim"], Any]:
        """The Mamba2 recurrence over each sequence. State: [slots, heads, head_dim, state]."""
        ...

    def attend(
        self,
        q: Float[Array, "T heads head_dim"],
        k: Float[Array, "T kv_heads head_dim"],
        v: Float[Array, "T kv_heads head_dim"],
        kv: Any,
        *,
        scale: float,
        first_key: int = 0,
    ) -> tuple[Float[Array, "T heads head_dim"], Any]:
        """Keeps k and v, then attends to all keys of the sequence from `first_key` up to each query's own position.

        State: [pages, page_size, 2 * kv_heads, head_dim].
        """
        ...
