"""Transfers from device to device with JAX's transfer engine, `jax.experimental.transfer`.

The engine has a table of offered arrays, from which a peer pulls by key, and no time limits. So the receiver sets a
deadline, and the sender itself pulls an offer that no peer pulled.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp

from checkpoints.errors import one_line
from serving.split.transport import TransportError

log = logging.getLogger(__name__)

_DISCARDING = 10.0  # maximum seconds to wait while draining an offer
_POLL = 0.0005, 0.01  # minimum and maximum seconds between checks whether arrays have arrived


class JaxTransport:
    """One transfer server, and one connection to each peer.

    Raises:
        TransportError: this version of JAX has no transfer engine, or it does not start.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        try:
            from jax.experimental import transfer
        except ImportError:
            raise TransportError(
                f"jax {jax.__version__} has no jax.experimental.transfer on this platform; use --transport tcp"
            ) from None
        self._device = jax.local_devices()[0]
        try:
            self._server = transfer.start_transfer_server(self._device.client, f"{host}:0", [f"{host}:0"])
        except (RuntimeError, TypeError, ValueError) as error:
            raise TransportError(f"could not start the transfer engine: {error}; use --transport tcp") from None
        self.address = self._server.address()
        self._sharding = jax.sharding.SingleDeviceSharding(self._device)
        self._connections: dict[str, Any] = {}
        self._offered: dict[int, list[jax.ShapeDtypeStruct]] = {}
        self._lock = threading.Lock()
        self._drains = ThreadPoolExecutor(1, thread_name_prefix="drain")

    def offer(self, key: int, arrays: Sequence[jax.Array]) -> None:
        # The engine never delivers arrays without elements.
        some = [array for array in arrays if array.size]
        with self._lock:
            self._offered[key] = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._sharding) for x in some]
        self._server.await_pull(key, [jax.device_put(x, self._device) for x in some])

    def drain(self, key: int, *, taken: bool = False) -> None:
        with self._lock:
            specs = self._offered.pop(key, None)
        if specs is not None and not taken:
            self._drains.submit(self._discard, key, specs)

    def fetch(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct], timeout: float) -> list[Any]:
        placed = [
            jax.ShapeDtypeStruct(spec.shape, spec.dtype, sharding=self._sharding)
            for spec in specs
            if math.prod(spec.shape)
        ]
        begin = time.monotonic()
        try:
            arrays: list[Any] = self._pull(address, key, placed)
            for array in arrays:
                while not array.is_ready():
                    waited = time.monotonic() - begin
                    if waited > timeout:
                        # Keep the connection: a new one needs four file descriptors, and this one keeps its own while
                        # arrays may still arrive.
                        raise TransportError(f"no arrays from {address} within {timeout:g} s")
                    # The interval grows with the wait, so arrivals are noticed soon and long waits need few checks.
                    time.sleep(min(max(waited / 8, _POLL[0]), _POLL[1]))
            # Failed arrays also count as ready; this raises their error.
            jax.block_until_ready(arrays)
        except RuntimeError as error:
            if isinstance(error, TransportError):
                raise
            with self._lock:
                self._connections.pop(address, None)  # the next fetch connects again
            raise TransportError(f"fetching from {address} failed: {one_line(error, 200)}") from None
        arrived = iter(arrays)
        return [next(arrived) if math.prod(spec.shape) else jnp.zeros(spec.shape, spec.dtype) for spec in specs]

    def close(self) -> None:
        with self._lock:
            keys = list(self._offered)
            self._connections.clear()
        for key in keys:
            self.drain(key)
        self._drains.shutdown(wait=False)

    def _discard(self, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> None:
        """Pulls an offer to discard it. Offers are discarded one at a time, because a pull allocates as much memory as
        the offer."""
        until = time.monotonic() + _DISCARDING
        try:
            arrays: list[Any] = self._pull(self.address, key, specs)
            while not all(array.is_ready() for array in arrays) and time.monotonic() < until:
                time.sleep(_POLL[0])
        except RuntimeError as error:
            log.warning("could not discard an offer: %s", one_line(error))

    def _pull(self, address: str, key: int, specs: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        with self._lock:
            connection = self._connections.get(address)
            if connection is None:
                connection = self._connections[address] = self._server.connect(address)
        return connection.pull(key, list(specs))
