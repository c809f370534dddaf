"""The parts of the prefix index: nodes, their checkpoints, and search results."""

import hashlib
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

NO_TAIL: tuple[int, ...] = ()


class Scope(NamedTuple):
    """Which requests may find a prefix: those with the same salt and adapter, while the weights that computed it stay.

    `Cache.scope` makes the scopes of an engine's requests.
    """

    salt: str | None
    """The request's own; on a server that separates its clients, made by `client_salt`."""
    weights: int = 0
    """How often the weights had been replaced by then."""
    lineage: int = 0
    """Of replicas, which weights these are: how often says it of one engine alone. 0: those that all began with."""
    adapter: str | None = None
    """Digest of the adapter's content, independent of its name; None without an adapter."""


def client_salt(salt: str | None, key: str) -> str:
    """The salt of a request whose prefixes are found only by requests with the same API key.

    The key's hash has a fixed length and comes first, so no salt that a client chooses gives another client's.
    """
    owner = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache owner").hexdigest()
    return owner if salt is None else f"{owner}:{salt}"


class CheckpointKind(IntEnum):
    """The reason for publishing a state, in rising order of value."""

    BOUNDARY = 0
    JUNCTION = 1
    PROMPT_END = 2


class Node:
    """One unit of tokens: a full KV page or, in a model without attention, a state block."""

    __slots__ = (
        "children",
        "depth",
        "digest",
        "key",
        "last_use",
        "link",
        "page",
        "page_stamp",
        "parent",
        "states",
        "tail_lengths",
    )

    def __init__(self, parent: "Node | None", key: tuple[int, ...], page: int, digest: int) -> None:
        self.parent = parent
        self.key = key
        self.page = page
        self.digest = digest
        """Hash of the whole path. It names dropped entries only, and never decides a match."""
        self.link = b""
        """For the tiers below the device: the name of the whole path, once it has been computed."""
        self.depth: int = parent.depth + 1 if parent is not None else 0
        self.children: dict[tuple[int, ...], Node] = {}
        self.states: dict[tuple[int, ...], Checkpoint] = {}
        """By tail: the tokens after this node's, fewer than a unit."""
        self.tail_lengths: dict[int, int] = {}
        """How many of `states` have a tail of each length."""
        self.last_use = 0
        self.page_stamp = 0

    def add_state(self, entry: "Checkpoint") -> None:
        """Hang a state here."""
        self.states[entry.tail] = entry
        self.tail_lengths[len(entry.tail)] = self.tail_lengths.get(len(entry.tail), 0) + 1

    def remove_state(self, entry: "Checkpoint") -> None:
        """Take it off again."""
        del self.states[entry.tail]
        length = len(entry.tail)
        self.tail_lengths[length] -= 1
        if not self.tail_lengths[length]:
            del self.tail_lengths[length]

    def longest_state(self, rest: tuple[int, ...]) -> "Checkpoint | None":
        """The deepest state here that `rest`, tokens after this node's, runs through or ends at."""
        for length in sorted(self.tail_lengths, reverse=True):
            if length <= len(rest):
                entry = self.states.get(rest[:length])
                if entry is not None:
                    return entry
        return None

    @property
    def is_leaf(self) -> bool:
        """Whether only states at its very end need its page."""
        return not self.children and not any(self.tail_lengths)


class Root(Node):
    """Where all prefixes of one scope begin."""

    __slots__ = ("scope", "top")

    def __init__(self, scope: Scope) -> None:
        super().__init__(None, NO_TAIL, 0, root_digest(scope))
        self.scope = scope
        self.top = Checkpoint(self, NO_TAIL, 0, 0, 0, CheckpointKind.BOUNDARY)
        """The parent of states without an ancestor. Never published."""


class Checkpoint:
    """A published slot: S(position) of the tokens on the way to `node`, then `tail`."""

    __slots__ = (
        "above",
        "below",
        "hits",
        "kind",
        "last_use",
        "node",
        "page",
        "page_stamp",
        "position",
        "price",
        "rank",
        "slot",
        "stale",
        "stamp",
        "tail",
        "worth",
    )

    def __init__(
        self, node: Node, tail: tuple[int, ...], position: int, slot: int, page: int, kind: CheckpointKind
    ) -> None:
        self.node = node
        self.tail = tail
        self.position = position
        self.slot = slot
        self.page = page
        """The partly filled page that holds the tail; 0 = no tail, or no pages."""
        self.kind = kind
        self.above: Checkpoint | None = None
        """The nearest state above it."""
        self.below: dict[Checkpoint, None] = {}
        """The nearest states below it."""
        self.rank = self.worth = 0
        """By the policy, as of when it was last queued."""
        self.price = 0
        """Its worth, plus the eviction price at the time it was last queued."""
        self.last_use = 0
        self.hits = 0
        self.stale = False
        """It was computed with weights that have been replaced: no request will match it again."""
        self.stamp = 0
        self.page_stamp = 0

    def is_above(self, other: "Checkpoint") -> bool:
        """Whether `other` continues this state's tokens."""
        node, at, tail = other.node, self.node, self.tail
        if node is at:
            return len(other.tail) > len(tail) and other.tail[: len(tail)] == tail
        if node.depth <= at.depth:
            return False
        while node.depth > at.depth + 1:
            assert node.parent is not None
            node = node.parent
        return node.parent is at and node.key[: len(tail)] == tail


@dataclass(slots=True)
class Match:
    """How far a sequence is cached."""

    root: Root | None
    path: list[Node]
    """The nodes whose tokens match, starting at the root's child."""
    entry: Checkpoint | None
    """The deepest state on the path. All pages that it needs are present."""
    matched: int
    """Tokens on the path."""

    @property
    def position(self) -> int:
        """Tokens that need not be computed."""
        return self.entry.position if self.entry is not None else 0


def root_digest(scope: Scope) -> int:
    """The digest of the empty path."""
    return hash(("root", scope))


def nearest_above(node: Node, tail: tuple[int, ...]) -> Checkpoint:
    """The deepest state strictly above the position (node, tail); the root's `top` without one."""
    while True:
        if node.states:
            for length in sorted(node.tail_lengths, reverse=True):
                if length < len(tail) and tail[:length] in node.states:
                    return node.states[tail[:length]]
        if node.parent is None:
            assert isinstance(node, Root)
            return node.top
        tail, node = node.key, node.parent
