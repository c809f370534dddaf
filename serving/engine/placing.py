"""Chooses the replica of a request: the one with the least to compute before it can answer.

The rule is that of the router (`serving.core.placing`). A router learns about states from events; here each prefix
index is asked directly, so the information is current and has no block size. All replicas can fetch the same states
from host memory or disk; a replica that has a state on its device is preferred to one that has to fetch it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from serving.core.cache.prefix_tree import Scope
from serving.core.placing import EVENNESS, Workload, price
from serving.core.tiers.content import Chain
from serving.engine.engine import Engine
from serving.engine.sampling_params import SamplingParams

FETCHING = EVENNESS
"""The cost of fetching a token, as a fraction of computing it. With a smaller value, a single conversation would be
fetched by each replica in turn, because load beyond a replica's share has this weight."""


class Placing:
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
        params: SamplingParams | None,
        salt: str | None,
        *,
        without: Collection[int] = (),
    ) -> Assignment:
        """Chooses a replica for a request and adds the request to its load. All choices of it run on the same replica.

        A held replica (asleep, or without weights) is chosen only if all are held.

        Args:
            tokens: the prompt's token ids.
            params: of the request. With `prompt_logprobs`, the whole prompt is computed.
            salt: the cache salt.
            without: replicas that must not be chosen.
        """
        reuses = params is None or params.prompt_logprobs is None
        choices = 1 if params is None else params.n
        # Outside the lock: looking up a long prompt takes time.
        chains: dict[Scope, Chain] = {}
        found = [_found(engine, tokens, salt, chains) if reuses else _Reusable(0, 0) for engine in self._engines]
        missing = [len(tokens) - each.anywhere for each in found]
        with self._lock:
            now = self._clock()
            recent = [work.recent(now) for work in self._work]
            share = sum(recent) / len(recent)

            def cost(replica: int) -> tuple[bool, float, int]:
                whole = price(
                    missing[replica] + FETCHING * (found[replica].anywhere - found[replica].device),
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

    def any_open(self, without: Collection[int]) -> bool:
        """Whether there is another replica that is not held. A held one could delay a request without limit."""
        return any(not engine.control.held for i, engine in enumerate(self._engines) if i not in without)

    def computed(self, assignment: Assignment) -> None:
        """A replica has computed the prompt of an assignment, or will not compute it."""
        with self._lock:  # two threads may call it
            self._work[assignment.replica].computed(assignment.missing)
            assignment.missing = 0

    def ended(self, assignment: Assignment) -> None:
        """The request of an assignment has ended."""
        self.computed(assignment)
        with self._lock:
            self._choices[assignment.replica] -= assignment.choices


class Assignment:
    """The assignment of a request to a replica, until the request ends."""

    def __init__(self, placing: Placing, replica: int, missing: int, choices: int) -> None:
        self._placing, self.replica, self.missing, self.choices = placing, replica, missing, choices

    def computed(self) -> None:
        """The prompt has been computed."""
        self._placing.computed(self)

    def ended(self) -> None:
        """The request has ended. Must be called once."""
        self._placing.ended(self)


class _Reusable(NamedTuple):
    """Numbers of prompt tokens that a replica need not compute."""

    device: int
    """With the states on its device."""
    anywhere: int
    """With the states that it could fetch, too."""


def _found(engine: Engine, tokens: Sequence[int], salt: str | None, chains: dict[Scope, Chain]) -> _Reusable:
    scheduler = engine.loop.scheduler
    device = scheduler.resumable(tokens, salt)
    return _Reusable(device, scheduler.fetchable(tokens, salt, device, chains))
