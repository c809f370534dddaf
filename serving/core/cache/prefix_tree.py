"""The parts of the prefix index: nodes, their checkpoints, search results, and observers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from serving.core.cache.content import Name, Scope, State, longest_first

NO_TAIL: tuple[int, ...] = ()


class CheckpointKind(IntEnum):
    """The reason for publishing a state, in rising order of value."""

    BOUNDARY = 0
    JUNCTION = 1
    PROMPT_END = 2
    MARK = 3


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """One unit of tokens: a full KV page or, in a model without attention, a state block."""

    parent: "Node | None"
    key: tuple[int, ...]
    page: int
    digest: int
    """Hash of the whole path. It names dropped entries only, and never decides a match."""
    client: str | None = None
    """The client whose request published it."""
    depth: int = field(init=False)
    children: dict[tuple[int, ...], "Node"] = field(init=False, default_factory=dict)
    states: dict[tuple[int, ...], "Checkpoint"] = field(init=False, default_factory=dict)
    """By tail: the tokens after this node's, fewer than a unit."""
    tails: Counter[int] = field(init=False, default_factory=Counter)
    """How many of them have a tail of each length."""
    last_use: int = field(init=False, default=0)
    stale: bool = field(init=False, default=False)
    """It was computed with weights that have been replaced: no request will match it again."""
    page_stamp: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.depth = self.parent.depth + 1 if self.parent is not None else 0

    def longest_state(self, rest: tuple[int, ...], most: int) -> "Checkpoint | None":
        """The deepest state here with at most `most` of the tokens `rest`, which follow this node's."""
        for length in longest_first(self.tails, min(most, len(rest))):
            entry = self.states.get(rest[:length])
            if entry is not None:
                return entry
        return None

    @property
    def is_leaf(self) -> bool:
        """Whether only states at its very end need its page."""
        return not self.children and not any(self.tails)


class Root(Node):
    """Where all prefixes of one scope begin."""

    __slots__ = ("scope", "top")

    def __init__(self, scope: Scope) -> None:
        super().__init__(None, NO_TAIL, 0, root_digest(scope))
        self.scope = scope
        self.top = Checkpoint(self, NO_TAIL, State(b"", b"", 0, 0), (), 0, 0, CheckpointKind.BOUNDARY)
        """The parent of states without an ancestor. Never published."""


@dataclass(slots=True, eq=False, repr=False)
class Checkpoint:
    """A published slot: S(position) of the tokens on the way to `node`, then `tail`."""

    node: Node
    tail: tuple[int, ...]
    state: State
    """Its name in tiers, and in the events for routers."""
    links: Sequence[Name]
    """The links of its chain, which may have grown since: `state.link` and all before, at least."""
    slot: int
    page: int
    """The partly filled page that holds the tail; 0 = no tail, or no pages."""
    kind: CheckpointKind
    client: str | None = None
    """The client whose request published it."""
    position: int = field(init=False)
    above: "Checkpoint | None" = field(init=False, default=None)
    """The nearest state above it."""
    below: dict["Checkpoint", None] = field(init=False, default_factory=dict)
    """The nearest states below it."""
    rank: int = field(init=False, default=0)
    """By the policy, like `worth`, as of when it was last queued."""
    worth: int = field(init=False, default=0)
    price: int = field(init=False, default=0)
    """Its worth, plus the eviction price at the time it was last queued."""
    last_use: int = field(init=False, default=0)
    hits: int = field(init=False, default=0)
    kept_until: float = field(init=False, default=0.0)
    """Until when a mark keeps it (`KeptStates`); 0 without one."""
    stamp: int = field(init=False, default=0)
    page_stamp: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.position = self.state.position

    @property
    def stale(self) -> bool:
        """Whether weights that have been replaced computed it."""
        return self.node.stale

    @property
    def pages(self) -> list[int]:
        """The pages of all its tokens in order, in a model with attention."""
        found, node = [self.page] if self.page else [], self.node
        while node.parent is not None:
            found.append(node.page)
            node = node.parent
        return found[::-1]

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


class IndexObserver:
    """Is told which states can be found. Unless overridden, a method does nothing."""

    def published(self, entry: Checkpoint) -> None:
        """Called when a state and all its pages can be found."""

    def dropping(self, entry: Checkpoint, *, trusted: bool, low_value: bool) -> None:
        """Called before the index drops a state, while its slot and pages are complete.

        `trusted`: the state is right. `low_value`: losing it costs little.
        """

    def cleared(self) -> None:
        """Called when the store is lost, and with it all entries."""

    def outdate(self) -> None:
        """Called after a weight update: no present state will be found."""


def root_digest(scope: Scope) -> int:
    """The digest of the empty path."""
    return hash(("root", scope))


def state_digest(node: Node, tail: tuple[int, ...]) -> int:
    """Names a dropped state, like the digest of a node."""
    return hash((node.digest, tail, "state"))


def nearest_above(node: Node, tail: tuple[int, ...]) -> Checkpoint:
    """The deepest state strictly above the position (node, tail); the root's `top` without one."""
    most = len(tail) - 1
    while True:
        entry = node.longest_state(tail, most) if node.states else None
        if entry is not None:
            return entry
        if node.parent is None:
            assert isinstance(node, Root)
            return node.top
        tail, most, node = node.key, len(node.key) - 1, node.parent
