"""What a checkpoint of the prefix index is called by content. Links are noted at the nodes where blocks end: each is
hashed once."""

from serving.core.cache.prefix_tree import Checkpoint, Node, Root, Scope
from serving.core.tiers.content import Name, State, link, root, state_name
from serving.core.tiers.tier import Unit


def unit_of(entry: Checkpoint, block: int) -> Unit:
    """A checkpoint with all keys and values that it needs."""
    node, tail = _cut(entry, block)
    links = [_link(node, block)]
    while not isinstance(node, Root):
        node = _block_before(node, block)
        links.append(_link(node, block))
    links.reverse()
    return Unit(state_name(links[-1], tail), tuple(links), len(tail), entry.position, entry.kind)


def state_of(entry: Checkpoint, block: int) -> State:
    """The same in short; takes no longer for a deep one whose blocks have been named before."""
    node, tail = _cut(entry, block)
    last = _link(node, block)
    return State(state_name(last, tail), last, len(tail), entry.position)


def scope_of(entry: Checkpoint) -> Scope:
    """The scope of the sequence."""
    node = entry.node
    while not isinstance(node, Root):
        assert node.parent is not None
        node = node.parent
    return node.scope


def _cut(entry: Checkpoint, block: int) -> tuple[Node, list[int]]:
    """The node at which the last whole block ends, and the tokens after that."""
    node: Node = entry.node
    tail = list(entry.tail)
    begin = entry.position - len(tail)
    while begin % block:
        tail[:0] = node.key
        begin -= len(node.key)
        assert node.parent is not None
        node = node.parent
    return node, tail


def _block_before(node: Node, block: int) -> Node:
    """From the end of one block to the end of the one before it."""
    left = block
    while left:
        left -= len(node.key)
        assert node.parent is not None
        node = node.parent
    return node


def _link(node: Node, block: int) -> Name:
    """The name of the path to a node at which a block ends."""
    unnamed: list[Node] = []
    while not node.link and not isinstance(node, Root):
        unnamed.append(node)
        node = _block_before(node, block)
    if isinstance(node, Root) and not node.link:
        node.link = root(node.scope)
    name = node.link
    for end in reversed(unnamed):
        name = end.link = link(name, _tokens(end, block))
    return name


def _tokens(node: Node, block: int) -> list[int]:
    """Those of the block that ends at a node."""
    tokens: list[int] = []
    while len(tokens) < block:
        tokens[:0] = node.key
        assert node.parent is not None
        node = node.parent
    return tokens
