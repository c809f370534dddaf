"""Finds stop texts in a stream of text, and holds back text that could begin a stop text."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopAutomaton:
    """The Aho-Corasick automaton of several stop texts.

    A state is a node of the trie of the texts: the longest suffix of the stream that is a prefix of one of them.
    Building the automaton takes time and memory proportional to the total length of the texts. Streams can share it,
    because it does not change.
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self.texts = tuple(texts)
        self.next: dict[tuple[int, str], int] = {}
        """Edges of the trie: (state, character) to state. State 0 is its root."""
        self.fallback = [0]
        """For each state, the state of the longest proper suffix of its text that is in the trie."""
        self.longest: list[str | None] = [None]
        """For each state, the longest stop text that ends there."""
        self._prefix = [("", 0)]  # for each state, a stop text and the length of its prefix
        for text in self.texts:
            self._insert(text)
        self._link()

    def _insert(self, text: str) -> None:
        state = 0
        for depth, character in enumerate(text, start=1):
            child = self.next.get((state, character))
            if child is None:
                child = self.next[state, character] = len(self.fallback)
                self.fallback.append(0)
                self.longest.append(None)
                self._prefix.append((text, depth))
            state = child
        self.longest[state] = text

    def _link(self) -> None:
        """Sets `fallback` and `longest` of all states, breadth first, because they depend on those of shorter
        suffixes."""
        children: list[list[tuple[str, int]]] = [[] for _ in self.fallback]
        for (state, character), child in self.next.items():
            children[state].append((character, child))
        queue = deque(child for _, child in children[0])
        while queue:
            state = queue.popleft()
            for character, child in children[state]:
                self.fallback[child] = self.step(self.fallback[state], character)
                if self.longest[child] is None:
                    self.longest[child] = self.longest[self.fallback[child]]
                queue.append(child)

    def step(self, state: int, character: str) -> int:
        """Returns the state after one more character. Constant time per character, averaged over a stream."""
        while (following := self.next.get((state, character))) is None:
            if not state:
                return 0
            state = self.fallback[state]
        return following

    def depth(self, state: int) -> int:
        """Returns the length of a state's text."""
        return self._prefix[state][1]

    def prefix(self, state: int, length: int) -> str:
        """Returns the first `length` characters of a state's text."""
        return self._prefix[state][0][:length]


class StopText:
    """Returns text until one of the stop texts is complete.

    It holds back text that could still become a stop text, so that it never has to revoke returned text.

    Args:
        automaton: finds the stop texts.
        include: also return the stop text.
        after: the marks around reasoning, in which stop texts do not count; the first is "" if the text starts within
            reasoning.
    """

    def __init__(
        self, automaton: StopAutomaton, *, include: bool = False, after: tuple[str, str] | None = None
    ) -> None:
        self.texts = automaton.texts
        self.found: str | None = None
        """The stop text that ended the stream."""
        self.active = True
        """Whether to search text; if False, `push` returns it at once."""
        self._automaton = automaton
        self._include = include
        self._state = 0
        self._after, self._before = after, ""
        """The marks around reasoning, until it ends; the end of the text so far, in which a mark may begin."""

    def push(self, piece: str) -> str:
        """Processes the next piece and returns the text that may be shown now. Drops text after a stop text."""
        if self.found is not None:
            return ""
        if self._after is None or not self.texts:
            return self._search(piece)
        begin, end = self._after
        text = self._before + piece
        if begin:  # the text may begin with reasoning
            begun = text.lstrip()
            if not begun.startswith(begin):
                self._before = text
                if begin.startswith(begun):
                    return ""
                self._after, self._before = None, ""
                return self._search(text)
            self._after, piece, self._before = ("", end), text, ""
        _, found, answer = text.partition(end)
        if not found:
            self._before = text[-len(end) + 1 :]
            return piece
        self._after, self._before = None, ""
        return piece[: len(piece) - len(answer)] + self._search(answer)

    def _search(self, piece: str) -> str:
        if not self.texts or not self.active:
            return piece
        automaton, before, state = self._automaton, self._state, self._state
        held = automaton.depth(before)
        first: tuple[int, int, str] | None = None
        for end, character in enumerate(piece, start=held + 1):
            state = automaton.step(state, character)
            stop = automaton.longest[state]
            # The stop text that begins first wins; among those that begin together, the longest wins.
            if stop is not None and (first is None or (end - len(stop), -len(stop)) < first[:2]):
                first = (end - len(stop), -len(stop), stop)
        if first is None:
            self._state = state
            shown = held + len(piece) - automaton.depth(state)
        else:
            start, _, self.found = first
            self._state = 0
            shown = start + len(self.found) if self._include else start
        text = automaton.prefix(before, min(held, shown))
        return text + piece[: shown - held] if shown > held else text

    def flush(self) -> str:
        """Returns the held-back text at the end of a stream without a stop text."""
        if self._after is not None and self._after[0]:
            return self._before
        state, self._state = self._state, 0
        return self._automaton.prefix(state, self._automaton.depth(state))
