"""What carries information from one token to a later one of its sequence, in the forms that layouts run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array

Inputs = tuple[Array, ...]
"""Arrays of packed tokens [T, ...]."""
Parameters = tuple[Any, ...]
"""The other arguments of a recurrence."""
Anchors = tuple[Array, dict[str, Array]]
"""States in slots, and their tail's arrays by name."""


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
