"""Moving arrays between workers: one small interface, three ways."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from serving.split.transport.base import Transport, TransportError
from serving.split.transport.direct import DirectTransport
from serving.split.transport.jax_transfer import JaxTransport
from serving.split.transport.tcp import TcpTransport

__all__ = ["DirectTransport", "JaxTransport", "TcpTransport", "Transport", "TransportError", "open_transports"]

log = logging.getLogger(__name__)

KINDS = ("jax", "tcp")


def open_transports(kinds: Sequence[str], host: str) -> dict[str, Transport]:
    """The transports of a worker, by kind, listening on free ports of `host`. No kinds: all that are available here.

    Raises:
        TransportError: one that was asked for is not available here.
    """
    found: dict[str, Transport] = {}
    if not kinds:
        try:
            found["jax"] = JaxTransport(host)
        except TransportError as error:
            log.warning("states travel by tcp: %s", error)
        return found | {"tcp": TcpTransport(host)}
    for kind in kinds:
        if kind == "jax":
            found[kind] = JaxTransport(host)
        elif kind == "tcp":
            found[kind] = TcpTransport(host)
        else:
            raise TransportError(f"transport {kind!r} is unknown: it must be one of {', '.join(KINDS)}")
    return found
