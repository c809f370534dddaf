"""What `mamba-jax serve --role ...` adds to a server."""

from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from fastapi import APIRouter

from serving.config import ConfigError
from serving.disagg.decode_side import DecodeSide
from serving.disagg.http.decode_routes import decode_router
from serving.disagg.http.prefill_routes import prefill_router
from serving.disagg.prefill_side import PrefillSide
from serving.disagg.settings import SplitSettings
from serving.disagg.transport import TransportError, open_transports
from serving.disagg.worker import Worker
from serving.engine.build import Built

log = logging.getLogger(__name__)

_FETCHES = 8  # states on their way to a decode worker at once


@dataclass(frozen=True)
class OpenRole:
    """A role that has been taken on; one of a server that does everything itself is empty."""

    routers: list[APIRouter]
    worker: Worker | None = None
    reads: bool = False
    """It takes states out of its store; otherwise it puts them in."""

    def prepare(self) -> None:
        """Compile what the role needs, on the engine's thread; for peers with the same page size."""
        worker = self.worker
        if worker is None:
            return
        store, layers = worker.loop.store, worker.manifest.attention_layers
        assert store is not None
        # Those who go on from a prefill worker's states may want its draft layer's keys and values, or not.
        for count in {layers + worker.manifest.draft_layers, layers if self.reads else len(store.kv)}:
            worker.programs.warm_up(
                store, unit=max(1, store.page_size), layers=count, reading=self.reads, state=worker.state
            )


def open_role(settings: SplitSettings, built: Built, host: str, port: int) -> OpenRole:
    """Take on the role of `settings`, before anything drives the engine.

    Raises:
        ConfigError: a transport is not to be had.
    """
    if settings.role is None:
        return OpenRole([])
    reached = settings.advertise or host
    if reached in ("0.0.0.0", "::", ""):
        reached = socket.gethostbyname(socket.gethostname())
    try:
        transports = open_transports(settings.transport, reached)
    except TransportError as error:
        raise ConfigError(str(error)) from None
    worker = Worker.of(built, transports)
    if settings.role == "prefill":
        side = PrefillSide(worker, lease=settings.lease, max_kept=settings.max_kept)
        return OpenRole([prefill_router(side, f"http://{reached}:{port}")], worker, reads=True)
    worker.manifest = worker.manifest.model_copy(update={"converts_state": settings.convert_state})
    decode = DecodeSide(
        worker,
        policy=settings.on_failure,
        executor=ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch"),
        timeout=settings.fetch_timeout,
        fail=built.engine.fail,
    )
    built.engine.find_remote = decode.find
    return OpenRole([decode_router(decode)], worker)
