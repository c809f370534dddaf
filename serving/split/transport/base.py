"""What a transport does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax


class TransportError(RuntimeError):
    """Arrays could not be moved, or not in time: one line."""


class Transport(Protocol):
    """Moves lists of arrays, each list once, under a key that the sender has chosen.

    `offer` and `drain` are called on the sender's side, `fetch` on the receiver's; all from any thread.
    """

    @property
    def address(self) -> str:
        """Where others can fetch from this one."""
        ...

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Keep arrays until they are fetched or drained. They may still be being computed."""
        ...

    def drain(self, key: int, *, taken: bool = False) -> None:
        """Release the memory soon: the arrays have been fetched (`taken`: the receiver confirmed it), or never will be.

        Nothing happens if they are gone.
        """
        ...

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        """Wait for arrays of exactly these shapes and dtypes.

        Raises:
            TransportError: they did not come within `timeout` seconds, or are others.
        """
        ...

    def close(self) -> None:
        """Stop listening."""
        ...
