"""What becomes findable and when, what the cache finds, and how a row goes on from it."""

from serving.core import CheckpointKind, MissReason, StateAccess, scheduler
from serving.core.cache.cache import Cache
from serving.core.cache.content import Scope
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import Match
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_snapshots import RowSnapshots
from serving.core.planning import admission, settlement
from serving.core.requests.request import ResultDisposition
from tests.serving.core.mutations.registry import Patch, mutation, replacing

# -- publication --


@mutation(1, "a prompt's states and pages are published when its step is planned", "A16 B9 B12")
@replacing(scheduler, "plan_prefill", admission)
def publish_when_planned(whole, host, request, step, *rest, **more):
    reason = whole(host, request, step, *rest, **more)
    if reason is None and request.progress.state.publishing():
        row = request.progress.unsettled[-1]
        settlement.after_dispatch(host, row)
        step.effects.remove(row)
    return reason


@mutation(2, "the slot of a step's first token is published for the boundary", "A7 A9 B7")
@replacing(RowSnapshots, "publish_boundary")
def first_slot_for_boundary(whole, self, access, nth, *rest, **later):
    if access.writes[nth] in access.boundary and access.writes[0] in self._own:
        access, nth = StateAccess(access.read, access.writes, access.writes), 0
    whole(self, access, nth, *rest, **later)


@mutation(3, "rejected drafts count as confirmed when pages and boundaries are published", "A2 B7")
@replacing(settlement, "after_settle")
def drafts_published(whole, host, row, before, after):
    fed = before + row.num_tokens
    lost = fed - len(row.request.tokens)
    row.request.tokens += [1] * max(0, lost)
    try:
        whole(host, row, before, fed)
    finally:
        if lost > 0:
            del row.request.tokens[-lost:]


@mutation(4, "no second set of slots while an unsettled step may hold a boundary", "A7 A10 B7")
@replacing(RowSnapshots, "reserve_decode")
def no_second_set(whole, self, count, shortest, longest, continues, after):
    return whole(self, count, shortest, longest, continues, None)


@mutation(5, "a prompt's end is published under one token fewer than its state absorbed", "B9 B13")
@replacing(PrefixIndex, "publish_state")
def published_early(whole, self, content, position, slot, kind):
    early = kind == CheckpointKind.PROMPT_END and position > 1
    return whole(self, content, position - early, slot, kind)


@mutation(7, "a withdrawn step's publications stay", "B12 B14")
@replacing(scheduler.Scheduler, "withdraw")
def publish_withdrawn(whole, self, plan):
    for row in plan.effects:
        if row.fate is ResultDisposition.LIVE:
            settlement.after_dispatch(self, row)
    whole(self, plan)


@mutation(8, "a page is published for the very last token, which need not have one", "A23 A24")
@replacing(settlement, "after_settle")
def publish_without_page(whole, host, row, before, after):
    row.request.max_total += 1
    try:
        whole(host, row, before, after)
    finally:
        row.request.max_total -= 1


@mutation(45, "a drafting row's pages are published up to what was fed when it is dispatched", "A2 B9 invariant 3")
def decode_published_at_dispatch(patch: Patch) -> None:
    def plan(whole, host, request, step, *rest):
        done = whole(host, request, step, *rest)
        if done >= 0 and request.progress.unsettled[-1] not in step.effects:
            step.effects.append(request.progress.unsettled[-1])
        return done

    def after(whole, host, row):
        whole(host, row)
        tokens, progress = row.request.tokens, row.request.progress
        if not row.is_prefill and host.index is not None and progress.pages.publishes_at(row.end):
            missing = row.end - len(tokens)
            tokens += [1] * max(0, missing)
            try:
                host.index.publish_pages(progress.content, row.end)
            finally:
                if missing > 0:
                    del tokens[-missing:]

    replacing(scheduler, "plan_decode")(plan)(patch)
    replacing(scheduler, "after_dispatch")(after)(patch)


@mutation(
    60,
    "decode publishes no boundaries",
    "A15",
    "test_hits:test_second_turn_hits_a_block_finished_while_decoding_with_three_drafts",
)
@replacing(RowSnapshots, "publish_boundary")
def no_decode_boundaries(whole, self, *boundary, **later):
    return None


# -- hits --


@mutation(15, "a hit uses one page fewer than its state needs", "A28 A29 B2")
@replacing(RowPages, "resume_from")
def hit_without_last_page(whole, self, path, entry=None):
    whole(self, path, entry)
    if len(self.table) > 1 and self.shared < 0:
        self._pool.release(self.table[-1])
        self.table[-1] = self._pool.take()


@mutation(16, "evicting a page leaves the states that need it", "A29 A30 A39")
@replacing(PrefixIndex, "_drop_node")
def states_outlive_pages(whole, self, node):
    parent = node.parent
    self.pages.unpublish(node.page)
    node.page = 0
    self._leaf_again(parent)


@mutation(17, "a whole-prompt hit feeds the prompt's last token once more", "A2 A37 B11")
@replacing(admission, "_take_hit")
def last_token_twice(whole, host, request, match):
    whole(host, request, match)
    if 1 < request.progress.num_computed == len(request.tokens):
        request.progress.num_computed -= 1


@mutation(18, "a hit skips a token", "B11")
@replacing(admission, "_take_hit")
def token_skipped(whole, host, request, match):
    whole(host, request, match)
    if 0 < request.progress.num_computed < len(request.tokens) - 1:
        request.progress.num_computed += 1


@mutation(19, "a match looks at a hash of few bits instead of the tokens", "invariant 8")
@replacing(PrefixIndex, "find")
def weak_match(whole, self, tokens, scope):
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


@mutation(20, "the salt is not looked at", "issue: salting")
@replacing(PrefixIndex, "find")
def salt_ignored(whole, self, tokens, scope):
    scopes = (other for other in {*self.roots, scope} if other.weights == scope.weights)
    return max((whole(self, tokens, other) for other in scopes), key=lambda match: match.position)


@mutation(21, "a state is found although its pages are not: the deepest node on the path counts", "A28 B2")
@replacing(PrefixIndex, "find")
def state_above_is_enough(whole, self, tokens, salt):
    match = whole(self, tokens, salt)
    if match.entry is not None and match.matched > match.entry.position:
        # The pages are there, so why not the state: it is only a little older.
        match.entry.position = match.matched
    return match


@mutation(48, "a request that asked for prompt log-probabilities reads the cache", "issue: miss reasons")
@replacing(admission, "_find")
def logprobs_hit(whole, host, request):
    return None if host.index is None else host.index.find(request.tokens, request.progress.content.chain.scope)


@mutation(
    61,
    "a whole-prompt hit is cut to one token less",
    "A2 B11",
    "test_hits:test_prompt_of_whole_blocks_needs_no_column_before",
)
@replacing(admission, "_find")
def never_the_whole_prompt(whole, host, request):
    return None if host.index is None else host.index.find(request.tokens[:-1], request.progress.content.chain.scope)


@mutation(62, "who asks under a salt is told what other salts hold", "issue: salting", "test_hits:test_salt_separates")
@replacing(PrefixIndex, "why_missed")
def telling_tales(whole, self, tokens, salt, match):
    if any(self.find(tokens, other).entry is not None for other in self.roots):
        return MissReason.SALT_DIFFERS
    return whole(self, tokens, salt, match)


@mutation(65, "the weights' version is not part of what a prefix is found by", "issue: stale hits")
@replacing(Cache, "scope")
def weights_ignored(whole, self, salt, adapter=None):
    return Scope(salt)
