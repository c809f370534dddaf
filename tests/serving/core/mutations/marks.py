"""Positions, times and shares of marks."""

from serving.core.cache.marks import KeptStates
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import CheckpointKind
from serving.core.cache.retention import RetentionPolicy
from tests.serving.core.mutations.registry import Patch, mutation, replacing


@mutation(84, "the state at the end of a mark's tile is published at the mark", "marks: position")
def end_of_the_tile(patch: Patch) -> None:
    def positions(whole, self, prompt_len, stops, start, end, marks=()):
        found = whole(self, prompt_len, stops, start, end)
        missing = {m for m in marks if start < m <= end} - {position for position, _, _ in found}
        return sorted([*found, *((mark, CheckpointKind.MARK, False) for mark in missing)])

    replacing(RetentionPolicy, "stops")(
        lambda whole, self, length, hit, matched, marks=(): whole(self, length, hit, matched)
    )(patch)
    replacing(RetentionPolicy, "positions")(positions)(patch)


@mutation(85, "a mark keeps its state after its time", "marks: time",
          "test_marks:test_a_state_is_kept_until_its_time_has_passed")  # fmt: skip
@replacing(KeptStates, "ended")
def time_never_passes(whole, self):
    return []


@mutation(86, "a mark keeps the state of another salt", "marks: salt",
          "test_marks:test_marks_of_one_salt_serve_no_other")  # fmt: skip
@replacing(PrefixIndex, "state_at")
def state_of_another_salt(whole, self, content, position):
    return self.find(content.tokens[:position], content.chain.scope._replace(salt=None)).entry


@mutation(87, "a client's marks may keep all states", "marks: shares",
          "test_marks:test_no_client_takes_the_share_of_another")  # fmt: skip
@replacing(KeptStates, "keep")
def no_bound(whole, self, entry, seconds, client):
    self._most = self._most_tokens = 10**6
    return whole(self, entry, seconds, client)
