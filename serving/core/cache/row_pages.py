"""The pages of one running sequence: its page table, and how much of it the index has.

        page table    | found or published | partly filled, shared | own                        |
        who writes    | no row             | copied first          | this row                   |
        tokens        0 ───────────────────────────────────── c ──▶ c + q, at the most optimistic
                                                                    the surplus goes back at settle

A row references the whole path of pages from its first token on, so that the index can always evict leaves first.
Without attention there are no pages: the table stays empty, and every verb does nothing.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, SupportsIndex

from serving.core.cache.pools import PagePool
from serving.core.cache.prefix_tree import Checkpoint, Node, Scope

PageCopy = tuple[int, int]
"""(source, target): a step copies it before it writes anything."""


class PageTable(list[int]):
    """The pages of a row in order. Notes what changes, so that a step need not look at, or send, the others."""

    __slots__ = ("changed",)

    def __init__(self, pages: Iterable[int] = ()) -> None:
        super().__init__(pages)
        self.changed = 0
        """Pages from this index on may have changed since the device was last told of them."""

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


class RowPages:
    """Owns the references of one running sequence to its pages. `pool` is None for a model without attention."""

    __slots__ = ("_copied_at", "_pool", "copy", "node", "num_published", "page_size", "shared", "table")

    def __init__(self, pool: PagePool | None, page_size: int) -> None:
        self._pool = pool
        self.page_size = page_size
        self.table = PageTable()
        """Read by planned rows, which may run after the sequence has let go of it: never emptied."""
        self.shared = -1
        """Index in `table` of a partly filled page that others may read too: copied before it is written; -1 = none."""
        self.num_published = 0
        """Full pages, counted from the front, that the index has."""
        self.node: Node | None = None
        """The index's node of the last published page."""
        self.copy: PageCopy | None = None
        """What the step that is planned and not yet dispatched copies."""
        self._copied_at = -1

    # -- beginning --

    def resume_from(self, path: Sequence[Node], entry: Checkpoint | None = None) -> None:
        """Reference the pages of a path that was found and, with a state that has a tail, the tail's."""
        pool = self._pool
        if pool is None:
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

    # -- what the next step may write --

    def pages_for(self, tokens: int) -> int:
        """Pages that many tokens fill; 0 without attention."""
        return -(-tokens // self.page_size) if self._pool is not None else 0

    def missing(self, tokens: int) -> int:
        """Pages that must be taken before so many tokens can be written."""
        return self.pages_for(tokens) - len(self.table) + (self.shared >= 0)

    def reserve(self, tokens: int) -> bool:
        """See that a step can write all pages up to so many tokens: own pages, none that others may read.

        False if the pool has too few: nothing is lost, and it may be tried again when there are more. A copy of the
        shared page is best effort: where no page is left for it and no other row reads it, the checkpoint that shares
        it is dropped instead.
        """
        pool = self._pool
        if pool is None:
            return True
        if self.shared >= 0 and not self._own_shared(pool):
            return False
        table, need = self.table, -(-tokens // self.page_size)
        while len(table) < need:
            page = pool.take()
            if not page and self.copy is not None and pool.refs[self.copy[0]] == 1:
                self._forgo_copy(pool)
                page = pool.take()
            if not page:
                return False
            table.append(page)
        return True

    def _own_shared(self, pool: PagePool) -> bool:
        """Before a row writes into the page that others may read. The source stays referenced until it is copied."""
        source = self.table[self.shared]
        if pool.owners[source] is None and pool.refs[source] == 1:
            self.shared = -1
            return True
        target = pool.take()
        if target:
            self.copy, self._copied_at = (source, target), self.shared
            self.table[self.shared] = target
            self.shared = -1
            return True
        if pool.refs[source] == 1:
            self._unshare(pool)
            return True
        return False

    def _forgo_copy(self, pool: PagePool) -> None:
        """Go without a copy of a page that no other row reads: the copy's page is wanted more."""
        self.undo()
        self._unshare(pool)

    def _unshare(self, pool: PagePool) -> None:
        """Drop the checkpoint that shares a page: better to lose one that is not being read than to preempt a row."""
        pool.withdraw(self.table[self.shared])
        self.shared = -1

    # -- what has become of a step --

    def dispatched(self) -> bool:
        """The planned step is in the device's queue; whether it copies a page, whose source is then let go."""
        if self.copy is None or self._pool is None:
            return False
        self._pool.release(self.copy[0])
        self.copy = None
        return True

    def undo(self) -> None:
        """The planned step will not run: the copy is not made. Pages that were reserved stay."""
        if self.copy is None or self._pool is None:
            return
        source, target = self.copy
        self.table[self._copied_at] = source
        self.shared, self.copy = self._copied_at, None
        self._pool.release(target)

    def publishes_at(self, length: int) -> bool:
        """Whether a sequence of so many tokens has a full page that the index has not."""
        return self._pool is not None and length // self.page_size > self.num_published

    def return_surplus(self, tokens: int) -> None:
        """Give back the pages beyond so many tokens."""
        if self._pool is None:
            return
        keep = max(-(-tokens // self.page_size), self.num_published, self.shared + 1)
        while len(self.table) > keep:
            self._pool.release(self.table.pop())

    # -- of the index --

    def exchange(self, at: int, page: int) -> None:
        """Go over to an equal page that was published before."""
        assert self._pool is not None
        own, self.table[at] = self.table[at], page
        self._pool.retain(page)
        self._pool.release(own)

    def published(self, node: Node, count: int) -> None:
        """The index has the first `count` pages; the last of them is the node's."""
        self.node, self.num_published = node, count

    # -- letting go --

    def release(self) -> None:
        """Give everything back, tails first, so that they are also evicted first."""
        if self._pool is None:
            return
        if self.copy is not None:
            self._pool.release(self.copy[0])
            self.copy = None
        for page in reversed(self.table):
            self._pool.release(page)

    def hand_off(self, tokens: int) -> list[int]:
        """The pages of so many tokens, each referenced once more: the caller releases them."""
        pages = self.table[: self.pages_for(tokens)]
        for page in pages:
            assert self._pool is not None
            self._pool.retain(page)
        return pages


class Content(NamedTuple):
    """What a sequence's states and pages stand for, and are found by."""

    tokens: list[int]
    """The sequence itself, which grows; never copied."""
    scope: Scope
    pages: RowPages
