"""Transports of arrays between workers: one interface, two implementations."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from serving.split.transport.base import Transport, TransportError
from serving.split.transport.jax_transfer import JaxTransport
from serving.split.transport.tcp import TcpTransport

__all__ = ["JaxTransport", "TcpTransport", "Transport", "TransportError", "open_transports"]

log = logging.getLogger(__name__)

_KINDS: dict[str, Callable[[str], Transport]] = {"jax": JaxTransport, "tcp": TcpTransport}


def open_transports(kinds: Sequence[str], host: str) -> dict[str, Transport]:
    """Returns the transports of a worker by kind, listening on free ports of `host`. Empty `kinds`: all available ones.

    Raises:
        TransportError: a requested transport is not available.
    """
    opened: dict[str, Transport] = {}
    for kind in kinds or _KINDS:
        try:
            opened[kind] = _KINDS[kind](host)
        except TransportError as error:
            if kinds or kind == "tcp":
                raise
            log.warning("states are transferred by tcp: %s", error)
    return opened
