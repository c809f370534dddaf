"""Connects the hosts at start-up.

With a coordinator, all hosts first call the roll at its address, because JAX's runtime aborts all processes if one is
missing or comes twice. The runtime then distributes the address and the key of the connections for steps. Each time,
the leader listens, checks each follower's number and configuration, and answers; handshakes run concurrently, so that
none delays another.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import logging
import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from checkpoints.errors import CheckpointError, one_line
from serving.config import ConfigError
from serving.engine.assembly.devices import of_first_process
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind, Link, LinkError
from serving.hosts.settings import HostSettings

log = logging.getLogger(__name__)

_ROLL_CALL = b"mamba-jax roll call"
"""The key of the roll call. Everyone knows it: like JAX's own rendezvous, the roll call needs a trusted network."""
_JOINING_TIMEOUT = 60.0  # of silence while JAX joins the devices, which may keep the interpreter's lock for long
_SHUTDOWN = 10  # seconds that JAX waits, at a host's end, for those of the others
_GRACE = 10.0  # seconds after the deadline in which an error may be raised that names the missing host
_JAX_LATER = 60  # seconds by which JAX's own time limits are longer: it aborts the process when one is over
_EXIT_DELAY = 1.0  # seconds in which the others read why the hosts end: JAX aborts them once host 0 has gone
REPORT_INTERVAL = 10.0  # seconds between two lines about missing hosts
_ANSWER_WAIT = 5.0  # seconds that a follower waits longer than the leader, which knows who is missing
_MAX_HANDSHAKES = 64  # maximum number of concurrent handshakes
_RUNNING_PATIENCE = 10.0  # seconds for a group that runs at the leader's address to end


def meet(settings: HostSettings, facts: Mapping[str, str]) -> HostGroup | None:
    """Connects all hosts to their leader, and their devices by JAX's runtime. Returns None if the environment knows of
    no other host. `facts` must be the same on all hosts, by name.

    Raises:
        ConfigError: the hosts do not connect, or have other settings.
    """
    settings = settings.in_environment(os.environ)
    with connect_deadline(settings) as end, roll_call(settings, facts, end):
        initialize_jax(settings)
        return connect_hosts(settings, facts, end) if jax.process_count() > 1 else None


@contextlib.contextmanager
def connect_deadline(settings: HostSettings) -> Iterator[float]:
    """Limits the time to connect; yields its end, in seconds of `time.monotonic`.

    If the hosts do not connect in time, this process logs one line and exits: with code 2 if the hosts are configured
    wrongly, otherwise with code 1. JAX's runtime cannot be interrupted, and aborts a process that ends without the
    other hosts.

    Raises:
        ConfigError: JAX's runtime was not started.
    """
    over = threading.Event()
    end = time.monotonic() + settings.meeting_timeout

    def watch() -> None:
        while (left := end + _GRACE - time.monotonic()) > 0:
            if over.wait(min(left, REPORT_INTERVAL)):
                return
            if settings.coordinator is None:
                log.info("waiting for other hosts, which only JAX's runtime knows; --coordinator would name them")
        _end(
            f"the hosts did not connect within {settings.meeting_timeout} s: a host was not started, cannot be "
            "reached or has ended; see the other hosts' logs, or set --meeting-timeout",
            1,
        )

    threading.Thread(target=watch, name="meeting-time", daemon=True).start()
    try:
        yield end
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


@contextlib.contextmanager
def roll_call(settings: HostSettings, facts: Mapping[str, str], end: float) -> Iterator[None]:
    """Waits until all hosts have reached the coordinator's address. A host that is lost within the context ends all of
    them with its name. Without a coordinator, nothing is known of the hosts before JAX's runtime.

    Raises:
        ConfigError: a host does not connect, its number is taken, or it has another configuration.
    """
    if settings.coordinator is None:
        yield
        return
    place, host, hosts = settings.meeting_host or "", settings.host_id or 0, settings.num_hosts or 1
    port = int((settings.meeting_place or "").rpartition(":")[2])
    if host == 0:
        with listening_at(place, port) as listening:
            links = accept_followers(listening, _ROLL_CALL, hosts, facts, end)
    else:
        links = {0: connect_to_leader([place], port, _ROLL_CALL, host, facts, end)}
    group = HostGroup(host, links, host_timeout=max(settings.host_timeout, _JOINING_TIMEOUT))
    with group.ending_together((ConfigError, CheckpointError)):
        yield
    if group.leads:
        group.tell(Kind.DONE)
    else:
        list(group.calls())  # ends when host 0 is done
    group.close()


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
    """Connects the hosts, whose devices JAX has joined, to their leader. `facts` and `end`: see `accept_followers`.

    Raises:
        ConfigError: a host does not connect, or has another configuration.
    """
    host = settings.host_id if settings.host_id is not None else jax.process_index()
    if host == 0:
        key = secrets.token_bytes(32)
        with listening_at(settings.meeting_host, settings.plan_port) as listening:
            addresses = list(dict.fromkeys(_own_addresses(settings)))[:16]
            invitation = {"key": key.hex(), "port": listening.getsockname()[1], "addresses": addresses}
            of_first_process(invitation)
            links = accept_followers(listening, key, jax.process_count(), facts, end)
    else:
        found = of_first_process(None)
        key = bytes.fromhex(found["key"])
        links = {0: connect_to_leader(found["addresses"], found["port"], key, host, facts, end)}
    return HostGroup(host, links, host_timeout=settings.host_timeout)


def _own_addresses(settings: HostSettings) -> Iterator[str]:
    """Addresses by which others may reach this host, the most likely first."""
    if settings.meeting_host is not None:
        yield settings.meeting_host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing: it only asks for the route to the world
        yield probe.getsockname()[0]
    with contextlib.suppress(OSError):
        for *_, address in socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM):
            yield str(address[0])


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
    """Returns a link to each follower by its number, when all are connected, by `end` in seconds of `time.monotonic`.
    `num_hosts` includes this host; `key` proves that a host belongs to the group.

    Raises:
        ConfigError: a host does not connect, or has another configuration. Every connected host receives the reason.
    """
    links: dict[int, Link] = {}
    authenticated = _authenticated(listening, key)
    try:
        while missing := sorted(_missing(links, num_hosts)):
            names = f"host{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            left = end - time.monotonic()
            if left <= 0:
                raise LinkError(f"{names} did not connect in time: not started, not reachable, or ended")
            try:
                other, link = authenticated.get(timeout=min(left, REPORT_INTERVAL))
            except queue.Empty:
                _report(links, f"waiting for {names}")
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
        raise _not_connected(error) from None
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
    """Returns the link of the follower `host` to the leader, when all hosts are connected; see `accept_followers`.

    Raises:
        ConfigError: the leader cannot be reached, or says why the hosts cannot run together.
    """
    try:
        link = _find_leader(addresses, port, key, host, end)
        link.timeout = max(1.0, end - time.monotonic()) + _ANSWER_WAIT
        with _with_host(0):
            link.send(Kind.FACTS, json.dumps(dict(facts)).encode())
            while (message := link.receive())[0] is Kind.HEARTBEAT:
                log.info("host 0: %s", message[1].decode(errors="replace")[:200])
    except LinkError as error:
        raise _not_connected(error) from None
    if message[0] is not Kind.FACTS:
        raise _not_connected(message[1].decode(errors="replace"))
    return link


def _not_connected(why: object) -> ConfigError:
    return ConfigError(f"the hosts did not connect: {why}")


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
