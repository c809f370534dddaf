"""What the cache finds, and how a row goes on from it."""

from typing import Any

from serving.core import MissReason
from serving.core.cache.cache import Cache
from serving.core.cache.content import Scope
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import Match
from serving.core.cache.row_pages import RowPages
from serving.core.planning import admission
from tests.serving.core.mutations.registry import Patch, mutation


@mutation(15, "a hit uses one page fewer than its state needs", "A28 A29 B2")
def hit_without_last_page(patch: Patch) -> None:
    whole = RowPages.resume_from

    def resume(self: Any, path: Any, entry: Any = None) -> None:
        whole(self, path, entry)
        if len(self.table) > 1 and self.shared < 0:
            self._pool.release(self.table[-1])
            self.table[-1] = self._pool.take()

    patch.setattr(RowPages, "resume_from", resume)


@mutation(16, "evicting a page leaves the states that need it", "A29 A30 A39")
def states_outlive_pages(patch: Patch) -> None:
    def drop(self: Any, node: Any) -> None:
        parent = node.parent
        self.pages.unpublish(node.page)
        node.page = 0
        self._leaf_again(parent)

    patch.setattr(PrefixIndex, "_drop_node", drop)


@mutation(17, "a whole-prompt hit feeds the prompt's last token once more", "A2 A37 B11")
def last_token_twice(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        if 1 < request.progress.num_computed == len(request.tokens):
            request.progress.num_computed -= 1

    patch.setattr(admission, "_take_hit", take)


@mutation(18, "a hit skips a token", "B11")
def token_skipped(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        if 0 < request.progress.num_computed < len(request.tokens) - 1:
            request.progress.num_computed += 1

    patch.setattr(admission, "_take_hit", take)


@mutation(19, "a match looks at a hash of few bits instead of the tokens", "invariant 8")
def weak_match(patch: Patch) -> None:
    whole = PrefixIndex.find

    def find(self: Any, tokens: Any, scope: Any) -> Match:
        root = self.roots.get(scope)
        if root is None:
            return whole(self, tokens, scope)
        node, path, unit = root, [], self.unit
        for at in range(0, len(tokens) - unit + 1, unit):
            key = tuple(tokens[at : at + unit])
            child = next((c for k, c in node.children.items() if sum(k) % 4 == sum(key) % 4), None)
            if child is None:
                break
            path.append(child)
            node = child
        for node in reversed(path):
            if () in node.states:
                return Match(root, path, node.states[()], len(path) * unit)
        return Match(root, path, None, len(path) * unit)

    patch.setattr(PrefixIndex, "find", find)


@mutation(20, "the salt is not looked at", "issue: salting")
def salt_ignored(patch: Patch) -> None:
    whole = PrefixIndex.find
    patch.setattr(
        PrefixIndex,
        "find",
        lambda self, tokens, scope: max(
            (whole(self, tokens, other) for other in {*self.roots, scope} if other.weights == scope.weights),
            key=lambda match: match.position,
        ),
    )


@mutation(21, "a state is found although its pages are not: the deepest node on the path counts", "A28 B2")
def state_above_is_enough(patch: Patch) -> None:
    whole = PrefixIndex.find

    def find(self: Any, tokens: Any, salt: Any) -> Match:
        match = whole(self, tokens, salt)
        if match.entry is not None and match.matched > match.entry.position:
            # The pages are there, so why not the state: it is only a little older.
            match.entry.position = match.matched
        return match

    patch.setattr(PrefixIndex, "find", find)


@mutation(48, "a request that asked for prompt log-probabilities reads the cache", "issue: miss reasons")
def logprobs_hit(patch: Patch) -> None:
    def find(host: Any, request: Any) -> Any:
        index = host.cache.index
        return None if index is None else index.find(request.tokens, request.progress.content.chain.scope)

    patch.setattr(admission, "_find", find)


@mutation(
    61,
    "a whole-prompt hit is cut to one token less",
    "A2 B11",
    "test_hits:test_prompt_of_whole_blocks_needs_no_column_before",
)
def never_the_whole_prompt(patch: Patch) -> None:
    def find(host: Any, request: Any) -> Any:
        index = host.cache.index
        return index.find(request.tokens[:-1], request.progress.content.chain.scope) if index is not None else None

    patch.setattr(admission, "_find", find)


@mutation(62, "who asks under a salt is told what other salts hold", "issue: salting", "test_hits:test_salt_separates")
def telling_tales(patch: Patch) -> None:
    whole = PrefixIndex.why_missed

    def why(self: Any, tokens: Any, salt: Any, match: Any) -> Any:
        if any(self.find(tokens, other).entry is not None for other in self.roots):
            return MissReason.SALT_DIFFERS
        return whole(self, tokens, salt, match)

    patch.setattr(PrefixIndex, "why_missed", why)


@mutation(65, "the weights' version is not part of what a prefix is found by", "issue: stale hits")
def weights_ignored(patch: Patch) -> None:
    patch.setattr(Cache, "scope", lambda self, salt, adapter=None: Scope(salt))
