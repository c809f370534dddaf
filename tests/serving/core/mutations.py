"""Planted faults for the host policy. Each replaces one function or one rule; the fuzzer must see every one of them.

`CORE[n]` is what the table in docs/mutations.md calls number n. A fault is a function that takes pytest's monkeypatch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from serving.core import (
    admission,
    budget,
    decode_planning,
    host_state,
    page_planning,
    policy,
    preemption,
    prefill_planning,
    prefix_index,
    publication,
    scheduler,
    settlement,
)
from serving.core.plan import DecodeRow, Fate, PrefillRow
from serving.core.pools import Pool
from serving.core.prefix_tree import Match
from serving.core.request import Status

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Mutation:
    """A fault, the lines of the list of edge cases that it stands for, and who sees it."""

    number: int
    fault: str
    cases: str
    plant: Callable[[Patch], None]
    seen_by: str = "fuzzer"
    """Or the test (module:function) that does: the fault costs time or memory, not tokens."""


CORE: dict[int, Mutation] = {}


def mutation(
    number: int, fault: str, cases: str, seen_by: str = "fuzzer"
) -> Callable[[Callable[[Patch], None]], Callable[[Patch], None]]:
    """Register a fault under its number."""

    def register(plant: Callable[[Patch], None]) -> Callable[[Patch], None]:
        assert number not in CORE
        CORE[number] = Mutation(number, fault, cases, plant, seen_by)
        return plant

    return register


# -- publication --


@mutation(1, "a prompt's states and pages are published when its step is planned", "A16 B9 B12")
def publish_when_planned(patch: Patch) -> None:
    whole = prefill_planning.plan_catch_up

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> bool:
        done = whole(host, request, step, room, preempting=preempting)
        if done and host.index is not None and request.flights[-1].marks:
            row = request.flights[-1]
            publication.after_dispatch(host, row)
            step.effects.remove(row)
        return done

    patch.setattr(scheduler, "plan_catch_up", plan)
    patch.setattr(admission, "plan_catch_up", plan)


@mutation(2, "the slot of a step's first token is published for the boundary", "A7 A9 B7")
def first_slot_for_boundary(patch: Patch) -> None:
    whole = publication._publish_boundary

    def publish(host: Any, row: DecodeRow, boundary: int, slot: int) -> None:
        whole(host, row, boundary, row.write_slots[0] if row.write_slots[0] in row.request.state.own else slot)

    patch.setattr(publication, "_publish_boundary", publish)


@mutation(3, "rejected drafts count as confirmed when pages and boundaries are published", "A2 B7")
def drafts_published(patch: Patch) -> None:
    whole = publication.after_settle

    def publish(host: Any, row: DecodeRow, before: int, after: int) -> None:
        fed = before + row.num_tokens
        lost = fed - len(row.request.tokens)
        row.request.tokens += [1] * max(0, lost)
        try:
            whole(host, row, before, fed)
        finally:
            if lost > 0:
                del row.request.tokens[-lost:]

    patch.setattr(settlement, "after_settle", publish)


@mutation(4, "no second set of slots while an unsettled step may hold a boundary", "A7 A10 B7")
def no_second_set(patch: Patch) -> None:
    def choose(self: Any, request: Any, count: int) -> list[int]:
        own = request.state.own
        while len(own) < count:
            fresh = self.slots.take()
            if not fresh:
                break
            own.append(fresh)
        return own[:count]

    patch.setattr(host_state.HostState, "choose_slots", choose)

    whole = decode_planning.plan_decode

    def plan(host: Any, request: Any, *rest: Any) -> int:
        # The short cut around `choose_slots` asks whether a boundary is to be kept.
        kept = request.flights[-1].boundary_slots if request.flights else ()
        if kept:
            request.flights[-1].boundary_slots = ()
        done = whole(host, request, *rest)
        if kept and request.flights:
            request.flights[0].boundary_slots = kept
        return done

    patch.setattr(scheduler, "plan_decode", plan)


@mutation(5, "a prompt's end is published under one token fewer than its state absorbed", "B9 B13")
def published_early(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.publish_state

    def publish(self: Any, request: Any, position: int, slot: int, kind: int) -> bool:
        early = kind == policy.Kind.PROMPT_END and position > 1
        return whole(self, request, position - early, slot, kind)

    patch.setattr(prefix_index.PrefixIndex, "publish_state", publish)


@mutation(6, "tiles are counted from the chunk's start instead of absolutely", "A33 A34 B8")
def relative_tiles(patch: Patch) -> None:
    whole = prefill_planning.plan_catch_up

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> bool:
        done = whole(host, request, step, room, preempting=preempting)
        row = request.flights[-1] if done else None
        if isinstance(row, PrefillRow):
            slots = [0] * len(row.tile_write_slots)
            for mark in row.marks:
                slots[(mark.position - row.start - 1) // host.config.tile_size] = mark.slot
            slots[-1] = row.tile_write_slots[-1]
            row.tile_write_slots = slots
        return done

    patch.setattr(scheduler, "plan_catch_up", plan)
    patch.setattr(admission, "plan_catch_up", plan)


@mutation(7, "a withdrawn step's publications stay", "B12 B14")
def publish_withdrawn(patch: Patch) -> None:
    whole = scheduler.Scheduler.withdraw

    def withdraw(self: Any, plan: Any) -> None:
        for row in plan.effects:
            if row.fate is Fate.LIVE:
                publication.after_dispatch(self.host, row)
        whole(self, plan)

    patch.setattr(scheduler.Scheduler, "withdraw", withdraw)


@mutation(8, "a page is published for the very last token, which need not have one", "A23 A24")
def publish_without_page(patch: Patch) -> None:
    whole = publication.after_settle

    def after_settle(host: Any, row: Any, before: int, after: int) -> None:
        row.request.max_total += 1
        try:
            whole(host, row, before, after)
        finally:
            row.request.max_total -= 1

    patch.setattr(settlement, "after_settle", after_settle)


# -- sharing --


@mutation(9, "a row writes the checkpoint that it reads", "A32 B10 B23")
def write_shared_slot(patch: Patch) -> None:
    whole = host_state.HostState.choose_slots

    def choose(self: Any, request: Any, count: int) -> list[int]:
        held = request.state.held
        return [held, *whole(self, request, count)][:count] if held else whole(self, request, count)

    patch.setattr(host_state.HostState, "choose_slots", choose)


@mutation(10, "a partly filled page that was hit is written without a copy", "A32 B10")
def no_copy_after_hit(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        request.shared_page = -1

    patch.setattr(admission, "_take_hit", take)


@mutation(11, "a row writes on in the page in which it published its own prompt end", "A32 B10")
def no_copy_after_own_end(patch: Patch) -> None:
    whole = publication.after_dispatch

    def after(host: Any, row: Any) -> None:
        whole(host, row)
        row.request.shared_page = -1

    patch.setattr(scheduler, "after_dispatch", after)


@mutation(12, "what a row of the step reads may be given to another row of the same step", "A20 B17")
def release_when_planned(patch: Patch) -> None:
    whole = prefill_planning.plan_catch_up

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> bool:
        done = whole(host, request, step, room, preempting=preempting)
        if done:
            row = request.flights[-1]
            if row.release_slot:
                host.slots.release(row.release_slot)
                row.release_slot = 0
        return done

    patch.setattr(scheduler, "plan_catch_up", plan)
    patch.setattr(admission, "plan_catch_up", plan)


@mutation(13, "the source of a page copy is let go before the copy is dispatched", "B10")
def release_source_early(patch: Patch) -> None:
    for module in (prefill_planning, decode_planning):

        def prepare(host: Any, request: Any, end: int, plan: Any, *, preempting: bool) -> Any:
            ready, copy = page_planning.prepare_pages(host, request, end, plan, preempting=preempting)
            if copy is not None:
                host.pages.release(copy[0])
                entry = host.pages.owners[copy[0]]
                if entry is not None and not host.pages.refs[copy[0]]:
                    host.index.drop_state(entry)
            return ready, copy

        patch.setattr(module, "prepare_pages", prepare)

    def after(host: Any, row: Any) -> None:
        copy, row.page_copy = row.page_copy, None
        publication.after_dispatch(host, row)
        row.page_copy = copy

    patch.setattr(scheduler, "after_dispatch", after)
    patch.setattr(host_state.HostState, "forsake", _without_copy(host_state.HostState.forsake))
    # Withdrawing is not what this is about.
    patch.setattr(scheduler.Scheduler, "withdraw", lambda self, plan: self.reset())


def _without_copy(whole: Any) -> Any:
    def forsake(self: Any, row: Any) -> None:
        copy, row.page_copy = row.page_copy, None
        whole(self, row)
        row.page_copy = copy

    return forsake


@mutation(14, "an equal page is taken over without being referenced", "A32")
def adopt_without_reference(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.publish_pages

    def publish(self: Any, request: Any, position: int) -> Any:
        before = list(request.pages)
        node = whole(self, request, position)
        for old, new in zip(before, request.pages, strict=True):
            if old != new and self.pages.refs[new] > 1:
                self.pages.refs[new] -= 1
        return node

    patch.setattr(prefix_index.PrefixIndex, "publish_pages", publish)


# -- hits --


@mutation(15, "a hit uses one page fewer than its state needs", "A28 A29 B2")
def hit_without_last_page(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        if host.pages is not None and len(request.pages) > 1 and request.shared_page < 0:
            host.pages.release(request.pages[-1])
            request.pages[-1] = host.pages.take()

    patch.setattr(admission, "_take_hit", take)


@mutation(16, "evicting a page leaves the states that need it", "A29 A30 A39")
def states_outlive_pages(patch: Patch) -> None:
    def drop(self: Any, node: Any) -> None:
        parent = node.parent
        self.pages.unpublish(node.page)
        node.page = 0
        self._leaf_again(parent)

    patch.setattr(prefix_index.PrefixIndex, "_drop_node", drop)


@mutation(17, "a whole-prompt hit feeds the prompt's last token once more", "A2 A37 B11")
def last_token_twice(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        if request.num_computed == len(request.tokens) and request.num_computed > 1:
            request.num_computed -= 1

    patch.setattr(admission, "_take_hit", take)


@mutation(18, "a hit skips a token", "B11")
def token_skipped(patch: Patch) -> None:
    whole = admission._take_hit

    def take(host: Any, request: Any, match: Any) -> None:
        whole(host, request, match)
        if request.num_computed and request.num_computed + 1 < len(request.tokens):
            request.num_computed += 1

    patch.setattr(admission, "_take_hit", take)


@mutation(19, "a match looks at a hash of few bits instead of the tokens", "invariant 8")
def weak_match(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.find

    def find(self: Any, tokens: Any, salt: Any) -> Match:
        root = self.roots.get(salt)
        if root is None:
            return whole(self, tokens, salt)
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

    patch.setattr(prefix_index.PrefixIndex, "find", find)


@mutation(20, "the salt is not looked at", "issue: salting")
def salt_ignored(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.find
    patch.setattr(
        prefix_index.PrefixIndex,
        "find",
        lambda self, tokens, salt: max(
            (whole(self, tokens, other) for other in {*self.roots, salt}), key=lambda match: match.position
        ),
    )


@mutation(21, "a state is found although its pages are not: the deepest node on the path counts", "A28 B2")
def state_above_is_enough(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.find

    def find(self: Any, tokens: Any, salt: Any) -> Match:
        match = whole(self, tokens, salt)
        if match.entry is not None and match.matched > match.entry.position:
            # The pages are there, so why not the state: it is only a little older.
            match.entry.position = match.matched
        return match

    patch.setattr(prefix_index.PrefixIndex, "find", find)


# -- rows and seats --


@mutation(22, "a preempted row keeps its anchor: the next seat's contents are continued", "A17 A18 A19")
def stale_anchor(patch: Patch) -> None:
    whole = host_state.HostState.forget

    def forget(self: Any, request: Any) -> None:
        steps = request.num_sampling_steps
        whole(self, request)
        request.num_sampling_steps = steps

    patch.setattr(host_state.HostState, "forget", forget)


@mutation(23, "a first token is a decode row", "A4 B13 invariant 5")
def first_token_decodes(patch: Patch) -> None:
    whole = prefill_planning.plan_catch_up

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> bool:
        done = whole(host, request, step, room, preempting=preempting)
        row = request.flights[-1] if done else None
        if row is not None and not isinstance(row, DecodeRow) and row.start == 0 and row.num_tokens == 1:
            step.prefill.remove(row)
            step.effects.remove(row)
            new = DecodeRow(
                request,
                row.row_id,
                False,
                row.tokens,
                0,
                row.read_slot,
                1,
                0,
                row.tile_write_slots,
                row.pages,
                None,
                row.sample,
                row.step,
                True,
            )
            new.marks = row.marks
            request.flights[-1] = new
            step.decode.append(new)
            step.effects.append(new)
        return done

    patch.setattr(scheduler, "plan_catch_up", plan)
    patch.setattr(admission, "plan_catch_up", plan)


@mutation(24, "the host takes the first slot after a step with accepted drafts", "A12 A13 B5")
def first_slot_current(patch: Patch) -> None:
    whole = settlement._settle_decode

    def settle(host: Any, row: Any, tokens: Any, emitted: Any, **rest: Any) -> None:
        whole(host, row, tokens, emitted, **rest)
        if not row.request.finished:
            row.request.state.current = row.write_slots[0]

    patch.setattr(settlement, "_settle_decode", settle)


@mutation(25, "pages are reserved for the shortest possible length", "A23 B3")
def shortest_length(patch: Patch) -> None:
    whole = decode_planning.plan_decode

    def plan(host: Any, request: Any, *rest: Any) -> int:
        done = whole(host, request, *rest)
        if done >= 0 and host.pages is not None:
            keep = host.pages_for(request.num_computed + len(request.flights))
            while len(request.pages) > max(keep, request.num_published):
                host.pages.release(request.pages.pop())
        return done

    patch.setattr(scheduler, "plan_decode", plan)


@mutation(26, "a slot that the device will read next is given back as surplus", "A12 B13")
def trim_what_is_read(patch: Patch) -> None:
    def trim(self: Any, request: Any) -> None:
        own = request.state.own
        while len(own) > self.width:
            self.slots.release(own.pop())

    patch.setattr(host_state.HostState, "trim_slots", trim)


@mutation(27, "the surplus of optimistic pages is kept", "issue: accounts")
def surplus_kept(patch: Patch) -> None:
    patch.setattr(host_state.HostState, "return_surplus", lambda self, request: None)


@mutation(28, "a row whose request has ended is credited with its unsettled step", "A19 pitfall: late results")
def credit_the_dead(patch: Patch) -> None:
    whole = settlement._settle_dead

    def settle(host: Any, row: Any, tokens: Any, emitted: Any) -> None:
        if row.sample and row.fate is Fate.DROPPED and row.request.finished:
            accepted, _ = settlement.append(row.request, tokens)
            emitted.append(settlement.Emitted(row.request, row, accepted))
            return
        whole(host, row, tokens, emitted)

    patch.setattr(settlement, "_settle_dead", settle)


# -- progress --


@mutation(29, "chunks end on multiples of B even where B does not fit", "A25 B15")
def align_or_nothing(patch: Patch) -> None:
    whole = prefill_planning._chunk_end

    def chunk_end(host: Any, request: Any, start: int, room: Any) -> int:
        end = whole(host, request, start, room)
        if end < len(request.tokens) and end not in request.stops and host.config.cache_mode == "align":
            return max(start, end - end % host.config.state_block_size)
        return end

    patch.setattr(prefill_planning, "_chunk_end", chunk_end)


@mutation(30, "the tile budget is not looked at", "issue: tile budget")
def no_tile_budget(patch: Patch) -> None:
    whole = budget.Budget.__init__

    def init(self: Any, config: Any) -> None:
        whole(self, config)
        self.tiles = 10**6

    patch.setattr(budget.Budget, "__init__", init)


@mutation(31, "the last in the order is never preempted: who has too little waits", "invariant 9")
def never_preempt(patch: Patch) -> None:
    patch.setattr(page_planning, "_take_from_others", lambda host, request, plan: 0)


@mutation(32, "the copy of a page is insisted on when no page is left", "invariant 9 and 11")
def insist_on_copy(patch: Patch) -> None:
    patch.setattr(page_planning, "_unshare", lambda host, request: None)

    def spare(host: Any, request: Any, copy: Any) -> None:
        page_planning.put_back(host, request, copy)

    patch.setattr(page_planning, "_spare_copy", spare)


@mutation(33, "keeping a boundary comes before going on", "invariant 11")
def boundaries_first(patch: Patch) -> None:
    whole = host_state.HostState.choose_slots

    def choose(self: Any, request: Any, count: int) -> list[int]:
        kept = request.flights[-1].boundary_slots if request.flights else ()
        own = request.state.own
        if (kept and all(slot in kept for slot in own) and not self.slots.available) or (
            not own and not self.slots.available
        ):
            return []
        return whole(self, request, count)

    patch.setattr(host_state.HostState, "choose_slots", choose)
    # Publishing without looking whether the row keeps a slot to write.
    whole_publish = publication._publish_boundary

    class Rich:
        def __init__(self, slots: Any) -> None:
            self._slots = slots

        def __getattr__(self, name: str) -> Any:
            return 1 if name == "available" else getattr(self._slots, name)

    def publish(host: Any, row: Any, boundary: int, slot: int) -> None:
        slots = host.slots
        host.slots = Rich(slots)
        try:
            whole_publish(host, row, boundary, slot)
        finally:
            host.slots = slots

    patch.setattr(publication, "_publish_boundary", publish)


@mutation(34, "drafts are planned beyond a request's last token, and more pages wanted than there may be", "A24")
def drafts_beyond_the_end(patch: Patch) -> None:
    def reach(self: Any, request: Any, end: int) -> int:
        return end + self.config.num_speculative_tokens + self.config.page_size

    patch.setattr(host_state.HostState, "reach", reach)


# -- accounts --


@mutation(35, "an abort between planning and dispatch leaks what the row held beside its request", "A52 B12")
def leak_on_abort(patch: Patch) -> None:
    patch.setattr(host_state.HostState, "forsake", lambda self, row: None)


@mutation(36, "preemption forgets the checkpoint that the row was reading", "A17 issue: accounts")
def leak_on_preemption(patch: Patch) -> None:
    whole = preemption.preempt

    def preempt(host: Any, victim: Any, plan: Any) -> None:
        victim.state.held = 0
        whole(host, victim, plan)

    patch.setattr(page_planning, "preempt", preempt)


@mutation(37, "withdrawing a step keeps the slots that it took for publication", "B12")
def leak_on_withdraw(patch: Patch) -> None:
    whole = host_state.HostState.undo

    def undo(self: Any, row: Any) -> None:
        row.marks = ()
        whole(self, row)

    patch.setattr(host_state.HostState, "undo", undo)


@mutation(38, "the cache is kept when the store is lost", "issue: failure")
def cache_survives_loss(patch: Patch) -> None:
    whole = host_state.HostState.new_pools

    def new_pools(self: Any) -> None:
        if not hasattr(self, "slots"):
            whole(self)
            return
        for pool in (self.slots, self.pages):
            for i in range(1, pool.size if pool is not None else 0):
                while pool.refs[i]:
                    pool.release(i)
        self.free_seats = list(range(self.config.seats, 0, -1))

    patch.setattr(host_state.HostState, "new_pools", new_pools)


@mutation(39, "results of a step that was lost with the store are taken", "issue: failure")
def late_results(patch: Patch) -> None:
    whole = scheduler.Scheduler.settle

    def settle(self: Any, plan: Any, result: Any) -> Any:
        if plan not in self.host.unsettled:
            for row, tokens in zip(plan.rows, (*result.decode, *result.prefill), strict=True):
                if row.request.status is Status.WAITING:
                    settlement.append(row.request, tokens)
            return []
        return whole(self, plan, result)

    patch.setattr(scheduler.Scheduler, "settle", settle)


@mutation(40, "a state that somebody reads may be evicted", "invariant 2")
def evict_in_use(patch: Patch) -> None:
    def evict(self: Any, max_rank: int | None) -> bool:
        for root in self.roots.values():
            stack = [root]
            while stack:
                node = stack.pop()
                for entry in list(node.states.values()):
                    if self.slots.refs[entry.slot]:
                        self.slots.refs[entry.slot] = 0
                        self.slots.num_cached += 1
                    self.drop_state(entry)
                    return True
                stack += node.children.values()
        return False

    patch.setattr(prefix_index.PrefixIndex, "_evict_state", evict)


@mutation(41, "a page with others below it may be evicted", "invariant 11")
def evict_inner_page(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.evict_page

    def evict(self: Any) -> bool:
        for root in self.roots.values():
            for node in root.children.values():
                if not self.pages.refs[node.page]:
                    self._drop_node(node)
                    return True
        return whole(self)

    patch.setattr(prefix_index.PrefixIndex, "evict_page", evict)


@mutation(42, "the null slot and the null page are handed out", "A21 B18")
def null_handed_out(patch: Patch) -> None:
    whole = Pool.__init__

    def init(self: Any, size: int) -> None:
        whole(self, size)
        self.free.insert(0, 0)

    patch.setattr(Pool, "__init__", init)


@mutation(43, "two rows share a seat", "A20 B17")
def shared_seat(patch: Patch) -> None:
    whole = admission._seat

    def seat(host: Any, request: Any, plan: Any, room: Any) -> bool:
        done = whole(host, request, plan, room)
        if done and len(host.running) > 1:
            request.row_id = request.flights[-1].row_id = host.running[0].row_id
        return done

    patch.setattr(admission, "_seat", seat)


@mutation(44, "the unsettled tokens of a preempted request are counted twice", "A17")
def detached_tokens_twice(patch: Patch) -> None:
    whole = settlement._settle_dead

    def settle(host: Any, row: Any, tokens: Any, emitted: Any) -> None:
        if row.fate is Fate.DETACHED and row.request.status is Status.WAITING:
            whole(host, row, tokens, emitted)
            if not row.request.finished:
                whole(host, row, tokens, emitted)
            return
        whole(host, row, tokens, emitted)

    patch.setattr(settlement, "_settle_dead", settle)


@mutation(45, "a drafting row's pages are published up to what was fed when it is dispatched", "A2 B9 invariant 3")
def decode_published_at_dispatch(patch: Patch) -> None:
    whole = decode_planning.plan_decode

    def plan(host: Any, request: Any, step: Any, *rest: Any) -> int:
        done = whole(host, request, step, *rest)
        if done >= 0:
            row = request.flights[-1]
            if row not in step.effects:
                step.effects.append(row)
        return done

    inner = publication.after_dispatch

    def after(host: Any, row: Any) -> None:
        inner(host, row)
        request = row.request
        if not row.catching_up and host.pages is not None and host.index is not None:
            end = row.length + row.num_tokens
            missing = end - len(request.tokens)
            request.tokens += [1] * max(0, missing)
            try:
                if end // host.config.page_size > request.num_published:
                    host.index.publish_pages(request, end)
            finally:
                if missing > 0:
                    del request.tokens[-missing:]

    patch.setattr(scheduler, "plan_decode", plan)
    patch.setattr(scheduler, "after_dispatch", after)


@mutation(46, "drafts are proposed into a shared page: a whole-prompt hit copies nothing before it samples", "A32 B10")
def proposals_into_shared_page(patch: Patch) -> None:
    whole = prefill_planning.prepare_pages

    def prepare(host: Any, request: Any, end: int, plan: Any, *, preempting: bool) -> Any:
        if end == request.num_computed and not request.flights:
            return True, None
        return whole(host, request, end, plan, preempting=preempting)

    patch.setattr(prefill_planning, "prepare_pages", prepare)


@mutation(47, "two rows of a step may be planned to write one slot", "A21 B18")
def one_slot_for_all(patch: Patch) -> None:
    whole = Pool.take

    def take(self: Any) -> int:
        fresh = whole(self)
        if fresh and self.name == "slots" and self.size > 6:
            used = [i for i in range(1, self.size) if self.refs[i] == 1 and self.owners[i] is None and i != fresh]
            if len(used) > 3:
                self.release(fresh)
                self.refs[used[0]] += 1
                return used[0]
        return fresh

    patch.setattr(Pool, "take", take)


@mutation(48, "a request that asked for prompt log-probabilities reads the cache", "issue: miss reasons")
def logprobs_hit(patch: Patch) -> None:
    def find(host: Any, request: Any) -> Any:
        return None if host.index is None else host.index.find(request.tokens, request.cache_salt)

    patch.setattr(admission, "_find", find)


@mutation(49, "min_tokens does not hold back a stop token", "issue: limits")
def stop_too_early(patch: Patch) -> None:
    whole = settlement.append

    def append(request: Any, tokens: Any) -> Any:
        request.min_tokens = 0
        minimum = whole(request, tokens)
        return minimum

    def wrap(request: Any, tokens: Any) -> Any:
        kept = request.min_tokens
        try:
            return append(request, tokens)
        finally:
            request.min_tokens = kept

    patch.setattr(settlement, "append", wrap)


@mutation(50, "a row goes on from the state before its unsettled chunk", "A12 B17")
def stale_chunk_state(patch: Patch) -> None:
    whole = prefill_planning.plan_catch_up

    def plan(host: Any, request: Any, step: Any, room: Any, *, preempting: bool) -> bool:
        done = whole(host, request, step, room, preempting=preempting)
        if done and len(request.flights) > 1:
            request.flights[-1].read_slot = request.state.current or request.flights[-1].read_slot
        return done

    patch.setattr(scheduler, "plan_catch_up", plan)


# -- faults that cost time or memory: a test of their own looks for each --


@mutation(
    51,
    "prefills get what decoding leaves, and no share",
    "A25 B15",
    "test_limits:test_a_prefill_gets_its_share_while_others_decode_the_budget_away",
)
def no_share(patch: Patch) -> None:
    patch.setattr(budget.Budget, "grant_share", lambda self: None)


@mutation(
    52,
    "states are evicted least recently used first, whatever they are worth",
    "issue: worth",
    "test_eviction:test_interior_states_go_before_the_end_of_an_older_chain",
)
def plain_lru(patch: Patch) -> None:
    patch.setattr(policy.CachePolicy, "rank", lambda self, entry: 1)


@mutation(53, "a branch counts as interior", "invariant 11", "test_eviction:test_a_branch_is_not_interior")
def branch_is_interior(patch: Patch) -> None:
    patch.setattr(policy.CachePolicy, "rank", lambda self, entry: int(not entry.below))


@mutation(
    54,
    "a checkpoint's slots are taken although somebody waits for a seat",
    "invariant 11",
    "test_eviction:test_checkpoints_never_block_admission",
)
def greedy_checkpoints(patch: Patch) -> None:
    patch.setattr(host_state.HostState, "can_spare_slot", lambda self, *, seating=0: True)


@mutation(
    55,
    "a state of little worth displaces one of more",
    "issue: worth",
    "test_eviction:test_a_modest_state_displaces_nothing_of_worth",
)
def immodest(patch: Patch) -> None:
    patch.setattr(policy.CachePolicy, "modest", lambda self, request, position, kind: False)


@mutation(
    56,
    "forks do not wait for the first sibling",
    "issue: forks",
    "test_forks:test_siblings_wait_for_the_first_ones_prompt_end",
)
def forks_do_not_wait(patch: Patch) -> None:
    patch.setattr(admission, "_waits_for_sibling", lambda host, request: False)


@mutation(
    57,
    "align runs over the junction of pages and states",
    "issue: align",
    "test_hits:test_align_publishes_the_junction_of_two_prompts",
)
def no_junction(patch: Patch) -> None:
    whole = policy.CachePolicy.stops
    patch.setattr(policy.CachePolicy, "stops", lambda self, request, hit, matched: whole(self, request, hit, 0))


@mutation(
    58,
    "a resumed request runs over its prompt's end",
    "A17 issue: resume",
    "test_limits:test_a_resumed_request_stops_at_its_prompt_end",
)
def no_stop_at_prompt_end(patch: Patch) -> None:
    patch.setattr(policy.CachePolicy, "stops", lambda self, request, hit, matched: [])


@mutation(
    59,
    "the first in the order makes room for the last",
    "invariant 9",
    "test_limits:test_the_latest_makes_room_and_resumes_from_the_cache",
)
def wrong_victim(patch: Patch) -> None:
    def take(host: Any, request: Any, plan: Any) -> int:
        victims = [other for other in host.running if other is not request]
        if victims:
            preemption.preempt(host, victims[0], plan)
        return host.pages.take()

    patch.setattr(page_planning, "_take_from_others", take)


@mutation(
    60,
    "decode publishes no boundaries",
    "A15",
    "test_hits:test_second_turn_hits_a_block_finished_while_decoding_with_three_drafts",
)
def no_decode_boundaries(patch: Patch) -> None:
    patch.setattr(publication, "_publish_boundary", lambda host, row, boundary, slot: None)


@mutation(
    61,
    "a whole-prompt hit is cut to one token less",
    "A2 B11",
    "test_hits:test_prompt_of_whole_blocks_needs_no_column_before",
)
def never_the_whole_prompt(patch: Patch) -> None:
    def find(host: Any, request: Any) -> Any:
        return host.index.find(request.tokens[:-1], request.cache_salt) if host.index is not None else None

    patch.setattr(admission, "_find", find)


@mutation(62, "who asks under a salt is told what other salts hold", "issue: salting", "test_hits:test_salt_separates")
def telling_tales(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.why_missed

    def why(self: Any, tokens: Any, salt: Any, match: Any) -> Any:
        if any(self.find(tokens, other).entry is not None for other in self.roots):
            return prefix_index.MissReason.SALT_DIFFERS
        return whole(self, tokens, salt, match)

    patch.setattr(prefix_index.PrefixIndex, "why_missed", why)


@mutation(63, "equal pages of twins are held twice", "issue: accounts", "test_hits:test_twins_hold_their_prompt_once")
def held_twice(patch: Patch) -> None:
    whole = prefix_index.PrefixIndex.publish_pages

    def publish(self: Any, request: Any, position: int) -> Any:
        known = dict.fromkeys(request.pages)
        node = whole(self, request, position)
        self.doubles = getattr(self, "doubles", 0) + sum(page not in known for page in request.pages)
        for page in request.pages:
            if page not in known:
                # The page of its own that the request should have given up.
                self.pages.take()
        return node

    patch.setattr(prefix_index.PrefixIndex, "publish_pages", publish)


@mutation(64, "a short prompt tail whose log-probabilities are asked for is a decode row", "invariant 5")
def reporting_tail_decodes(patch: Patch) -> None:
    def fits(host: Any, request: Any, start: int, num_tokens: int) -> bool:
        return start > 0 and num_tokens <= host.width

    patch.setattr(prefill_planning, "_fits_decode_row", fits)
