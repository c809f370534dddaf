"""Which of several replicas a request goes to: the one that has the least to compute before it can answer.

The rule is that of routers (`serving.core.placing`). What routers are told by events is here asked of each prefix
index itself, and so it is neither late nor of another block size. What tiers below the devices hold, all replicas can
have: it costs each the same, so whoever has a state on its device is preferred to those who would have to fetch it.
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
"""Of computing a token, what fetching it counts for. No less than this, or a lone conversation would be fetched by each
replica in turn: what one has had beyond its share counts so much."""


class Placing:
    """Keeps count of what each replica has been given. Any thread may use it.

    Args:
        engines: the replicas.
        clock: seconds.
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
    ) -> Given:
        """Choose a replica for a prompt, and count it as given to it. All choices of a request go to the same one.

        Replicas that are held (asleep, or without weights) are passed over while others are not.

        Args:
            tokens: the prompt's.
            params: of the request. One for log-probabilities of the prompt computes all of it.
            salt: of the cache.
            without: not these replicas.
        """
        reuses = params is None or params.prompt_logprobs is None
        choices = 1 if params is None else params.n
        # Outside of the lock: long prompts take a while to look up.
        chains: dict[Scope, Chain] = {}
        found = [_found(engine, tokens, salt, chains) if reuses else _Found(0, 0) for engine in self._engines]
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
        return Given(self, best, missing[best], choices)

    def any_open(self, without: Collection[int]) -> bool:
        """Whether there is another replica that is not held. How long a held one would keep a request, nobody knows."""
        return any(not engine.control.held for i, engine in enumerate(self._engines) if i not in without)

    def computed(self, given: Given) -> None:
        """A replica has computed a prompt that it was given, or will not."""
        with self._lock:  # two threads may say so
            self._work[given.replica].computed(given.missing)
            given.missing = 0

    def ended(self, given: Given) -> None:
        """A replica is done with a request."""
        self.computed(given)
        with self._lock:
            self._choices[given.replica] -= given.choices


class Given:
    """A request at its replica, until it has ended."""

    def __init__(self, placing: Placing, replica: int, missing: int, choices: int) -> None:
        self._placing, self.replica, self.missing, self.choices = placing, replica, missing, choices

    def computed(self) -> None:
        """Its prompt has been computed."""
        self._placing.computed(self)

    def ended(self) -> None:
        """The replica is done with it. To be called once."""
        self._placing.ended(self)


class _Found(NamedTuple):
    """Tokens of a prompt that need not be computed."""

    device: int
    """With what the replica's device has."""
    anywhere: int
    """With what it could fetch, too."""


def _found(engine: Engine, tokens: Sequence[int], salt: str | None, chains: dict[Scope, Chain]) -> _Found:
    scheduler = engine.loop.scheduler
    device = scheduler.resumable(tokens, salt)
    return _Found(device, scheduler.fetchable(tokens, salt, device, chains))
