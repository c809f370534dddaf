"""What becomes findable and when, what the cache finds, and how a row goes on from it."""

from serving.core import scheduler
from serving.core.cache.cache import Cache
from serving.core.cache.content import Scope
from serving.core.cache.eviction_queue import EvictionQueue
from serving.core.cache.prefix_index import PrefixIndex
from serving.core.cache.prefix_tree import CheckpointKind, Match
from serving.core.cache.retention import KeptStates, RetentionPolicy
from serving.core.cache.row_forms import RowSnapshots
from serving.core.cache.row_pages import RowPages
from serving.core.cache.row_state import StateAccess
from serving.core.errors import MissReason
from serving.core.planning import admission, rows
from serving.core.requests.request import ResultDisposition
from serving.core.tiers.tier import Unit
from tests.serving.core.mutations.registry import Patch, mutation, replacing

# -- publication --


@mutation(1, scheduler, "plan_prefill", admission)
def publish_when_planned(whole, host, request, step, *rest, **more):
    reason = whole(host, request, step, *rest, **more)
    if reason is None and request.progress.state.publishing():
        row = request.progress.unsettled[-1]
        rows.after_dispatch(host, row)
        step.effects.remove(row)
    return reason


@mutation(2, RowSnapshots, "publish_boundary")
def first_slot_for_boundary(whole, self, access, nth, *rest, **later):
    if access.writes[nth] in access.boundary and access.writes[0] in self._own:
        access, nth = StateAccess(access.read, access.writes, access.writes), 0
    whole(self, access, nth, *rest, **later)


@mutation(3, rows, "after_settle")
def drafts_published(whole, host, row, before, after):
    fed = before + row.num_tokens
    lost = fed - len(row.request.tokens)
    row.request.tokens += [1] * max(0, lost)
    try:
        whole(host, row, before, fed)
    finally:
        if lost > 0:
            del row.request.tokens[-lost:]


@mutation(5, PrefixIndex, "publish_state")
def published_early(whole, self, content, position, slot, kind):
    early = kind == CheckpointKind.PROMPT_END and position > 1
    return whole(self, content, position - early, slot, kind)


@mutation(7, scheduler.Scheduler, "withdraw")
def publish_withdrawn(whole, self, plan):
    for row in plan.effects:
        if row.fate is ResultDisposition.LIVE:
            rows.after_dispatch(self, row)
    whole(self, plan)


@mutation(8, rows, "after_settle")
def publish_without_page(whole, host, row, before, after):
    row.request.max_total += 1
    try:
        whole(host, row, before, after)
    finally:
        row.request.max_total -= 1


@mutation(45)
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


# -- hits --


@mutation(15, RowPages, "resume_from")
def hit_without_last_page(whole, self, path, entry=None):
    whole(self, path, entry)
    if len(self.table) > 1 and self.shared < 0:
        self._pool.release(self.table[-1])
        self.table[-1] = self._pool.take()


@mutation(16, PrefixIndex, "_drop_node")
def states_outlive_pages(whole, self, node):
    parent = node.parent
    self.pages.unpublish(node.page)
    node.page = 0
    self._leaf_again(parent)


@mutation(17, admission, "_take_hit")
def last_token_twice(whole, host, request, match):
    whole(host, request, match)
    if 1 < request.progress.num_computed == len(request.tokens):
        request.progress.num_computed -= 1


@mutation(18, admission, "_take_hit")
def token_skipped(whole, host, request, match):
    whole(host, request, match)
    if 0 < request.progress.num_computed < len(request.tokens) - 1:
        request.progress.num_computed += 1


@mutation(19, PrefixIndex, "find")
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
            return Match(path, node.states[()], len(path) * unit)
    return Match(path, None, len(path) * unit)


@mutation(20, PrefixIndex, "find")
def salt_ignored(whole, self, tokens, scope):
    scopes = (other for other in {*self.roots, scope} if other.weights == scope.weights)
    return max((whole(self, tokens, other) for other in scopes), key=lambda match: match.position)


@mutation(21, PrefixIndex, "find")
def state_above_is_enough(whole, self, tokens, salt):
    match = whole(self, tokens, salt)
    if match.entry is not None and match.matched > match.entry.position:
        # The pages are there, so why not the state: it is only a little older.
        match.entry.position = match.matched
    return match


@mutation(48, admission, "_find")
def logprobs_hit(whole, host, request):
    return None if host.index is None else host.index.find(request.tokens, request.progress.content.chain.scope)


@mutation(61, admission, "_find")
def never_the_whole_prompt(whole, host, request):
    return None if host.index is None else host.index.find(request.tokens[:-1], request.progress.content.chain.scope)


@mutation(62, PrefixIndex, "why_missed")
def telling_tales(whole, self, tokens, salt, match):
    if any(self.find(tokens, other).entry is not None for other in self.roots):
        return MissReason.SALT_DIFFERS
    return whole(self, tokens, salt, match)


# -- one expression in the place of a function --

mutation(4, RowSnapshots, "reserve_decode")(lambda whole, self, *step: whole(self, *step[:-1], None))
mutation(60, RowSnapshots, "publish_boundary")(lambda whole, self, *boundary, **later: None)
mutation(65, Cache, "scope")(lambda whole, self, salt, adapter=None: Scope(salt))
mutation(85, KeptStates, "ended")(lambda whole, self: [])
mutation(89, Unit, "of")(lambda whole, entry, block: whole(entry, block)._replace(client=None))


@mutation(84)
def end_of_the_tile(patch: Patch) -> None:
    def positions(whole, self, prompt_len, stops, start, end, marks=()):
        found = whole(self, prompt_len, stops, start, end)
        missing = {m for m in marks if start < m <= end} - {position for position, _, _ in found}
        return sorted([*found, *((mark, CheckpointKind.MARK, False) for mark in missing)])

    replacing(RetentionPolicy, "stops")(lambda whole, self, *given: whole(self, *given[:3]))(patch)
    replacing(RetentionPolicy, "positions")(positions)(patch)


@mutation(86, PrefixIndex, "state_at")
def state_of_another_salt(whole, self, content, position):
    return self.find(content.tokens[:position], content.chain.scope._replace(salt=None)).entry


@mutation(87, KeptStates, "keep")
def no_bound(whole, self, entry, seconds, client):
    self._most = self._most_tokens = 10**6
    return whole(self, entry, seconds, client)


@mutation(88)
def no_shares(patch: Patch) -> None:
    replacing(EvictionQueue, "hold")(lambda whole, self, client, amount: whole(self, None, amount))(patch)
    replacing(EvictionQueue, "use")(lambda whole, self, client: whole(self, None))(patch)
    replacing(EvictionQueue, "push")(lambda whole, self, client, key, entry: whole(self, None, key, entry))(patch)
    patch.setattr(EvictionQueue, "check", lambda self, owners: None)
