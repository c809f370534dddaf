"""Transports of arrays between workers: one interface, two implementations."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from serving.split.transport.base import Transport, TransportError
from serving.split.transport.jax_transfer import JaxTransport
from serving.split.transport.tcp import TcpTransport

__all__ = ["JaxTransport", "TcpTransport", "Transport", "TransportError", "open_transports"]

log = logging.getLogger(__name__)

KINDS = ("jax", "tcp")


def open_transports(kinds: Sequence[str], host: str) -> dict[str, Transport]:
    """Returns the transports of a worker by kind, listening on free ports of `host`. Empty `kinds`: all available ones.

    Raises:
        TransportError: a requested transport is not available.
    """
    opened: dict[str, Transport] = {}
    if not kinds:
        try:
            opened["jax"] = JaxTransport(host)
        except TransportError as error:
            log.warning("states are transferred by tcp: %s", error)
        return opened | {"tcp": TcpTransport(host)}
    for kind in kinds:
        if kind == "jax":
            opened[kind] = JaxTransport(host)
        elif kind == "tcp":
            opened[kind] = TcpTransport(host)
        else:
            raise TransportError(f"unknown transport {kind!r}; allowed: {', '.join(KINDS)}")
    return opened
