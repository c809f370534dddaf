"""The prefix cache: a trie of full pages keyed by their tokens, with states at positions.

A node is `unit` tokens below its parent: a KV page or, for a model without attention, a state block. Keys are the token
tuples themselves, so that tokens and never a hash alone decide a match. Each scope has its own root: no request can
find, or detect by timing, states of another salt, or continue from states of other weights.

A state belongs to a node and a tail: the tokens after the node's that do not fill a unit (none for a multiple of B).
With attention, a state with a tail has its own page for them; a request that continues from it copies that page first.

Invariants: a node's page exists as long as the node. Rows reference whole paths from the root, so that every cached
page can be evicted, leaves first. A state is evicted together with any page that it needs.
"""

from collections.abc import Mapping, Sequence

from serving.core.cache.content import Scope, count_down
from serving.core.cache.eviction_queue import EvictionQueue, in_turn
from serving.core.cache.pools import Pool
from serving.core.cache.prefix_tree import (
    NO_TAIL,
    Checkpoint,
    CheckpointKind,
    IndexObserver,
    Match,
    Node,
    Root,
    nearest_above,
    root_digest,
    state_digest,
)
from serving.core.cache.retention import EvictionRank, KeptStates, Mark, RetentionPolicy
from serving.core.cache.row_pages import Content
from serving.core.errors import MissReason
from serving.core.stats import Stats

_GHOSTS = 16_384
"""Number of evicted prefixes that are remembered, so that a miss can be explained by an eviction."""


class PrefixIndex:
    """The trie, and the choice of the entry to evict when a pool is empty. `pages`: empty without attention."""

    def __init__(
        self,
        slots: Pool,
        pages: Pool,
        policy: RetentionPolicy,
        unit: int,
        stats: Stats,
        observers: Sequence[IndexObserver],
        kept: KeptStates,
    ) -> None:
        self.slots, self.pages, self.policy, self.unit, self.stats = slots, pages, policy, unit, stats
        self.observers, self._kept = observers, kept
        self.roots: dict[Scope, Root] = {}
        self._clock = 0
        self._level = 0
        """The highest price of an evicted state so far."""
        self._ghosts: dict[int, None] = {}
        self._lineage_before = 0
        """Lineages of earlier weights."""
        self._idle_states: EvictionQueue[Checkpoint] = EvictionQueue(self._state_stamp, kept.clock)
        self._idle_pages: EvictionQueue[Node | Checkpoint] = EvictionQueue(self._page_stamp, kept.clock)
        slots.reclaim = lambda low: self.evict_state(EvictionRank.INTERIOR if low else EvictionRank.KEPT)
        slots.on_cached, slots.hold = self._slot_idle, self._idle_states.hold
        slots.drop = self.drop_state
        pages.reclaim = lambda low: self.evict_page()
        pages.on_cached, pages.hold = self._page_idle, self._idle_pages.hold
        pages.drop = self.drop_state

    # -- lookup --

    def find(self, tokens: Sequence[int], scope: Scope) -> Match:
        """Returns the deepest point where a state and, with attention, all pages up to it are cached."""
        root = self.roots.get(scope)
        if root is None:
            return Match([], None, 0)
        unit = self.unit
        node: Node = root
        path: list[Node] = []
        for at in range(0, len(tokens) - unit + 1, unit):
            child = node.children.get(tuple(tokens[at : at + unit]))
            if child is None:
                break
            path.append(child)
            node = child
        for node in [*reversed(path), root]:
            if node.states:
                at = node.depth * unit
                entry = node.longest_state(tuple(tokens[at : at + unit - 1]), unit)
                if entry is not None:
                    return Match(path, entry, len(path) * unit)
        return Match(path, None, len(path) * unit)

    def why_missed(self, tokens: Sequence[int], scope: Scope, match: Match) -> MissReason:
        """Returns the reason why a match has no state."""
        unit, ghosts = self.unit, self._ghosts
        if any(state_digest(node, NO_TAIL) in ghosts for node in match.path):
            return MissReason.STATE_EVICTED if self.pages else MissReason.EVICTED
        # A root is removed with its last entry, but its name is known.
        last = match.path[-1].digest if match.path else root_digest(scope)
        rest = tuple(tokens[match.matched : match.matched + unit])
        if (len(rest) == unit and hash((last, rest)) in ghosts) or any(
            hash((last, rest[:length], "state")) in ghosts for length in range(1, min(len(rest) + 1, unit))
        ):
            return MissReason.EVICTED
        if self.find(tokens, scope._replace(weights=scope.weights - 1, lineage=self._lineage_before)).entry is not None:
            return MissReason.WEIGHTS_CHANGED
        if scope.salt is not None and self.find(tokens, scope._replace(salt=None)).entry is not None:
            # Compare only with the unsalted cache, which every client can probe; do not reveal entries of other salts.
            return MissReason.SALT_DIFFERS
        if match.path or len(tokens) < self.policy.block:
            return MissReason.TOO_SHORT
        return MissReason.NOT_FOUND

    # -- publishing --

    def publish_pages(self, content: Content, position: int) -> Node:
        """Publishes a sequence's full pages below `position`. Returns the node of S(position).

        If an equal page was published before, the row uses that page and releases its own. So rows always reference
        whole paths, and equal prefixes are stored once.
        """
        tokens, chain, row = content
        unit, pages, count = self.unit, self.pages, position // self.unit
        node: Node = row.node or self.roots.get(chain.scope) or self.roots.setdefault(chain.scope, Root(chain.scope))
        for i in range(row.num_published, count):
            key = tuple(tokens[i * unit : (i + 1) * unit])
            child = node.children.get(key)
            if child is None:
                child = Node(node, key, 0, hash((node.digest, key)), chain.client)
                node.children[key] = child
                self._ghosts.pop(child.digest, None)
                if pages:
                    child.page = row.table[i]
                    pages.publish(child.page, child)
                    self.stats.pages_published += 1
            elif pages and child.page != row.table[i]:
                row.exchange(i, child.page)
            node = child
        if pages and count > row.num_published:
            # Without pages a row references no path, which may be pruned, so the walk starts from the root each time.
            row.node, row.num_published = node, count
        while node.depth > count:
            assert node.parent is not None
            node = node.parent
        return node

    def state_at(self, content: Content, position: int) -> Checkpoint | None:
        """Returns the published state S(position) of a sequence; None if there is none."""
        match = self.find(content.tokens[:position], content.chain.scope)
        return match.entry if match.position == position else None

    def publish_state(self, content: Content, position: int, slot: int, kind: CheckpointKind) -> bool:
        """Publishes S(position) of a sequence. Returns False, and changes nothing, if an equal state exists.

        The page of a tail is then shared: the row copies it before it writes again.
        """
        node = self.publish_pages(content, position)
        tail = tuple(content.tokens[node.depth * self.unit : position])
        known = node.states.get(tail)
        if known is not None:
            known.kind = max(known.kind, kind)
            self._rank_again(known)
            return False
        page = content.pages.table[node.depth] if tail and self.pages else 0
        state = content.chain.state(content.tokens, position)
        entry = Checkpoint(node, tail, state, content.chain.links, slot, page, kind, content.chain.client)
        above = nearest_above(node, tail)
        if node.children or node.states:
            for lower in [lower for lower in above.below if entry.is_above(lower)]:
                del above.below[lower]
                entry.below[lower] = None
                lower.above = entry
                self._rank_again(lower)
        node.states[tail] = entry
        node.tails[len(tail)] += 1
        entry.above = above
        above.below[entry] = None
        entry.last_use = self._tick()
        self._rank_again(above)
        self.slots.publish(slot, entry)
        if page:
            self.pages.publish(page, entry)
            content.pages.shared = node.depth
        self._ghosts.pop(state_digest(node, tail), None)
        self.stats.states_published += 1
        for observer in self.observers:
            observer.published(entry)
        return True

    # -- eviction --

    def evict_state(self, max_rank: EvictionRank = EvictionRank.KEPT) -> bool:
        """Evicts the first idle state in order. Returns False without an idle state of at most this rank."""
        self._queue_again(self._kept.ended())
        entry = self._idle_states.pop(max_rank)
        if entry is None:
            return False
        if entry.rank == EvictionRank.VALUABLE:
            self._level = max(self._level, entry.price)
        self.drop_state(entry)
        return True

    def evict_page(self) -> bool:
        """Evicts the first idle page in order that has no descendants. Returns False if no page qualifies."""
        self._queue_again(self._kept.ended())
        owner = self._idle_pages.pop()
        if owner is None:
            return False
        if isinstance(owner, Checkpoint):
            self.drop_state(owner)
        else:
            self._drop_node(owner)
        return True

    def drop_state(self, entry: Checkpoint, *, trusted: bool = True) -> None:
        """Removes a state and its tail's page from the index. Rows that use them keep their references."""
        for observer in self.observers:
            observer.dropping(entry, trusted=trusted, low_value=self.policy.rank(entry) == EvictionRank.INTERIOR)
        kept, node, above = self._kept.forget(entry), entry.node, entry.above
        assert above is not None
        del node.states[entry.tail]
        count_down(node.tails, len(entry.tail))
        del above.below[entry]
        for lower in entry.below:
            lower.above = above
            above.below[lower] = None
            self._rank_again(lower)
        entry.below = {}
        self._rank_again(above)
        self._remember(state_digest(node, entry.tail))
        self.stats.states_evicted += 1
        self.slots.unpublish(entry.slot)
        if entry.page:
            self.pages.unpublish(entry.page)
        if not self.pages or entry.page or kept:
            self._leaf_again(node)

    def forget(self, tokens: Sequence[int] | None = None, scope: Scope | None = None) -> None:
        """Removes all states of a scope (None: of all), and the pages that no row uses; with `tokens`, only those that
        begin with the first unit of these, or less: an error in one of them may have propagated to those below it.

        They are not copied to tiers below the device.
        """
        scopes = list(self.roots) if scope is None else [scope] if scope in self.roots else []
        for root in [self.roots[each] for each in scopes]:
            for entry in list(root.states.values()):
                if tokens is None or entry.tail == tuple(tokens[: len(entry.tail)]):
                    self.drop_state(entry, trusted=False)
            below = [node for key, node in root.children.items() if tokens is None or key == tuple(tokens[: self.unit])]
            for node in below:
                below += node.children.values()
            for node in reversed(below):
                for entry in list(node.states.values()):
                    self.drop_state(entry, trusted=False)
                if self.pages and not node.children and not self.pages.refs[node.page]:
                    self._drop_node(node)

    def by_worth(self) -> list[Checkpoint]:
        """Returns all states, those of clients in turn: of each, in reverse order of eviction."""
        found = [entry for entry in self.slots.owners if entry is not None]
        found.sort(key=lambda entry: (self.policy.rank(entry), entry.price, entry.last_use), reverse=True)
        return in_turn(found)

    def outdate(self, lineage: int = 0) -> None:
        """Marks all states and pages as stale after a weight update: they are evicted before all later ones.

        `lineage`: of the weights before the update.
        """
        self._lineage_before = lineage
        nodes: list[Node] = list(self.roots.values())
        for node in nodes:
            nodes += node.children.values()
            node.stale = True
            for entry in node.states.values():
                self._kept.forget(entry)
            self._queue_again([*node.states.values()])
            self._queue_page(node)

    def _drop_node(self, node: Node) -> None:
        for entry in list(node.states.values()):
            self.drop_state(entry)
        parent = node.parent
        assert parent is not None
        del parent.children[node.key]
        self._remember(node.digest)
        self.stats.pages_evicted += 1
        self.pages.unpublish(node.page)
        self._leaf_again(parent)

    def _leaf_again(self, node: Node) -> None:
        """Updates a node whose state or child was removed: its page may now be evictable.

        In a model without pages, removes the nodes up to the root that have no states at or below them.
        """
        while not self.pages and node.parent is not None and not node.states and not node.children:
            del node.parent.children[node.key]
            self._remember(node.digest)
            node = node.parent
        if not isinstance(node, Root):
            self._queue_page(node)
        elif not node.states and not node.children and self.roots.get(node.scope) is node:
            del self.roots[node.scope]

    def _remember(self, digest: int) -> None:
        self._ghosts[digest] = None
        if len(self._ghosts) > _GHOSTS:
            del self._ghosts[next(iter(self._ghosts))]

    # -- order of eviction: see `EvictionQueue` and `RetentionPolicy` --

    def check(self) -> None:
        """Raises `AssertionError` unless what each client holds is counted."""
        self._idle_states.check(self.slots.owners)
        self._idle_pages.check(self.pages.owners)

    def keep(self, marks: Mapping[int, Mark], client: str | None, entry: Checkpoint | None) -> None:
        """Keeps the states at marks, by position, of a client's request: `entry` and those above, unless dropped."""
        while entry is not None and marks:
            mark = marks.get(entry.position)
            if mark is not None and mark.ttl is not None and self.slots.owners[entry.slot] is entry:
                self._queue_again([entry, *self._kept.keep(entry, mark.ttl, client)])
            entry = entry.above

    def _queue_again(self, entries: Sequence[Checkpoint]) -> None:
        """Updates the places of states and of their last pages, after marks have begun or ceased to keep them."""
        for entry in entries:
            self._rank_again(entry)
            self._queue_page(entry if entry.page else entry.node)

    def touch(self, entry: Checkpoint) -> None:
        """Records that an admitted request reads this state."""
        entry.hits += 1
        entry.last_use = self._tick()

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _rank_again(self, entry: Checkpoint) -> None:
        """Updates an entry's place in the eviction queue after a change of its neighbors or its kind."""
        if len(entry.below) > 1:
            # Sequences have diverged here, and later ones may do so again, even after these are evicted.
            entry.kind = max(entry.kind, CheckpointKind.JUNCTION)
        rank, worth = self.policy.rank(entry), self.policy.worth(entry)
        if (rank, worth) != (entry.rank, entry.worth) and self._state_stamp(entry):
            self._queue_state(entry)

    def _queue_state(self, entry: Checkpoint) -> None:
        entry.rank, entry.worth = self.policy.rank(entry), self.policy.worth(entry)
        entry.price = self._level + entry.worth
        entry.stamp = self._idle_states.push(entry.client, (entry.rank, entry.price, entry.last_use), entry)

    def _slot_idle(self, entry: Checkpoint) -> None:
        entry.last_use = self._tick()
        self._idle_states.use(entry.client)
        self._queue_state(entry)

    def _page_idle(self, owner: Node | Checkpoint) -> None:
        owner.last_use = self._tick()
        self._idle_pages.use(owner.client)
        self._queue_page(owner)

    def _queue_page(self, owner: Node | Checkpoint) -> None:
        """Queues a page for eviction, if it is idle and no other needs it. Those of kept states are evicted last."""
        states = [owner] if isinstance(owner, Checkpoint) else [*owner.states.values()]
        if self._page_stamp(owner) is None:
            return
        kept = any(entry.kept_until for entry in states)
        rank = EvictionRank.STALE if owner.stale else EvictionRank.KEPT if kept else EvictionRank.VALUABLE
        owner.page_stamp = self._idle_pages.push(owner.client, (rank, owner.last_use), owner)

    def _state_stamp(self, entry: Checkpoint) -> int | None:
        return entry.stamp if self.slots.owners[entry.slot] is entry and not self.slots.refs[entry.slot] else None

    def _page_stamp(self, owner: Node | Checkpoint) -> int | None:
        if self.pages.refs[owner.page] or self.pages.owners[owner.page] is not owner:
            return None
        return owner.page_stamp if isinstance(owner, Checkpoint) or owner.is_leaf else None
