"""Creates the role of `mamba-jax serve --role ...`."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from fastapi import APIRouter, FastAPI

from serving.api.http.app import Role
from serving.api.http.settings import ServerSettings
from serving.compatibility import Deployment, check
from serving.config import ConfigError, EngineConfig
from serving.core.tiers.journal import Journal
from serving.engine.assembly.build import AssembledEngine
from serving.split.decode_side import DecodeSide
from serving.split.http.events import events_router
from serving.split.http.routes import worker_router
from serving.split.kv_events import KvJournal, KvPublisher, check_installed
from serving.split.prefill_side import PrefillSide
from serving.split.seal import SECRET_VARIABLE
from serving.split.settings import SplitSettings
from serving.split.transports import JaxTransport, TcpTransport, Transport, TransportError
from serving.split.worker import Worker

log = logging.getLogger(__name__)

_TRANSPORTS: dict[str, Callable[[str], Transport]] = {"jax": JaxTransport, "tcp": TcpTransport}
_FETCHES = 8  # maximum number of states that a decode worker fetches at a time


def prepare(worker: Worker, *directions: bool) -> None:
    """Compiles a role's programs, for peers with the same page size. Call this on the engine's thread. `directions`:
    True: the role reads states from its store; False: it writes states to its store."""
    store, layers = worker.loop.store, worker.manifest.attention_layers
    assert store is not None
    # Decode workers may or may not request the keys and values of draft layers.
    for reading in directions:
        for count in {layers + worker.manifest.draft_layers, layers if reading else len(store.kv)}:
            worker.programs.warm_up(store, unit=max(1, store.page_size), layers=count, reading=reading)


def role_of(
    settings: SplitSettings, config: EngineConfig, server: ServerSettings, listening: socket.socket
) -> Callable[[AssembledEngine], Role]:
    """Returns what creates the role of `settings` in a server that listens on this socket.

    Raises:
        ConfigError: the engine does not support the role.
    """
    check(Deployment(config, role=settings.role, followed=settings.followed))
    if settings.kv_events is not None:
        check_installed()
    port = listening.getsockname()[1]
    return lambda built: open_role(settings, built, server.host, port, keys=server.api_key)


def open_role(
    settings: SplitSettings, built: AssembledEngine, host: str, port: int, *, keys: Sequence[str] = ()
) -> Role:
    """Creates the role of `settings`, before the engine runs. `keys`: the server's API keys.

    Raises:
        ConfigError: a transport is not available.
    """
    if settings.role is None:
        return Role(_events(built, built.weights_digest, settings) if settings.followed else [])
    if not settings.seal.secret and not _is_loopback(host):
        raise ConfigError(
            f"a {settings.role} worker that listens on {host} needs a secret: set --split-secret or {SECRET_VARIABLE} "
            "to the same value of at least 16 characters on all workers and routers"
        )
    reached = settings.advertise or host
    if reached in ("0.0.0.0", "::", ""):
        reached = socket.gethostbyname(socket.gethostname())
    worker = Worker(built, _transports(settings.transport, reached))
    events = _events(built, worker.manifest.model, settings)
    offers: PrefillSide | None = None
    if settings.role == "prefill" or settings.share:
        offers = PrefillSide(worker, settings, f"http://{reached}:{port}")
    if settings.role == "prefill":
        return Role([worker_router(worker, settings, offers=offers), *events], partial(prepare, worker, True))
    worker.manifest = worker.manifest.model_copy(update={"converts_state": settings.convert_state})
    decodes = DecodeSide(worker, settings, executor=ThreadPoolExecutor(_FETCHES, thread_name_prefix="fetch"))
    router = worker_router(worker, settings, offers=offers, decodes=decodes, keys=keys)
    return Role([router, *events], partial(prepare, worker, *((True, False) if settings.share else (False,))))


def _transports(kinds: Sequence[str], host: str) -> dict[str, Transport]:
    """Returns the transports by kind, listening on free ports of `host`. Empty `kinds`: all available ones."""
    opened: dict[str, Transport] = {}
    for kind in kinds or _TRANSPORTS:
        try:
            opened[kind] = _TRANSPORTS[kind](host)
        except TransportError as error:
            if kinds or kind == "tcp":
                raise ConfigError(str(error)) from None
            log.warning("states are transferred by tcp: %s", error)
    return opened


def _events(built: AssembledEngine, model: str, settings: SplitSettings) -> list[APIRouter]:
    """Returns the endpoints that routers follow, and starts KV events; nothing without a prefix cache.

    Raises:
        ConfigError: KV events of an engine without a prefix cache.
    """
    scheduler, block, kv_events = built.engine.loop.scheduler, built.config.state_block_size, settings.kv_events
    if scheduler.index is None:
        if kv_events is not None:
            raise ConfigError("kv_events_config needs prefix caching: there is no prefix to report without it")
        return []
    journal = Journal(block)
    if kv_events is not None:
        journal = KvJournal(block, partial(_adapter_of, built), salts=kv_events.cache_salt)
    routers = []
    if settings.role is not None or settings.seal.secret:
        routers.append(events_router(journal, model=model, seal=settings.seal))
    if kv_events is not None and isinstance(journal, KvJournal):
        publisher = KvPublisher(journal, kv_events)

        @contextlib.asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            yield
            publisher.close()

        routers.append(APIRouter(lifespan=lifespan))
    scheduler.tell(journal)
    return routers


def _adapter_of(built: AssembledEngine, digest: str) -> str | None:
    """Returns the name of a loaded adapter."""
    names = [] if built.engine.adapters is None else list(built.engine.adapters.names.items())
    return next((name for name, (_, known) in names if known == digest), None)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
