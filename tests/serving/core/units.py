"""What tiers hold: the state after a sequence of tokens, with the blocks that it needs."""

from collections.abc import Sequence

from serving.core.cache.content import Chain, Scope, state_name
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.tiers.tier import Unit

B = 4
"""Tokens of a block."""


def unit(tokens: Sequence[int], salt: str | None = None, block: int = B) -> Unit:
    """The unit of these tokens, a prompt's end."""
    links = tuple(Chain(Scope(salt), block).reach(tokens))
    tail = tokens[len(tokens) // block * block :]
    return Unit(state_name(links[-1], tail), links, len(tail), len(tokens), CheckpointKind.PROMPT_END)
