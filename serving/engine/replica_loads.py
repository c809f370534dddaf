"""Chooses the replica of a request: the one with the least to compute before it can answer.

The rule is the same as the router's (`serving.core.placing`). A router learns about states from events. This module
reads each prefix index directly, so its information is current and has no block size. All replicas can fetch the same
states from host memory or disk. A replica with a state on its device is preferred to one that must fetch it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence

from serving.core.cache.content import Chain, Scope
from serving.core.errors import RequestError
from serving.core.placing import EVENNESS, Workload, price
from serving.engine.engine import Engine
from serving.engine.requests.request import EngineRequest

FETCHING = EVENNESS
"""The cost of fetching a token, as a fraction of computing it. With a smaller value, the replicas would fetch a single
conversation in turn, because load beyond a replica's share has this weight."""


class ReplicaLoads:
    """Tracks the load of each replica. Any thread may use it.

    Args:
        engines: the replicas.
        clock: returns seconds.
    """

    def __init__(self, engines: Sequence[Engine], clock: Callable[[], float] = time.monotonic) -> None:
        self._engines, self._clock = engines, clock
        self._work = [Workload() for _ in engines]
        self._choices = [0] * len(engines)
        self._lock = threading.Lock()

    def give(
        self,
        tokens: Sequence[int],
        request: EngineRequest,
        *,
        without: Collection[int] = (),
    ) -> Assignment:
        """Chooses a replica for a request with all its choices, and adds the request to the replica's load.

        A held replica (for example asleep, or without weights) is chosen only if all are held.

        Args:
            tokens: the prompt's token ids; ignored with one engine.
            request: the request. With `prompt_logprobs`, the whole prompt is computed. No states of an adapter that was
                never loaded are cached.
            without: replicas that must not be chosen.
        """
        reuses = len(self._engines) > 1 and request.params.prompt_logprobs is None
        choices, salt, adapter = request.params.n, request.cache_salt, None
        if request.lora_request is not None and (table := self._engines[0].adapters) is not None:
            adapter = table.names.digest(request.lora_request)
            reuses = reuses and adapter is not None
        # Look up states outside the lock, because looking up a long prompt takes time.
        chains: dict[Scope, Chain] = {}
        found = [
            engine.loop.scheduler.reusable(tokens, salt, adapter, chains) if reuses else (0, 0)
            for engine in self._engines
        ]
        missing = [len(tokens) - anywhere for _, anywhere in found]
        with self._lock:
            now = self._clock()
            recent = [work.recent(now) for work in self._work]
            share = sum(recent) / len(recent)

            def cost(replica: int) -> tuple[bool, float, int]:
                device, anywhere = found[replica]
                whole = price(
                    missing[replica] + FETCHING * (anywhere - device),
                    pending=self._work[replica].pending,
                    requests=self._choices[replica],
                    recent=recent[replica],
                    share=share,
                )
                return self._engines[replica].control.held, whole, self._choices[replica]

            best = min((i for i in range(len(self._engines)) if i not in without), key=cost)
            self._work[best].given(missing[best], now)
            self._choices[best] += choices
        return Assignment(self, best, missing[best], choices)

    def tries_another(self, error: Exception, refused: Collection[int]) -> bool:
        """Returns whether to try another replica after the replicas `refused` refused a request, the last with `error`.

        A held replica is not tried, because it could delay the request indefinitely.
        """
        retry = isinstance(error, RequestError) and error.retry
        return retry and any(not each.control.held for i, each in enumerate(self._engines) if i not in refused)

    def computed(self, assignment: Assignment, *, choices: int = 0) -> None:
        """Records that a replica has computed the prompt of an assignment, or will not compute it, and that a number of
        its choices have ended."""
        with self._lock:  # two threads may call it
            self._work[assignment.replica].computed(assignment.missing)
            assignment.missing = 0
            self._choices[assignment.replica] -= choices


class Assignment:
    """The assignment of a request to a replica, until the request ends."""

    def __init__(self, loads: ReplicaLoads, replica: int, missing: int, choices: int) -> None:
        self._loads, self.replica, self.missing, self.choices = loads, replica, missing, choices

    def computed(self) -> None:
        """Records that the replica has computed the prompt."""
        if self.missing:
            self._loads.computed(self)

    def ended(self) -> None:
        """Records that the request has ended. Must be called once."""
        self._loads.computed(self, choices=self.choices)
