"""Transports of arrays between workers: their interface here, and two implementations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax


class TransportError(RuntimeError):
    """Arrays could not be transferred in time. The message is one line."""


class Transport(Protocol):
    """Transfers lists of arrays, each list once, under a key that the sender chooses.

    The sender calls `offer` and `drain`, the receiver `fetch`. Any thread may call them.
    """

    @property
    def address(self) -> str:
        """Address from which other workers can fetch."""
        ...

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        """Keeps arrays until they are fetched or drained. Their computation may not have finished."""
        ...

    def drain(self, key: int, *, taken: bool = False) -> None:
        """Releases the memory soon: the arrays were fetched (`taken`: the receiver confirmed it) or will never be.

        Ignores unknown keys.
        """
        ...

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        """Fetches arrays with exactly these shapes and dtypes.

        Raises:
            TransportError: the arrays did not arrive within `timeout` seconds, or differ from `specs`.
        """
        ...

    def close(self) -> None:
        """Stops listening."""
        ...
