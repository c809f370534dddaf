"""Connects the hosts at start-up: JAX's runtime first, which then distributes the leader's address and key."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from checkpoints.errors import CheckpointError, one_line
from serving.config import ConfigError
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind, Link, LinkError
from serving.hosts.settings import HostSettings

log = logging.getLogger(__name__)

_BROADCAST_SIZE = 4096
"""Bytes of the leader's message to all hosts through JAX's collectives."""
_ANSWER_WAIT = 5.0
"""Seconds that a follower waits longer than the leader, which knows who is missing."""
_MAX_HANDSHAKES = 64
"""Maximum number of concurrent handshakes."""
_SHUTDOWN = 10
"""Seconds that JAX waits, at a host's end, for those of the others."""
_GRACE = 10.0
"""Seconds after the deadline in which an error may be raised that names the missing host."""
_JAX_LATER = 60
"""Seconds by which JAX's own time limits are longer: it aborts the process when one is over."""
_EXIT_DELAY = 1.0
"""Seconds in which the others read why the hosts end: JAX aborts them once host 0 has gone."""


@contextlib.contextmanager
def connect_deadline(settings: HostSettings) -> Iterator[float]:
    """Limits the time of `initialize_jax` and `connect_hosts`; yields its end, in seconds of `time.monotonic`.

    If they fail or are not over in time, this process logs one line and exits: with code 2 if the hosts are
    configured wrongly, otherwise with code 1. JAX's runtime cannot be interrupted, and aborts a process that ends
    without the other hosts.

    Raises:
        ConfigError: JAX's runtime was not started.
    """
    over = threading.Event()

    def watch() -> None:
        if not over.wait(settings.meeting_timeout + _GRACE):
            _end(
                f"the hosts did not connect within {settings.meeting_timeout} s: a host was not started, cannot be "
                "reached or has ended; see the other hosts' logs, or set --meeting-timeout",
                1,
            )

    threading.Thread(target=watch, name="meeting-time", daemon=True).start()
    try:
        yield time.monotonic() + settings.meeting_timeout
    except (ConfigError, CheckpointError) as error:
        if not jax.distributed.is_initialized():
            raise
        _end(str(error), 2)
    except Exception as error:
        _end(f"the hosts did not connect: {one_line(error)}", 1)
    finally:
        over.set()


def _end(line: str, code: int) -> NoReturn:
    log.critical(line)
    logging.shutdown()
    time.sleep(_EXIT_DELAY)
    os._exit(code)


def initialize_jax(settings: HostSettings) -> None:
    """Joins the devices of all hosts by JAX's distributed runtime. Nothing may have used a device before.

    Raises:
        ConfigError: the environment names no hosts, or they have different numbers of devices.
    """
    # Its handler would take the signals by which servers are asked to end.
    jax.config.update("jax_enable_preemption_service", False)
    try:
        jax.distributed.initialize(
            settings.meeting_place,
            settings.num_hosts,
            settings.host_id,
            initialization_timeout=settings.meeting_timeout + _JAX_LATER,
            heartbeat_timeout_seconds=settings.meeting_timeout + _JAX_LATER,
            shutdown_timeout_seconds=_SHUTDOWN,
        )
    except ValueError as error:
        raise ConfigError(f"the environment does not name other hosts: {one_line(error)}") from None
    counts = multihost_utils.process_allgather(np.int32(jax.local_device_count()))
    if len(set(np.ravel(counts).tolist())) > 1:
        raise ConfigError(f"hosts have {np.ravel(counts).tolist()} devices: all must have the same number")


def connect_hosts(settings: HostSettings, facts: Mapping[str, str], end: float) -> HostGroup:
    """Connects the hosts, whose devices JAX has joined, to their leader.

    Args:
        settings: of the hosts.
        facts: what must be the same on all of them, by name.
        end: when all must be connected, in seconds of `time.monotonic`.

    Raises:
        ConfigError: a host does not connect, or has another configuration.
    """
    host = settings.host_id if settings.host_id is not None else jax.process_index()
    try:
        if host == 0:
            links = _accept_all(settings, facts, end)
        else:
            links = {0: _connect(settings, host, facts, end)}
    except LinkError as error:
        raise ConfigError(f"the hosts did not connect: {error}") from None
    return HostGroup(host, links, host_timeout=settings.host_timeout)


def _accept_all(settings: HostSettings, facts: Mapping[str, str], end: float) -> dict[int, Link]:
    key = secrets.token_bytes(32)
    with _listening(settings.meeting_host, settings.plan_port) as listening:
        addresses = list(dict.fromkeys(_own_addresses(settings)))
        _broadcast({"key": key.hex(), "port": listening.getsockname()[1], "addresses": addresses[:16]}, leads=True)
        links: dict[int, Link] = {}
        try:
            _accept_followers(listening, key, links, facts, end)
        except LinkError as error:
            for link in links.values():  # they wait for an answer
                with contextlib.suppress(LinkError):
                    link.send(Kind.FAILED, str(error).encode())
                link.close()
            raise
    return links


def _accept_followers(
    listening: socket.socket, key: bytes, links: dict[int, Link], facts: Mapping[str, str], end: float
) -> None:
    """Fills `links` with all followers. Handshakes run concurrently, so none delays another; connections without the
    right key are closed."""
    wanted = set(range(1, jax.process_count()))
    authenticated: queue.SimpleQueue[tuple[int, Link] | None] = queue.SimpleQueue()
    handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def authenticate(link: Link) -> None:
        host = None
        try:
            host = link.authenticate_follower(key), link
        except LinkError as error:
            log.warning("refused a connection to the group of hosts: it %s", error)
            link.close()
        finally:
            handshakes.release()
            authenticated.put(host)

    def accept() -> None:
        with contextlib.suppress(OSError):  # it has been closed: all hosts are connected, or the time is over
            while True:
                connected, _ = listening.accept()
                handshakes.acquire()
                threading.Thread(
                    target=authenticate, args=(Link(connected, 5.0),), name="handshake", daemon=True
                ).start()

    listening.settimeout(None)
    threading.Thread(target=accept, name="meeting", daemon=True).start()
    while missing := wanted - links.keys():
        try:
            found = authenticated.get(timeout=max(0.1, end - time.monotonic()))
        except queue.Empty:
            raise LinkError(f"host {min(missing)} did not connect in time") from None
        if found is None:
            continue
        other, link = found
        link.timeout = max(1.0, end - time.monotonic())
        if other not in missing:
            links[-1] = link  # it receives the error, too
            raise LinkError(f"duplicate or invalid --host-id {other}")
        links[other] = link
        _check_facts(other, link, facts)
    for other, link in links.items():
        with _with_host(other):
            link.send(Kind.FACTS, b"{}")


def _connect(settings: HostSettings, host: int, facts: Mapping[str, str], end: float) -> Link:
    invitation = _broadcast({}, leads=False)
    link = _connect_to_leader(invitation["addresses"], invitation["port"], bytes.fromhex(invitation["key"]), host, end)
    link.timeout = max(1.0, end - time.monotonic()) + _ANSWER_WAIT
    with _with_host(0):
        link.send(Kind.FACTS, json.dumps(dict(facts)).encode())
        kind, payload = link.receive()
    if kind is not Kind.FACTS:
        raise LinkError(payload.decode(errors="replace"))
    return link


def _check_facts(other: int, link: Link, facts: Mapping[str, str]) -> None:
    """Raises LinkError: the other host has another configuration."""
    with _with_host(other):
        kind, payload = link.receive()
    try:
        theirs = json.loads(payload)
        assert kind is Kind.FACTS
        wrong = [name for name in sorted(facts.keys() | theirs.keys()) if facts.get(name) != theirs.get(name)]
    except (ValueError, AssertionError, AttributeError):
        raise LinkError(f"host {other} sent an invalid configuration") from None
    if wrong:
        name = wrong[0]
        raise LinkError(
            f"host {other} has another configuration: {name} is {theirs.get(name)} there, {facts.get(name)} on host 0"
        )


@contextlib.contextmanager
def _with_host(other: int) -> Iterator[None]:
    """Adds the host's name to errors of its connection."""
    try:
        yield
    except LinkError as error:
        raise LinkError(f"host {other} {error}") from None


def _broadcast(invitation: dict[str, Any], *, leads: bool) -> Any:
    """Returns the leader's invitation on every host."""
    text = json.dumps(invitation).encode() if leads else b""
    line = np.frombuffer(text.ljust(_BROADCAST_SIZE), np.uint8)
    found = multihost_utils.broadcast_one_to_all(line, is_source=leads)
    return json.loads(np.asarray(found).astype(np.uint8).tobytes())


@contextlib.contextmanager
def _listening(place: str | None, port: int) -> Iterator[socket.socket]:
    """Listens at the coordinator's address, by which the others reach this host; on all where that is not its own."""
    made = None
    with contextlib.suppress(OSError):
        if place is not None:
            family, _, _, _, address = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM)[0]
            made = socket.create_server(address[:2], family=family)
    try:
        if made is None and socket.has_dualstack_ipv6():
            made = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        elif made is None:
            made = socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"plan_port: cannot listen on port {port}: {error.strerror or error}") from None
    with made:
        try:
            yield made
        finally:
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def _connect_to_leader(addresses: list[str], port: int, key: bytes, host: int, end: float) -> Link:
    """Connects to the leader at the first of its addresses that works."""
    why = "no address"
    while time.monotonic() < end:
        for address in addresses:
            try:
                link = Link(socket.create_connection((address, port), timeout=3.0), 5.0)
            except OSError as error:
                why = f"{address} port {port}: {error.strerror or error}"
                continue
            try:
                link.authenticate_to_leader(key, host)
                return link
            except LinkError as error:
                why = f"{address} port {port}: the process there {error}"
                link.close()
        time.sleep(0.2)
    raise LinkError(f"cannot connect to host 0: {why}")


def _own_addresses(settings: HostSettings) -> Iterator[str]:
    """Where others may find this host, the likeliest first."""
    if settings.meeting_host is not None:
        yield settings.meeting_host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks for the route to the world
        yield probe.getsockname()[0]
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])
