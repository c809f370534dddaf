"""The pages of one running sequence: its page table, and the part that is published.

        page table    | found or published | partly filled, shared | own                        |
        who writes    | no row             | copied first          | this row                   |
        tokens        0 ───────────────────────────────────── c ──▶ c + q, at the most optimistic
                                                                    the surplus is released at settle

A row references the whole path of pages from its first token on, so that the index can always evict leaves first.
Without attention there are no pages: the table stays empty, and all methods do nothing.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, SupportsIndex

from serving.core.cache.content import Chain
from serving.core.cache.pools import Pool
from serving.core.cache.prefix_tree import Checkpoint, Node

PageCopy = tuple[int, int]
"""(source, target): a step copies the page before it writes anything."""


class PageTable(list[int]):
    """The pages of a row in order. Records changes, so that a step sends only these."""

    __slots__ = ("changed",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        super().__init__(pages)
        self.changed = 0
        """Pages from this index on may have changed since they were last sent to the device."""

    def append(self, page: int) -> None:
        self.changed = min(self.changed, len(self))
        super().append(page)

    def pop(self, index: SupportsIndex = -1) -> int:
        page = super().pop(index)
        self.changed = min(self.changed, len(self) if index == -1 else 0)
        return page

    def __setitem__(self, index: Any, page: Any) -> None:
        super().__setitem__(index, page)
        self.changed = min(self.changed, range(len(self))[index] if isinstance(index, int) else 0)


@dataclass(slots=True, eq=False)
class RowPages:
    """Owns the references of one running sequence to its pages. The pool is empty for a model without attention."""

    _pool: Pool
    page_size: int
    table: PageTable = field(init=False, default_factory=PageTable)
    """Never cleared, because planned rows read it and may run after the sequence has released its pages."""
    shared: int = field(init=False, default=-1)
    """Index in `table` of a partly filled page that other rows may read: copied before it is written. -1: none."""
    num_published: int = field(init=False, default=0)
    """Number of leading full pages that are in the index."""
    node: Node | None = field(init=False, default=None)
    """The index's node of the last published page."""
    copy: PageCopy | None = field(init=False, default=None)
    """The page copy of the planned step that is not yet dispatched."""
    _copied_at: int = field(init=False, default=-1)

    # -- start --

    def resume_from(self, path: Sequence[Node], entry: Checkpoint | None = None) -> None:
        """References the pages of a matching path and, for a state with a tail, the tail's page."""
        pool = self._pool
        if not pool:
            return
        for node in path:
            pool.retain(node.page)
            self.table.append(node.page)
        self.num_published = len(path)
        self.node = path[-1] if path else None
        if entry is not None and entry.page:
            pool.retain(entry.page)
            self.table.append(entry.page)
            self.shared = len(path)

    # -- pages that the next step may write --

    def pages_for(self, tokens: int) -> int:
        """Returns the number of pages that this number of tokens fills; 0 without attention."""
        return -(-tokens // self.page_size) if self._pool else 0

    def missing(self, tokens: int) -> int:
        """Returns the number of pages to take before this number of tokens can be written."""
        return self.pages_for(tokens) - len(self.table) + (self.shared >= 0)

    def reserve(self, tokens: int) -> bool:
        """Reserves pages so that a step can write up to this number of tokens, only in pages that no other row reads.

        Returns False if the pool has too few pages; the call can be repeated later. A shared page is copied if a page
        is available. Otherwise, if no other row reads it, the checkpoint that shares it is dropped instead.
        """
        pool = self._pool
        if self.shared >= 0 and not self._own_shared(pool):
            return False
        table, need = self.table, self.pages_for(tokens)
        while len(table) < need:
            member = pool.member_of(len(table))
            page = pool.take(member)
            if not page and self._holds_a_copy_alone(pool, member):
                self.undo()  # no other row reads the copied page, so its copy is needed elsewhere
                self._unshare(pool)
                page = pool.take(member)
            if not page:
                return False
            table.append(page)
        return True

    def _holds_a_copy_alone(self, pool: Pool, member: int) -> bool:
        """Returns whether the planned step copies a page of a member that no other row reads."""
        return self.copy is not None and pool.refs[self.copy[0]] == 1 and pool.member_of(self._copied_at) == member

    def _own_shared(self, pool: Pool) -> bool:
        """Plans a copy of the page that others may read, before the row writes it. Its source stays referenced until
        then."""
        source = self.table[self.shared]
        if pool.owners[source] is None and pool.refs[source] == 1:
            self.shared = -1
            return True
        target = pool.take(pool.member_of(self.shared))
        if target:
            self.copy, self._copied_at = (source, target), self.shared
            self.table[self.shared] = target
            self.shared = -1
            return True
        if pool.refs[source] == 1:
            self._unshare(pool)
            return True
        return False

    def _unshare(self, pool: Pool) -> None:
        """Drops the checkpoint that shares a page. Losing a checkpoint that no row reads is better than preempting a
        row."""
        pool.withdraw(self.table[self.shared])
        self.shared = -1

    # -- dispatched and settled steps --

    def dispatched(self) -> bool:
        """Called when the planned step is dispatched. Releases the source of its page copy, and returns whether there
        was one."""
        if self.copy is None:
            return False
        self._pool.release(self.copy[0])
        self.copy = None
        return True

    def undo(self) -> None:
        """Called when the planned step is withdrawn: cancels its copy. Reserved pages stay."""
        if self.copy is None:
            return
        source, target = self.copy
        self.table[self._copied_at] = source
        self.shared, self.copy = self._copied_at, None
        self._pool.release(target)

    def publishes_at(self, length: int) -> bool:
        """Returns whether a sequence of this number of tokens has a full page that is not in the index."""
        return bool(self._pool) and length // self.page_size > self.num_published

    def return_surplus(self, tokens: int) -> None:
        """Releases the pages beyond this number of tokens."""
        keep = max(-(-tokens // self.page_size), self.num_published, self.shared + 1)
        while len(self.table) > keep:
            self._pool.release(self.table.pop())

    # -- called by the index --

    def exchange(self, at: int, page: int) -> None:
        """Replaces a page by an equal published one."""
        own, self.table[at] = self.table[at], page
        self._pool.retain(page)
        self._pool.release(own)

    # -- end --

    def release(self) -> None:
        """Releases all pages, the last first, so that these are evicted first."""
        if self.copy is not None:
            self._pool.release(self.copy[0])
            self.copy = None
        for page in reversed(self.table):
            self._pool.release(page)

    def hand_off(self, tokens: int) -> list[int]:
        """Returns the pages of this number of tokens with one more reference each. The caller releases them."""
        pages = self.table[: self.pages_for(tokens)]
        for page in pages:
            self._pool.retain(page)
        return pages


class Content(NamedTuple):
    """The content that a sequence's states and pages represent, by which they are found."""

    tokens: list[int]
    """The growing sequence itself, not a copy."""
    chain: Chain
    pages: RowPages
