"""Names by content: the same prefix of tokens has the same name in every tier and process.

A chain has one link for each whole block of B tokens, a hash of the link before it and of the block's tokens; it begins
with the scope's. The state after some tokens is named by the last link before it and by the tokens that follow that. So
two processes that agree on B give equal tokens equal names, and different tokens different names: links are 160 bits of
BLAKE2b (RFC 7693), for which finding a collision is infeasible.
"""

import hashlib
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from serving.core.cache.prefix_tree import Scope

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
    """The links of one growing sequence. Each block is hashed once."""

    __slots__ = ("block", "links", "scope")

    def __init__(self, scope: Scope, block: int) -> None:
        self.scope, self.block = scope, block
        self.links = [root(scope)]
        """The scope's, then one for each whole block."""

    def reach(self, tokens: Sequence[int]) -> list[Name]:
        """Returns the links of this number of tokens. Earlier links do not change."""
        links, block = self.links, self.block
        for at in range((len(links) - 1) * block, len(tokens) - block + 1, block):
            links.append(link(links[-1], tokens[at : at + block]))
        return links
