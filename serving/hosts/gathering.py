"""How followers connect to their leader: the leader listens, checks each one's number and configuration, and answers.

Handshakes run concurrently, so that none delays another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import queue
import socket
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence

from serving.config import ConfigError
from serving.hosts.link import Kind, Link, LinkError

log = logging.getLogger(__name__)

REPORT_INTERVAL = 10.0  # seconds between two lines about missing hosts
_ANSWER_WAIT = 5.0  # seconds that a follower waits longer than the leader, which knows who is missing
_MAX_HANDSHAKES = 64  # maximum number of concurrent handshakes
_RUNNING_PATIENCE = 10.0
"""Seconds for a group that runs at the leader's address to end, before a follower gives up."""


@contextlib.contextmanager
def listening_at(place: str | None, port: int) -> Iterator[socket.socket]:
    """Listens at the coordinator's address, by which the others reach this host. On all addresses where that is not its
    own, or where only this host takes a name for loopback, as `/etc/hosts` of Debian does.

    Raises:
        ConfigError: the port is in use.
    """
    made = None
    with contextlib.suppress(OSError):
        if place is not None:
            family, _, _, _, address = socket.getaddrinfo(place, port, type=socket.SOCK_STREAM)[0]
            loopback = ipaddress.ip_address(address[0]).is_loopback
            if not loopback or place == "localhost" or address[0] == place:
                made = socket.create_server(address[:2], family=family)
    try:
        if made is None:
            both = socket.has_dualstack_ipv6()
            family = socket.AF_INET6 if both else socket.AF_INET
            made = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise ConfigError(f"cannot listen on port {port} for the other hosts: {error.strerror or error}") from None
    with made:
        try:
            yield made
        finally:
            with contextlib.suppress(OSError):
                made.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts


def accept_followers(
    listening: socket.socket, key: bytes, num_hosts: int, facts: Mapping[str, str], end: float
) -> dict[int, Link]:
    """Returns a link to each follower by its number, when all are connected.

    `num_hosts` includes this host. `key` proves that they belong to the group, and `facts` must be the same on all of
    them, by name. All must be connected by `end`, in seconds of `time.monotonic`.

    Raises:
        LinkError: a host does not connect, or has another configuration. Every connected host receives the reason.
    """
    links: dict[int, Link] = {}
    authenticated = _authenticated(listening, key)
    try:
        while missing := _missing(links, num_hosts):
            left = end - time.monotonic()
            if left <= 0:
                raise LinkError(f"{_names(missing)} did not connect in time: not started, not reachable, or ended")
            try:
                other, link = authenticated.get(timeout=min(left, REPORT_INTERVAL))
            except queue.Empty:
                _report(links, f"waiting for {_names(missing)}")
                continue
            link.timeout = max(1.0, end - time.monotonic())
            if other not in _missing(links, num_hosts):  # the earlier one may have ended
                _refuse(link, f"duplicate or invalid --host-id {other}")
                log.warning("refused a process: duplicate or invalid --host-id %d", other)
                continue
            links[other] = link
            _check_facts(other, link, facts)
        for other, link in links.items():
            with _with_host(other):
                link.send(Kind.FACTS, b"{}")
    except LinkError as error:
        for link in links.values():  # they wait for an answer
            _refuse(link, str(error))
        raise
    return links


def _authenticated(listening: socket.socket, key: bytes) -> queue.SimpleQueue[tuple[int, Link]]:
    """Returns a queue of followers that have the key, with their numbers, until `listening` is closed."""
    authenticated: queue.SimpleQueue[tuple[int, Link]] = queue.SimpleQueue()
    handshakes = threading.BoundedSemaphore(_MAX_HANDSHAKES)

    def authenticate(link: Link) -> None:
        try:
            authenticated.put((link.authenticate_follower(key), link))
        except LinkError as error:
            log.warning("refused a connection to the group of hosts: it %s", error)
            link.close()
        finally:
            handshakes.release()

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
    return authenticated


def _missing(links: dict[int, Link], num_hosts: int) -> set[int]:
    """Removes hosts that have closed their connections. Returns the numbers of those that are not connected."""
    for other in [other for other, link in links.items() if link.is_closed()]:
        log.warning("host %d closed the connection", other)
        links.pop(other).close()
    return set(range(1, num_hosts)) - links.keys()


def _report(links: Mapping[int, Link], line: str) -> None:
    log.info(line)
    for link in links.values():
        with contextlib.suppress(LinkError):
            link.send(Kind.HEARTBEAT, line.encode())


def _refuse(link: Link, why: str) -> None:
    with contextlib.suppress(LinkError):
        link.send(Kind.FAILED, why.encode())
    link.close()


def _names(hosts: Collection[int]) -> str:
    return f"host{'s' if len(hosts) > 1 else ''} {', '.join(map(str, sorted(hosts)))}"


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


def connect_to_leader(
    addresses: Sequence[str], port: int, key: bytes, host: int, facts: Mapping[str, str], end: float
) -> Link:
    """Returns a follower's link to the leader, when all hosts are connected. `host`: the follower's number; the other
    arguments are those of `accept_followers`.

    Raises:
        LinkError: the leader cannot be reached, or says why the hosts cannot run together.
    """
    link = _find_leader(addresses, port, key, host, end)
    link.timeout = max(1.0, end - time.monotonic()) + _ANSWER_WAIT
    with _with_host(0):
        link.send(Kind.FACTS, json.dumps(dict(facts)).encode())
        while (message := link.receive())[0] is Kind.HEARTBEAT:
            log.info("host 0: %s", message[1].decode(errors="replace")[:200])
    if message[0] is not Kind.FACTS:
        raise LinkError(message[1].decode(errors="replace"))
    return link


def _find_leader(addresses: Sequence[str], port: int, key: bytes, host: int, end: float) -> Link:
    """Connects to the leader at the first of its addresses that works."""
    why, reported, running = "no address", time.monotonic(), None
    while time.monotonic() < end:
        for address in addresses:
            try:
                connected = socket.create_connection((address, port), timeout=3.0)
            except OSError as error:
                why = f"{address} port {port}: {error.strerror or error}"
                continue
            link = Link(connected, 5.0)
            try:
                if link.greets_as_http2():
                    running = running or time.monotonic()
                    raise LinkError(f"belongs to hosts that already run; is --host-id {host} taken?")
                link.authenticate_to_leader(key, host)
                return link
            except LinkError as error:
                why = f"{address} port {port}: the process there {error}"
                link.close()
        if running is not None and time.monotonic() > running + _RUNNING_PATIENCE:
            break
        if time.monotonic() > reported + REPORT_INTERVAL:
            reported = time.monotonic()
            log.info("waiting for host 0: %s", why)
        time.sleep(0.2)
    raise LinkError(f"cannot connect to host 0: {why}")


@contextlib.contextmanager
def _with_host(other: int) -> Iterator[None]:
    """Adds the host's name to errors of its connection."""
    try:
        yield
    except LinkError as error:
        raise LinkError(f"host {other} {error}") from None
