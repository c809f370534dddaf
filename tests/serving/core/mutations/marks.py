"""Positions, times and shares of marks."""

from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.retention import KeptStates, RetentionPolicy
from tests.serving.core.mutations.registry import Patch, mutation, replaced, replacing


@mutation(84)
def end_of_the_tile(patch: Patch) -> None:
    def positions(whole, self, prompt_len, stops, start, end, marks=()):
        found = whole(self, prompt_len, stops, start, end)
        missing = {m for m in marks if start < m <= end} - {position for position, _, _ in found}
        return sorted([*found, *((mark, CheckpointKind.MARK, False) for mark in missing)])

    replacing(RetentionPolicy, "stops")(lambda whole, self, *given: whole(self, *given[:3]))(patch)
    replacing(RetentionPolicy, "positions")(positions)(patch)


@mutation(86)
@replacing(PrefixIndex, "state_at")
def state_of_another_salt(whole, self, content, position):
    return self.find(content.tokens[:position], content.chain.scope._replace(salt=None)).entry


@mutation(87)
@replacing(KeptStates, "keep")
def no_bound(whole, self, entry, seconds, client):
    self._most = self._most_tokens = 10**6
    return whole(self, entry, seconds, client)


replaced(85, KeptStates, "ended", lambda whole, self: [])
