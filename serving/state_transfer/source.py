"""Where states come from that the device does not hold, how they are written to it, and calls between threads."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

from mamba_jax.store import Store
from serving.core.cache.content import Name, Scope
from serving.core.planning.plan import StepPlan
from serving.core.requests.request import RemoteLoad, RemoteState
from serving.core.scheduler import Scheduler
from serving.state_transfer.programs import PointPrograms

PATIENCE = 0.002
"""Seconds that an idle engine waits for an awaited call before it looks for new requests."""


class Inbox:
    """Calls that other threads post, and that the engine's thread makes between steps."""

    def __init__(self) -> None:
        self.awaited = 0
        """Calls for which an idle engine waits briefly. Only the engine's thread changes it."""
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, call: Callable[[], None]) -> None:
        """Makes the engine's thread call this. May be called from any thread."""
        self._calls.put(call)

    def take(self, patience: float = 0.0) -> bool:
        """Makes the oldest posted call, for which it waits up to `patience` seconds. Returns whether there was one."""
        try:
            call = self._calls.get(block=patience > 0, timeout=patience or None)
        except queue.Empty:
            return False
        call()
        return True

    def take_all(self, *, idle: bool = False) -> None:
        """Makes all posted calls. An idle engine waits for the first one, if one is awaited."""
        patience = PATIENCE if idle and self.awaited else 0.0
        while self.take(patience):
            patience = 0.0


class Loop(Protocol):
    """The part of the step loop that a source of states uses."""

    scheduler: Scheduler
    inbox: Inbox

    @property
    def store(self) -> Store | None:
        """The store as it is now; None after a failure."""

    @property
    def in_flight(self) -> bool:
        """Whether a dispatched step has not been settled."""

    def replace_store(self, change: Callable[[Store], Store]) -> None:
        """Dispatch a program over the store that no step knows of."""


class StateSource:
    """A place outside the store that states come from or go to: other workers, or the tiers below the device.

    The step loop calls each method for all of its sources, on its own thread. Unless overridden, a method does nothing.
    """

    shared_with_workers = False
    """Whether other workers use the same states. Weights can then not be replaced."""

    @property
    def busy(self) -> bool:
        """Whether the loop must keep calling `exchange` even if no request is unfinished."""
        return False

    def warm_up(self, store: Store) -> None:
        """Compiles the programs that move states, without running them."""

    def find(self, prompt: Sequence[int], scope: Scope) -> RemoteState | None:
        """The state that was announced for the next request with this prompt and scope."""
        return None

    def fetch(self, loop: Loop, load: RemoteLoad) -> None:
        """Starts to fetch the state that a request waits for."""

    def cancel(self, remote: RemoteState) -> None:
        """No request needs this state any more."""

    def exchange(self, loop: Loop) -> None:
        """Called before a step is planned and once more after, when all posted calls have been made."""

    def copy_out(self, store: Store | None) -> None:
        """Called after a plan and before its dispatch: copies the states and pages that the plan evicted."""

    def dispatched(self, loop: Loop, plan: StepPlan) -> None:
        """A step is in the device's queue; the slots and pages that it writes still belong to its requests."""

    def close(self, loop: Loop) -> None:
        """No step will follow."""


@dataclass(eq=False)
class Arrival:
    """A state that a request waits for, or why it does not come."""

    load: RemoteLoad
    bytes: int = 0
    """Counted as under way until it is taken in."""
    state: dict[str, Any] | None = None
    """None: it did not come."""
    pieces: list[tuple[int, Any]] = field(default_factory=list)
    """(first token, keys and values [layers, tokens, ...])."""
    seconds: float = 0.0
    """How long the fetch took."""
    error: str = ""
    damaged: Name | None = None
    """The block of a tier that could not be read, if it was one."""

    def write(self, loop: Loop, programs: PointPrograms, page_size: int) -> None:
        """Dispatches the programs that write it into its slot and pages. Its request continues from there."""
        load, state = self.load, self.state
        assert state is not None
        loop.replace_store(lambda store: programs.write_state(store, load.slot, state, load.position))
        for start, kv in self.pieces:
            # Other requests read the pages before `load.start`, and no request needs those behind the last one.
            first = (start - load.start) // page_size
            table = [
                load.pages[at] if 0 <= at < len(load.pages) else 0
                for at in range(first, first + kv.shape[1] // page_size)
            ]
            if any(table):
                loop.replace_store(partial(programs.write_piece, pages=table, piece=kv))
        loop.scheduler.arrived(load)
