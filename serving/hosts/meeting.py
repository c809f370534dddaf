"""Connects the hosts at start-up.

With a coordinator, all hosts first call the roll at its address, because JAX's runtime aborts all processes if one is
missing or comes twice. The runtime then distributes the address and the key of the connections for steps.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
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
from serving.hosts.gathering import REPORT_INTERVAL, accept_followers, connect_to_leader, listening_at
from serving.hosts.host_group import HostGroup
from serving.hosts.link import Kind, Link, LinkError
from serving.hosts.settings import HostSettings

log = logging.getLogger(__name__)

_BROADCAST_SIZE = 4096  # bytes of the leader's message to all hosts through JAX's collectives
_ROLL_CALL = b"mamba-jax roll call"
"""The key of the roll call. Everyone knows it: like JAX's own rendezvous, the roll call needs a trusted network."""
_JOINING_TIMEOUT = 60.0
"""Minimum seconds of silence after which a host is lost while JAX joins the devices, which may keep the interpreter's
lock for long."""
_SHUTDOWN = 10  # seconds that JAX waits, at a host's end, for those of the others
_GRACE = 10.0  # seconds after the deadline in which an error may be raised that names the missing host
_JAX_LATER = 60  # seconds by which JAX's own time limits are longer: it aborts the process when one is over
_EXIT_DELAY = 1.0
"""Seconds in which the others read why the hosts end: JAX aborts them once host 0 has gone."""


def meet(settings: HostSettings, facts: Mapping[str, str]) -> HostGroup | None:
    """Connects all hosts to their leader, and their devices by JAX's runtime. None: the environment knows of no other
    host.

    `facts` must be the same on all hosts; they have names. If the hosts do not connect, this process ends with one line
    (`connect_deadline`).

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
    with _as_config_error():
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
    links: dict[int, Link]
    with _as_config_error():
        if host == 0:
            key = secrets.token_bytes(32)
            with listening_at(settings.meeting_host, settings.plan_port) as listening:
                addresses = list(dict.fromkeys(_own_addresses(settings)))[:16]
                invitation = {"key": key.hex(), "port": listening.getsockname()[1], "addresses": addresses}
                _broadcast(invitation, leads=True)
                links = accept_followers(listening, key, jax.process_count(), facts, end)
        else:
            found = _broadcast({}, leads=False)
            key = bytes.fromhex(found["key"])
            links = {0: connect_to_leader(found["addresses"], found["port"], key, host, facts, end)}
    return HostGroup(host, links, host_timeout=settings.host_timeout)


@contextlib.contextmanager
def _as_config_error() -> Iterator[None]:
    try:
        yield
    except LinkError as error:
        raise ConfigError(f"the hosts did not connect: {error}") from None


def _broadcast(invitation: dict[str, Any], *, leads: bool) -> Any:
    """Returns the leader's invitation on every host."""
    text = json.dumps(invitation).encode() if leads else b""
    line = np.frombuffer(text.ljust(_BROADCAST_SIZE), np.uint8)
    found = multihost_utils.broadcast_one_to_all(line, is_source=leads)
    return json.loads(np.asarray(found).astype(np.uint8).tobytes())


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
