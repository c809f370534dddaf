"""Names by content: the same prefix of tokens has the same name in every engine, tier and process.

A chain has one link for each whole block of B tokens, a hash of the link before it and of the block's tokens; it begins
with the scope's. The state after some tokens is named by the last link before it and by the tokens that follow that. So
two processes that agree on B give equal tokens equal names, and different tokens different names: links are 160 bits of
BLAKE2b (RFC 7693), for which finding a collision is infeasible.
"""

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")
Name = bytes
SIZE = 20
"""Bytes of a name."""


class State(NamedTuple):
    """A state by content: all that a process with the tokens needs to look it up."""

    name: Name
    link: Name
    """The chain's last link before it."""
    tail: int
    """Tokens after that."""
    position: int
    """Number of all its tokens."""


class Scope(NamedTuple):
    """Which requests may find a prefix: those with the same salt and adapter, while the weights that computed it stay.

    `Cache.scope` makes the scopes of an engine's requests.
    """

    salt: str | None
    """The request's own; on a server that separates its clients, made by `client_salt`."""
    weights: int = 0
    """How often the weights had been replaced by then."""
    lineage: int = 0
    """Identifies the weights across replicas, where numbers of updates may differ. 0 = those of the start."""
    adapter: str | None = None
    """Digest of the adapter's content, independent of its name; None without an adapter."""


def client_salt(salt: str | None, key: str) -> str:
    """The salt of a request whose prefixes are found only by requests with the same API key.

    The key's hash has a fixed length and comes first, so no salt that a client chooses gives another client's.
    """
    owner = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=16, person=b"cache owner").hexdigest()
    return owner if salt is None else f"{owner}:{salt}"


def root(scope: Scope) -> Name:
    """The link that all sequences of one scope begin with.

    How often weights were replaced, and by which, means something in this process alone, so no other one may see such
    names.
    """
    salt, weights, lineage, adapter = scope
    which = [weights, lineage] if lineage else [weights]
    salted = _hash(b"root", b"" if salt is None else b"s" + salt.encode("utf-8", "surrogatepass"), which)
    # Hashed apart, so that no salt gives the name of an adapter's states.
    return salted if adapter is None else _hash(b"adapter", salted + adapter.encode(), ())


def link(before: Name, block: Sequence[int]) -> Name:
    """The link after one more block of tokens; it names the block's keys and values, too."""
    return _hash(b"link", before, block)


def state_name(last: Name, tail: Sequence[int]) -> Name:
    """The name of the state after the tokens up to a link, then `tail`: fewer than B tokens."""
    return _hash(b"state", last, tail)


def _hash(kind: bytes, before: bytes, tokens: Sequence[int]) -> Name:
    found = hashlib.blake2b(before, digest_size=SIZE, person=kind)
    found.update(array("q", tokens).tobytes())
    return found.digest()


class Chain:
    """The names of one growing sequence's prefixes. Each block is hashed once."""

    __slots__ = ("block", "client", "links", "scope")

    def __init__(self, scope: Scope, block: int, client: str | None = None) -> None:
        """`client`: the one for which entries of the sequence count in stores."""
        self.scope, self.block, self.client = scope, block, client
        self.links = [root(scope)]
        """The scope's, then one for each whole block."""

    def reach(self, tokens: Sequence[int], end: int | None = None) -> list[Name]:
        """Returns at least the links of the first `end` tokens (None: of all). Earlier links do not change."""
        links, block = self.links, self.block
        end = len(tokens) if end is None else end
        for at in range((len(links) - 1) * block, end - block + 1, block):
            links.append(link(links[-1], tokens[at : at + block]))
        return links

    def state(self, tokens: Sequence[int], position: int) -> State:
        """Returns the name of S(position)."""
        begin = position - position % self.block
        last = self.reach(tokens, position)[begin // self.block]
        return State(state_name(last, tokens[begin:position]), last, position - begin, position)


def count_down(counts: Counter[T], key: T) -> None:
    """Counts one fewer of a key, which must have been counted. A key without any is removed."""
    counts[key] -= 1
    assert counts[key] >= 0, f"{key} is counted less often than it was added"
    if not counts[key]:
        del counts[key]


def longest_first(lengths: Iterable[int], most: int) -> list[int]:
    """Returns the lengths up to a maximum, the longest first."""
    return sorted((length for length in lengths if length <= most), reverse=True)


class NamedStates:
    """A set of states by content, in which the states of a sequence's prefixes are found."""

    def __init__(self) -> None:
        self._tails: defaultdict[Name, Counter[int]] = defaultdict(Counter)
        """By a state's last link: how many states have a tail of each length. Searches try these lengths only."""

    def add(self, state: State) -> None:
        """Adds a state."""
        self._tails[state.link][state.tail] += 1

    def remove(self, state: State) -> None:
        """Removes a state."""
        tails = self._tails[state.link]
        count_down(tails, state.tail)
        if not tails:
            del self._tails[state.link]

    def candidates(self, chain: Chain, tokens: Sequence[int], beyond: int = 0) -> Iterator[State]:
        """Yields states of prefixes of these tokens that the set may have, the longest first, with more than `beyond`
        tokens."""
        links, block = chain.reach(tokens), chain.block
        for at in range(len(tokens) // block, beyond // block - 1, -1):
            begin = at * block
            for tail in longest_first(self._tails.get(links[at], ()), min(block - 1, len(tokens) - begin)):
                if begin + tail > beyond:
                    yield State(state_name(links[at], tokens[begin : begin + tail]), links[at], tail, begin + tail)

    def __len__(self) -> int:
        return sum(tails.total() for tails in self._tails.values())
