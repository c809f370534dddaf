"""What a mixer knows about batching: how tokens are arranged, and the forms of a recurrence that layouts run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from jaxtyping import Array, Bool, Float, Int

Inputs = tuple[Array, ...]
"""Arrays of packed tokens [T, ...]."""
Parameters = Any
"""The other arguments of a recurrence: a tuple, or a mapping by name."""
Anchors = tuple[Array, dict[str, Array]]
"""States in slots, and their tail's arrays by name."""
Hidden = Float[Array, "T hidden"]
Queries = Float[Array, "T heads head_dim"]
Keys = Float[Array, "T kv_heads head_dim"]
Pages = Float[Array, "pages page_size kv2 head_dim"]


@dataclass(frozen=True)
class Span:
    """The keys of its sequence that a query sees: from one on up to its own position."""

    scale: float
    """Factor on the scores."""
    first_key: int = 0
    window: int | None = None
    """The most keys that it sees, its own included; None: all."""


@dataclass(frozen=True)
class Along:
    """Where heads or channels lie in an array."""

    axis: int | None
    """None: they share the array. Each member has all of it, of all tokens, and writes the same to it."""
    parts: int = 1
    """The axis concatenates this many arrays, each with all heads."""


@dataclass(frozen=True)
class Transition:
    """What consecutive tokens of a row do to the state [...] before them, for a recurrence that is linear in its state.

    The state after them is what is left of the one before (`apply`), plus what they reach from zeros.
    """

    of: Callable[[Inputs, Callable[[Inputs, Array], Array]], Array]
    """Of tokens [T, ...], none of which is padding, and a function that scans them: (inputs, state before them) -> the
    state after them."""
    apply: Callable[[Array, Parameters, Array], Array]
    """(what `of` returns, parameters, state) -> the state that is left of it."""
    scans: int = 0
    """How often `of` scans the tokens."""
    copies: bool = False
    """States are made of inputs as they are, so they may be narrower than float32."""


@dataclass(frozen=True)
class Divisible:
    """Where an operation's heads or channels lie, each of which it computes without the others.

    In the result they lie along axis 1. Each field has one `Along` for all arrays, or a tree of them like the arrays'.
    This holds only for an operation whose form `tiles` takes slots from `packed.read_slot` and `packed.tiles` only:
    those of a small store.
    """

    state: Any
    """In states [slots, ...]."""
    parameters: Any
    inputs: Any = Along(1)
    """In arrays [T, ...]; groups that heads share divide as well."""
    transition: Transition | None = None
    """How members divide tokens where heads do not divide by members, or links are slow. If heads do not divide, each
    computes all of them with None, and in steps of so many rows that this is less work."""


@dataclass(frozen=True)
class Operation:
    """A recurrence over tokens, in one form for each layout.

    A form is a function of (layout, inputs, parameters, state): `inputs` are arrays of the layout's packed tokens
    [T, ...], `parameters` are the recurrence's other arguments, `state` is one array [slots, ...] of the store, or
    several. The layout says which slots are read and written, and arranges tokens as the form needs them
    (`by_sequence`, `by_tile`, `by_row`): padding is then zeros. So a token of zeros must not
    change the state.
    """

    sequences: Callable[[Any, Inputs, Parameters], Array]
    """Whole sequences, without a state: (`SequenceLayout`, inputs, parameters) -> y [T, ...]. Differentiable."""
    tiles: Callable[[Any, Inputs, Parameters, Any], tuple[Array, Any]]
    """Ragged rows cut into tiles: (`PrefillLayout`, inputs, parameters, state) -> y [T, ...] and the state, with what
    it is at the tiles' ends written."""
    rows: Callable[[Any, Inputs, Parameters, Any], tuple[Array, Any]]
    """Rows of a few tokens each: (`DecodeLayout`, inputs, parameters, state) -> y [T, ...] and the state, with what it
    is after each token written."""
    replay: Callable[[Any, Inputs, Parameters, Any], tuple[Array, Any]] | None = None
    """The same from an anchor and a tail: (`ReplayLayout`, inputs, parameters, (state, tail arrays by name)) -> y and
    the two, with the inputs appended and the state at the next multiple of the interval written if it is reached.
    None: the recurrence does not support replay."""
    shares: Callable[[Any, Inputs, Parameters, Any], tuple[Array, Any]] | None = None
    """Of a member's share of the tokens of `tiles`, by other operations: (`ShareLayout`, inputs, parameters, state)."""
    divisible: Divisible | None = None
    """How members divide `tiles` without `shares`; None: each computes all heads."""


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

    def attend(self, q: Queries, k: Keys, v: Keys | None, kv: Any, span: Span) -> tuple[Queries, Any]:
        """Keeps k and v, then attends to the keys of the sequence that `span` tells.

        State: [pages, page_size, 2 * kv_heads, head_dim]. Without v, k [T, 1, head_dim] are latents, which are keys and
        values at once: [pages, page_size, 1, head_dim].
        """
        ...
