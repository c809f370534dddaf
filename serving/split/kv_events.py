"""vLLM's KV events over ZeroMQ, for routers of other projects: which prefixes a server can continue from.

Only blocks that lead to a state are reported, because no request can continue from keys and values without one: readers
that count blocks then choose the server with the deepest state. A block is stored once in each tier, and removed with
the last state that needs it. Token ids are sent unencrypted.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from mamba_jax.version import install_advice
from serving.core.cache.content import Name, Scope, State
from serving.core.cache.prefix_tree import Checkpoint, Root
from serving.core.tiers.journal import Journal
from serving.settings import ConfigError
from serving.split.settings import KvEventsSettings

log = logging.getLogger(__name__)

_LOOK = 0.05  # seconds between two batches
_RECONNECTION = 1.0  # seconds before the first batch, in which readers connect again after a restart
_ANSWER_INTERVAL = 0.5  # seconds between two replays, each of which copies what is present
_BEAT = 5.0  # seconds without changes after which an empty batch shows readers what they missed
_REPLAYS = 4  # answers that may wait for a reader; one that does not read loses the rest
_MOST_ASKED = 1 << 10  # bytes of a reader's message
_MOST_CHANGES = 1 << 14  # that may wait to be sent; with more, readers begin anew
_END = (-1).to_bytes(8, "big", signed=True)
_STATES = 1
_KINDS = ("full_attention", "mamba")  # by group: the blocks that lead to states, and those that states end in
_MEDIA = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}


Event = dict[str, Any]


@dataclass(slots=True)
class _Block:
    parent: Name
    tokens: list[int]
    scope: Scope


class KvJournal(Journal):
    """A journal that also counts the blocks that lead to present states, by tier. Their tokens are kept with them.

    Args:
        block: tokens of a block.
        name_of: returns the name of an adapter by its digest.
        salts: events have the field `cache_salt`.
    """

    def __init__(
        self, block: int, name_of: Callable[[str], str | None] = lambda digest: None, *, salts: bool = False
    ) -> None:
        super().__init__(block)
        self._name_of, self._salts = name_of, salts
        self._blocks: dict[Name, _Block] = {}
        self._uses: dict[str, dict[Name, int]] = {}
        """By tier: the states that end in a block, and the present blocks that follow it."""
        self._counted: set[tuple[str, Name]] = set()
        self._ends: dict[str, dict[Name, int]] = {}
        """By tier and block: the states that end in it."""
        self._entry: Checkpoint | None = None  # that is being published
        self._loose: list[Name] = []  # blocks that a tier has lost: their tokens may not be needed any more
        self._changes: list[Event] | None = []  # None: too many, so that readers must begin anew

    # -- the engine's thread --

    def published(self, entry: Checkpoint) -> None:
        self._entry = entry
        super().published(entry)
        self._entry = None

    def outdate(self) -> None:
        super().outdate()
        with self._lock:
            self._blocks.clear()
            self._uses.clear()
            self._ends.clear()
            self._counted.clear()
            self._changes = [{"type": "AllBlocksCleared"}]

    def lost(self, tier: str) -> None:
        with self._lock:
            gone = [*self._uses.pop(tier, {})]
            self._counted = {each for each in self._counted if each[0] != tier}
            self._add(self._removed(tier, [*self._ends.pop(tier, {})], _STATES))
            self._add(self._removed(tier, gone))
        super().lost(tier)

    def _learn(self, entry: Checkpoint) -> None:
        """Keeps the tokens of blocks that no present state needed. Walks no further up than these blocks reach."""
        last = entry.position // self.block
        links = entry.links[: last + 1]
        first = next((at for at in range(last, 0, -1) if links[at] in self._blocks), 0)
        if first == last:
            return
        left, node, pieces = entry.position - first * self.block - len(entry.tail), entry.node, [entry.tail]
        while left > 0:
            pieces.append(node.key)
            left -= len(node.key)
            assert node.parent is not None
            node = node.parent
        tokens = [token for piece in reversed(pieces) for token in piece][-left:]
        scope = self._blocks[links[first]].scope if first else cast(Root, node).scope
        for at in range(first, last):
            begin = (at - first) * self.block
            self._blocks[links[at + 1]] = _Block(links[at], tokens[begin : begin + self.block], scope)

    def _tell(self, tier: str, state: State, stored: bool) -> None:
        super()._tell(tier, state, stored)
        uses, key, link = self._uses.setdefault(tier, {}), (tier, state.name), state.link
        changed: list[Name] = []
        ends = self._ends.setdefault(tier, {})
        if stored and self._entry is not None:
            self._learn(self._entry)
        if stored and link in self._blocks:
            self._counted.add(key)
            while link in self._blocks:
                uses[link] = uses.get(link, 0) + 1
                if uses[link] > 1:
                    break
                changed.append(link)
                link = self._blocks[link].parent
            self._add(self._stored(tier, changed[::-1], self._blocks))
            ends[state.link] = ends.get(state.link, 0) + 1
            if ends[state.link] == 1:
                self._add(self._stored(tier, [state.link], self._blocks, _STATES))
        elif not stored and key in self._counted:
            self._counted.discard(key)
            ends[link] -= 1
            if not ends[link]:
                del ends[link]
                self._add(self._removed(tier, [link], _STATES))
            while link in uses:
                uses[link] -= 1
                if uses[link]:
                    break
                del uses[link]
                changed.append(link)
                link = self._blocks[link].parent
            self._add(self._removed(tier, changed))

    def _add(self, change: Event | None) -> None:
        if change is not None and self._changes is not None:
            self._changes.append(change)
            if len(self._changes) > _MOST_CHANGES:
                self._changes = None

    # -- the publisher's thread --

    def take(self) -> list[Event]:
        """Returns the events since the last call, and drops tokens of blocks that are nowhere any more."""
        with self._lock:
            changes, self._changes = self._changes, []
            for link in self._loose:
                if not any(link in uses for uses in self._uses.values()):
                    self._blocks.pop(link, None)
            self._loose = []
            if changes is not None:
                return changes
            present = self._copied()
        return [{"type": "AllBlocksCleared"}, *self._described(*present)]

    def begin_anew(self) -> None:
        """Has the next `take` clear what readers know, and describe all present blocks."""
        with self._lock:
            self._changes = None

    def present(self) -> list[Event]:
        """Returns events that describe all present blocks."""
        with self._lock:
            present = self._copied()
        return self._described(*present)

    def _copied(self) -> tuple[dict[str, tuple[list[Name], list[Name]]], dict[Name, _Block]]:
        return {tier: ([*uses], [*self._ends[tier]]) for tier, uses in self._uses.items()}, dict(self._blocks)

    def _described(self, links: dict[str, tuple[list[Name], list[Name]]], blocks: dict[Name, _Block]) -> list[Event]:
        events: list[Event | None] = []
        for tier, (present, ends) in links.items():
            left = dict.fromkeys(present)
            for link in present:
                path = []
                while link in left:
                    path.append(link)
                    del left[link]
                    link = blocks[link].parent
                events.append(self._stored(tier, path[::-1], blocks))
            events += [self._stored(tier, [link], blocks, _STATES) for link in ends]
        return [event for event in events if event is not None]

    def _stored(self, tier: str, links: list[Name], blocks: dict[Name, _Block], group: int = 0) -> Event | None:
        """Returns the event for blocks that follow each other."""
        if not links:
            return None
        first = blocks[links[0]]
        adapter, salt = first.scope.adapter, first.scope.salt
        return {
            "type": "BlockStored",
            "block_hashes": [_hash(link) for link in links],
            "parent_block_hash": _hash(first.parent) if first.parent in blocks else None,
            "token_ids": [token for link in links for token in blocks[link].tokens],
            "block_size": self.block,
            "lora_id": None,
            "lora_name": None if adapter is None else self._name_of(adapter) or adapter,
            "medium": _MEDIA[tier],
            "extra_keys": None if salt is None else [[salt] for _ in links],
            "group_idx": group,
            "kv_cache_spec_kind": _KINDS[group],
        } | ({"cache_salt": salt} if self._salts and salt is not None else {})

    def _removed(self, tier: str, links: list[Name], group: int = 0) -> Event | None:
        self._loose += links
        hashes = [_hash(link) for link in links]
        removed = {"type": "BlockRemoved", "block_hashes": hashes, "medium": _MEDIA[tier], "group_idx": group}
        return removed if links else None


def _hash(link: Name) -> int:
    """Equal on all workers, and positive in 64 bits."""
    return int.from_bytes(link[:8], "big") >> 1


def check_installed() -> None:
    """Raises ConfigError if a package of the extra is not installed."""
    for name in ("zmq", "msgspec"):
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"kv_events_config: {name} is not installed: {install_advice('events')}")


class KvPublisher:
    """Sends a journal's events, in a thread of its own.

    Raises:
        ConfigError: an endpoint cannot be bound.
    """

    def __init__(self, journal: KvJournal, settings: KvEventsSettings) -> None:
        import msgspec
        import zmq

        self._journal, self._topic, self._number = journal, settings.topic.encode(), 0
        self._encode: Callable[[Any], bytes] = msgspec.msgpack.encode
        self._again: type[Exception] = zmq.Again
        self._events, self._replays = zmq.Context.instance().socket(zmq.PUB), zmq.Context.instance().socket(zmq.ROUTER)
        self._events.set_hwm(settings.hwm)
        self._replays.set_hwm(_REPLAYS)
        for bound, endpoint in ((self._events, settings.endpoint), (self._replays, settings.replay_endpoint)):
            bound.setsockopt(zmq.LINGER, 0)
            bound.setsockopt(zmq.MAXMSGSIZE, _MOST_ASKED)
            try:
                if endpoint is not None:
                    bound.bind(endpoint)
            except zmq.ZMQError as error:
                if bound is self._events and error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
                    bound.connect(endpoint)  # as vLLM does: a router listens there
                    continue
                raise ConfigError(f"kv_events_config: cannot listen at {endpoint}: {error}") from None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._over.set()
        self._thread.join()
        self._events.close()
        self._replays.close()

    def _run(self) -> None:
        last_sent = last_answered = 0.0
        self._over.wait(_RECONNECTION)
        self._journal.begin_anew()  # readers forget what an earlier process at this endpoint had
        while not self._over.wait(_LOOK):
            now = time.monotonic()
            try:
                events = self._journal.take()
                if events or now - last_sent > _BEAT:
                    last_sent = now
                    self._events.send_multipart((self._topic, self._number.to_bytes(8, "big"), self._batch(events)))
                    self._number += 1
                if now - last_answered > _ANSWER_INTERVAL and self._answer():
                    last_answered = now
            except Exception:
                log.exception("KV events were not sent; readers begin anew")
                self._journal.begin_anew()

    def _answer(self) -> bool:
        """Answers a reader that missed events with one batch: none of what it knows, then everything that is present.
        Returns whether one had asked."""
        try:
            asked = self._replays.recv_multipart(1)  # zmq.NOBLOCK
        except self._again:
            return False
        if len(asked) == 3 and self._number:
            before = (self._number - 1).to_bytes(8, "big")
            everything = self._batch([{"type": "AllBlocksCleared"}, *self._journal.present()])
            self._replays.send_multipart((asked[0], b"", self._topic, before, everything))
        self._replays.send_multipart((asked[0], b"", b"", _END, b""))
        return True

    def _batch(self, events: list[Event]) -> bytes:
        return self._encode([time.time(), events, 0])
