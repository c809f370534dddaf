"""The hosts that run one engine: this host's connections to the others, heartbeats, and the common shutdown."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from typing import NoReturn

from checkpoints.errors import one_line
from serving.hosts.link import Kind, Link, LinkClosed, LinkError

log = logging.getLogger(__name__)

_HEARTBEAT_INTERVAL = 1.0
_LOADING_TIMEOUT = 15.0
"""Timeout in seconds until a host can run steps. While it loads and compiles, the heartbeat thread waits for the
interpreter for up to 3 s on a busy machine."""
_CAUSE_WAIT = 2.0  # seconds to wait after a failed step or collective: another host's failure may be the cause
_MAX_CALLS = 4096  # calls that a follower buffers: the leader is one step ahead


class HostGroup:
    """This host and its connections: the leader has one to each follower, a follower one to the leader.

    Any failure ends this process: a host that runs a step waits forever for another one that does not run it.

    Args:
        host: our number; 0 leads.
        links: by the other's number.
        host_timeout: seconds of silence after which a host counts as lost.
    """

    def __init__(self, host: int, links: Mapping[int, Link], *, host_timeout: float) -> None:
        self.host, self._links, self._host_timeout = host, dict(links), host_timeout
        self._received: queue.Queue[bytes | None] = queue.Queue(_MAX_CALLS)
        self._digests: dict[int, str] = {}
        self._ready = {other: threading.Event() for other in links}
        self._gone = {other: threading.Event() for other in links}
        self._ending = threading.RLock()
        self._failed_host: int | None = None
        self._idle = False  # no call is expected: others may close their connections
        self._closed = threading.Event()
        for link in self._links.values():
            link.timeout = max(_LOADING_TIMEOUT, host_timeout)
        for other in links:
            threading.Thread(target=self._receive, args=(other,), name=f"host-{other}", daemon=True).start()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    @property
    def leads(self) -> bool:
        """Whether this host schedules."""
        return self.host == 0

    def tell(self, kind: Kind, *pieces: bytes | memoryview) -> None:
        """Sends a message to every connected host. If sending to one fails, all hosts end; only heartbeats may fail
        while no call is expected."""
        if kind is not Kind.HEARTBEAT:
            self._idle = kind is Kind.DONE
        for other, link in self._links.items():
            try:
                link.send(kind, *pieces)
            except LinkError as error:
                if kind is not Kind.HEARTBEAT or not self._idle:
                    self._lost(other, error)

    def calls(self) -> Iterator[bytes]:
        """Yields the leader's calls in order, until it ends."""
        while (call := self._received.get()) is not None:
            yield call

    def wait_until_ready(self) -> dict[int, str]:
        """Waits until every other host has reported (again) that it can run steps. Returns the digest of each one's
        weights, by the host's number."""
        for other, ready in self._ready.items():
            if not ready.wait(0):
                log.info("waiting for host %d", other)
                ready.wait()
            ready.clear()  # the next call waits for the next message
        return dict(self._digests)

    def end(self, line: str, *, code: int = 1, error: BaseException | None = None) -> NoReturn:
        """Ends this process, after sending the reason to the others; collectives cannot be interrupted otherwise."""
        with self._ending:  # a second thread waits here for the exit
            log.critical("%s: all hosts exit", line, exc_info=error)
            for link in (link for other, link in self._links.items() if other != self._failed_host):
                link.timeout = 1.0
                with contextlib.suppress(LinkError):
                    link.send(Kind.FAILED, line.encode()[:1000])
            _exit(code)

    def step_failed(self, error: BaseException) -> NoReturn:
        """Ends all hosts after a failed step. Waits first, so that the log names the host that failed first."""
        time.sleep(_CAUSE_WAIT)
        self.end(f"a step failed on host {self.host}: {one_line(error)}")

    @contextlib.contextmanager
    def ending_together(self, expected: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Any error inside ends all hosts; `expected` errors are logged as one line, others with a traceback. Others
        may come from a collective: waits first, so that the log names the host that was lost."""
        try:
            yield
        except expected as error:
            self.end(f"host {self.host}: {one_line(error)}", code=2)
        except KeyboardInterrupt:
            self.end(f"host {self.host} was interrupted", code=130)
        except BaseException as error:
            with contextlib.suppress(KeyboardInterrupt):
                time.sleep(_CAUSE_WAIT)
            self.end(f"host {self.host} has failed: {one_line(error)}", error=error)

    def forward_signals(self) -> None:
        """Makes a follower forward SIGTERM and SIGINT to the leader, which shuts down all hosts in order.

        A second signal ends this process at once. To be called on the main thread.
        """

        def leave(number: int, _: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            log.info("shutdown requested: host 0 finishes running requests first")
            threading.Thread(target=self.tell, args=(Kind.LEAVE,), daemon=True).start()  # something may be half sent

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, leave)

    @staticmethod
    def ignore_reraised_signals() -> None:
        """A server that was stopped by a signal raises it again; this process must still shut down its followers."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

    def exit(self) -> NoReturn:
        """Ends this process in order; the leader waits until its followers have ended. If one does not, all hosts end.
        JAX's own shutdown is not reached: it aborts the process if a host is missing there."""
        self._idle = True
        for other, link in self._links.items() if self.leads else ():
            with contextlib.suppress(LinkError):
                link.send(Kind.CLOSE)
            if not self._gone[other].wait(link.timeout):
                self._lost(other, LinkError(f"did not end within {link.timeout:g} s"))
        _exit(0)

    def close(self) -> None:
        """Closes all connections."""
        self._idle = True
        self._closed.set()
        for link in self._links.values():
            link.close()

    # -- threads --

    def _send_heartbeats(self) -> None:
        while not self._closed.wait(_HEARTBEAT_INTERVAL):
            self.tell(Kind.HEARTBEAT)

    def _receive(self, other: int) -> None:
        link = self._links[other]
        while True:
            try:
                kind, payload = link.receive()
            except LinkError as error:
                if self._closed.is_set() or (self._idle and isinstance(error, LinkClosed)):
                    self._gone[other].set()
                    return
                self._lost(other, error)
            if not self._handle(other, kind, payload):
                self.end(f"host {other} sent an unexpected {kind.name} message")

    def _handle(self, other: int, kind: Kind, payload: bytes) -> bool:
        """Handle a message; return False if the sender's role does not send messages of this kind."""
        if kind is Kind.HEARTBEAT:
            return True
        if kind is Kind.FAILED:
            self.end(payload.decode(errors="replace"))
        if kind is Kind.READY:
            self._links[other].timeout = self._host_timeout
            self._digests[other] = payload.decode(errors="replace")[:64]
            self._ready[other].set()
            return True
        if kind is Kind.LEAVE and self.leads:
            log.info("host %d requests shutdown: all hosts exit", other)
            os.kill(os.getpid(), signal.SIGTERM)
            return True
        if kind is Kind.CLOSE and not self.leads:
            log.info("host 0 shuts down")
            _exit(0)  # the main thread may be compiling
        if kind in (Kind.CALL, Kind.DONE) and not self.leads:
            self._idle = kind is Kind.DONE
            self._received.put(payload if kind is Kind.CALL else None)
            return True
        return False

    def _lost(self, other: int, error: LinkError) -> NoReturn:
        self._failed_host = other
        self.end(f"host {other} is lost: it {error}")


def _exit(code: int) -> NoReturn:
    logging.shutdown()
    os._exit(code)
