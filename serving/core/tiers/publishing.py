"""Records the contents of the prefix index in the journal."""

from serving.core.cache.prefix_tree import Checkpoint
from serving.core.tiers.journal import DEVICE, Journal
from serving.core.tiers.naming import state_of


class Publishing:
    """Watches a prefix index."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal

    def published(self, entry: Checkpoint) -> None:
        """See `prefix_index.Watcher`."""
        if not entry.stale:
            self.journal.stored(DEVICE, state_of(entry, self.journal.block))

    def dropping(self, entry: Checkpoint) -> None:
        """See `prefix_index.Watcher`."""
        if not entry.stale:  # these have not been published since the weights were replaced
            self.journal.evicted(DEVICE, state_of(entry, self.journal.block).name)

    def cleared(self) -> None:
        """See `prefix_index.Watcher`."""
        self.journal.lost(DEVICE)
