"""The pools of one store, and the index of their published contents."""

import math
import sys
import time
from collections.abc import Callable

from serving.core.cache.content import Scope
from serving.core.cache.pools import Pool
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import IndexObserver
from serving.core.cache.retention import Clock, KeptStates, RetentionPolicy
from serving.core.config import SchedulerConfig
from serving.core.stats import Stats


class Cache:
    """The cache that all rows share. `index` is None without prefix caching, `pages` is empty without attention.

    `slots_wanted(admitting)`: slots that waiting requests could take at once; `admitting` (0 or 1) of them have one.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        stats: Stats,
        slots_wanted: Callable[[int], int],
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self.config, self.policy, self.stats = config, RetentionPolicy(config), stats
        self._slots_wanted = slots_wanted
        self._observers: list[IndexObserver] = []
        self.width = 1 + config.num_speculative_tokens
        """Slots that a decoding row needs."""
        self.block = config.state_block_size if config.caching else sys.maxsize
        """Tokens between two states that decoding publishes."""
        self.weights = 0
        """How often the model's weights have been replaced."""
        self.lineage = 0
        """By which; see `Scope`."""
        self.slots: Pool
        self.pages: Pool
        self.index: PrefixIndex | None
        self.clear()

    def clear(self) -> None:
        """Resets everything for a new, empty store. Leases of the old store become invalid."""
        config = self.config
        self.slots = Pool("slots", config.num_slots)
        self.pages = Pool("pages", max(config.num_pages, config.context_members), config.context_members)
        unit = config.page_size if config.num_pages else config.state_block_size
        most_tokens = config.num_pages * config.page_size / 2 if config.num_pages else math.inf
        kept = KeptStates(config.max_kept_states, most_tokens, self._clock)
        parts = self.slots, self.pages, self.policy, unit, self.stats, self._observers, kept
        self.index = PrefixIndex(*parts) if config.caching else None
        for observer in self._observers:
            observer.cleared()

    def observe(self, observer: IndexObserver) -> None:
        """Reports every state that requests can find to `observer`: the present ones now, others when published."""
        self._observers.append(observer)
        for entry in self.index.by_worth() if self.index is not None else ():
            observer.published(entry)

    def scope(self, salt: str | None, adapter: str | None = None) -> Scope:
        """Under what a request finds prefixes, and publishes its own, as long as the weights stay as they are.

        `adapter` is the digest of the request's adapter.
        """
        return Scope(salt, self.weights, self.lineage, adapter)

    def outdate(self, lineage: int = 0) -> None:
        """Called after a weight update: invalidates all cached prefixes."""
        before, self.lineage = self.lineage, lineage
        self.weights += 1
        if self.index is not None:
            self.index.outdate(before)
        for observer in self._observers:
            observer.outdate()

    @property
    def pools(self) -> list[Pool]:
        """Slots, and pages if the model has attention."""
        return [self.slots, self.pages] if self.pages else [self.slots]

    def can_spare_slot(self, *, admitting: bool = False) -> bool:
        """Whether a slot may go into a checkpoint: only if those who wait for a row id can have theirs all the same.

        `admitting`: the one that asks is itself still among those who wait.
        """
        return self.slots.available > self._slots_wanted(admitting)
