"""A device for `serving.core` alone, on which everything is checked.

A slot holds (n, digest of the n tokens it absorbed), a page one digest per position, of all tokens up to there: equal
digests stand for equal tokens. Under replay each seat has a tail, a ring of tokens that is never cleared: with those
since its anchor absorbed, the anchor's slot must give the row's state. The model is a function from the digest to the
next token, so plain greedy output is known for every prompt, and a state or page that is not exactly what it should be
is seen when it is read. Dispatched plans run at once (that is what running in order means to the host), in an order of
programs and rows that a real device might choose; their results are kept back until the driver settles them.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from serving.core.cache.content import Scope
from serving.core.cache.prefix_tree import Node
from serving.core.cache.row_forms import ReplayAccess
from serving.core.config import SchedulerConfig
from serving.core.planning.plan import DecodeRow, Row, StepPlan, StepResult
from serving.core.requests.request import Request
from serving.core.scheduler import Scheduler
from tests.serving.core.truth import Model, Truth, Violation, absorb, expect, start_digest

JUNK = -1
SlotWrites = list[tuple[int, tuple[int, int]]]
"""Slots, and what is written to each: how many tokens it absorbed, and their digest."""


@dataclass
class DeviceRow:
    """The device's own truth about a row."""

    length: int = JUNK
    slot: int = JUNK
    """Of S(length), or of the anchor."""
    anchor: int = JUNK
    """How many tokens the slot has absorbed, under replay."""
    last_token: int = JUNK
    drafts: list[int] = field(default_factory=list)
    owner: Request | None = None


class Device:
    """Slots, pages and rows, and the two programs."""

    def __init__(self, config: SchedulerConfig, model: Model, rng: random.Random, rightness: float) -> None:
        self.config, self.model, self.rng, self.rightness = config, model, rng, rightness
        self.truths: dict[Request, Truth] = {}
        self.weights = 0
        self.wipe()

    def wipe(self) -> None:
        """The store is lost: nothing holds anything any more."""
        config = self.config
        self.slots: list[tuple[int, int]] = [(JUNK, JUNK)] * config.num_slots
        self.pages: list[list[int]] = [[JUNK] * config.page_size for _ in range(config.num_pages)]
        self.rows = [DeviceRow() for _ in range(config.num_rows + 1)]
        # A tail has tokens since the anchor and those of one step.
        size = 1 << (config.replay_interval + config.num_speculative_tokens - 1).bit_length()
        self.tails: list[list[int]] = [[JUNK] * size for _ in self.rows]

    def change_weights(self) -> None:
        """Another model from now on: what was said stays said, and is gone on from by the new one."""
        self.weights += 1
        for request in self.truths:
            if not request.finished:
                self.truths[request] = Truth(self.model, request.tokens, Scope(request.cache_salt, self.weights))

    def truth(self, request: Request) -> Truth:
        """A request's greedy sequence."""
        if request not in self.truths:
            prompt = request.tokens[: request.prompt_len]
            self.truths[request] = Truth(self.model, prompt, Scope(request.cache_salt, self.weights))
        return self.truths[request]

    def run(self, plan: StepPlan, scheduler: Scheduler) -> StepResult:
        """Do a step; returns what its rows emitted."""
        for request in plan.admitted:
            if not request.finished:
                self.rows[request.progress.row_id] = DeviceRow(owner=request)
        self._check_shape(plan)
        result = StepResult([], [])
        programs = [(plan.decode, result.decode), (plan.prefill, result.prefill)]
        if self.rng.random() < 0.5:
            programs.reverse()
        for rows, results in programs:
            self._program(rows, results, scheduler)
        return result

    def _check_shape(self, plan: StepPlan) -> None:
        """Limits, row classes, and that no two rows write the same slot or have the same row id."""
        config = self.config
        width, known = 1 + config.num_speculative_tokens, config.known_tokens_in_decode_row
        expect(len(plan.decode) <= config.num_rows, "too many decode rows")
        expect(len(plan.prefill) <= config.max_prefill_rows, "too many prefill rows")
        expect(sum(len(row.access.writes) for row in plan.prefill) <= config.tiles, "too many tiles")
        limit = config.max_num_batched_tokens + min(config.tile_size, config.max_num_batched_tokens)
        expect(sum(row.num_tokens for row in plan.rows) <= limit, "too many tokens")
        written: set[int] = set()
        row_ids: set[int] = set()
        for row in plan.rows:
            expect(0 < row.row_id <= config.num_rows and row.row_id not in row_ids, "row id taken twice", row)
            row_ids.add(row.row_id)
            if config.chunks_end_at_blocks and row.is_prefill and row.num_tokens:
                block = config.state_block_size
                expect((row.end - 1) // block == row.length // block, "a chunk runs over a multiple of B", row)
            # Decode steps report no log-probabilities of prompt tokens.
            reports = row.request.prompt_logprobs and row.length < row.request.prompt_len
            if isinstance(row, DecodeRow):
                expect(row.length > 0 and row.num_tokens <= width and not reports, "not a decode row", row)
                expect(row.num_tokens <= known or not row.is_prefill, "a chunk that must end in a slot", row)
                if isinstance(row.access, ReplayAccess):
                    expect(len(row.access.writes) <= 1, "more than one spare", row)
                else:
                    expect(len(row.access.writes) == row.num_tokens, "a write slot for each token", row)
            else:
                expect(row.num_tokens > 0, "an empty prefill row", row)
                expect(row.length == 0 or row.num_tokens > known or reports, "should be a decode row", row)
                tiles = -(-row.end // config.tile_size) - row.length // config.tile_size
                expect(len(row.access.writes) == tiles, "a write slot for each tile", row)
            real = [slot for slot in row.access.writes if slot]
            expect(len(set(real)) == len(real) and written.isdisjoint(real), "slot written by two", row)
            written.update(real)

    def _program(self, rows: Sequence[Row], results: list[list[int]], scheduler: Scheduler) -> None:
        """One program: reads of slots before writes of slots, copies of pages before writes before reads of pages."""
        copies = [(row.page_copy, list(self.pages[row.page_copy[0]])) for row in rows if row.page_copy is not None]
        for (_, target), content in copies:
            self._check_page_write(target, scheduler, "a copy")
            self.pages[target] = content
        slot_writes: SlotWrites = []
        slot_reads: set[int] = set()
        reads: list[tuple[Row, int]] = []
        for row in rows:
            others = {slot for slot, _ in slot_writes}
            end, emitted, read = self._row(row, slot_writes, scheduler)
            # Kernels read a row's state while another row's is written.
            expect(read not in others, "a slot is read by one row and written by another", read, row)
            mine = {slot for slot, _ in slot_writes} - others
            expect(mine.isdisjoint(slot_reads), "a slot is written by one row and read by another", mine, row)
            slot_reads |= {read} - {0}
            results.append(emitted)
            reads.append((row, end))
        if self.config.num_pages:
            for row, end in reads:
                self._check_pages(row, end)
        self.rng.shuffle(slot_writes)
        for slot, content in slot_writes:
            expect(scheduler.cache.pools[0].owners[slot] is None, "a published slot is written", slot)
            self.slots[slot] = content

    def _row(self, row: Row, slot_writes: SlotWrites, scheduler: Scheduler) -> tuple[int, list[int], int]:
        """One row: how many tokens its sequence has absorbed of which all are right, what it emitted, where it read."""
        own, request = self.rows[row.row_id], row.request
        live = not request.finished
        expect(not live or own.owner is request, "the row id was never given to this request", row)
        if not row.is_prefill:
            start, read, anchor = own.length, own.slot, own.anchor
            tokens: Sequence[int] = [own.last_token, *own.drafts[: row.num_drafts]]
            expect(len(tokens) == row.num_tokens, "the device has fewer drafts than the plan", row)
            expect(0 <= row.length - start <= self.config.num_speculative_tokens, "length is off", row, start)
        else:
            start, read, tokens = row.length, row.access.read, list(row.tokens)
            anchor = start
            expect(len(tokens) == row.num_tokens, "tokens are missing", row)
        truth = self.truth(request)
        truth.reach(start + row.num_tokens + 1)
        if start:
            expect(read > 0, "the null slot is read", row)
            n, digest = self._replayed(read, anchor, start, self.tails[row.row_id])
            expect((n, digest) == (start, truth.digests[start]), "wrong state: slot", read, "has", n, "not", start, row)
        else:
            digest = start_digest(Scope(request.cache_salt, self.weights))
        fed = row.num_tokens
        states = list(accumulate(tokens, absorb, initial=digest))[1:]
        certain = row.num_tokens - row.num_drafts
        expect(list(tokens[:certain]) == truth.tokens[start : start + certain], "wrong tokens", row)
        self._write_pages(row, start, states, scheduler)
        emitted: list[int] = []
        kept = fed
        if row.sample:
            if not fed:
                emitted.append(self.model.next(digest))
            else:
                kept = certain
                while True:
                    emitted.append(self.model.next(states[kept - 1]))
                    if kept == fed or tokens[kept] != emitted[-1]:
                        break
                    kept += 1
            expect(start + kept >= request.prompt_len, "sampled before the prompt's end", row)
        own.length = own.anchor = start + kept
        if isinstance(row, DecodeRow) and self.config.replay_interval > 1:
            self._extend_tail(row, own, slot_writes, read, anchor, start, list(zip(tokens, states, strict=True)))
        elif isinstance(row, DecodeRow):
            slot_writes += [(slot, (start + t + 1, states[t])) for t, slot in enumerate(row.access.writes) if slot]
            own.slot = row.access.writes[kept - 1] if kept else read
        else:
            tile = self.config.tile_size
            for i, slot in enumerate(row.access.writes):
                end = min((start // tile + i + 1) * tile, start + fed)
                if slot:
                    slot_writes.append((slot, (end, states[end - start - 1])))
            own.slot = row.access.writes[-1]
        expect(own.slot, "the sequence goes on from nowhere", row)
        if row.sample:
            own.last_token = emitted[-1]
            own.drafts = self.propose(truth, start + kept + 1)
            # While drafts are proposed, the device writes beyond the kept tokens.
            self._write_pages(row, start + kept, [JUNK] * self.config.num_lookahead_tokens, scheduler)
        return start + kept, emitted, read if start else 0

    def _replayed(self, slot: int, anchor: int, length: int, tail: list[int]) -> tuple[int, int]:
        """The state after `length` tokens, from a slot and the inputs since."""
        n, digest = self.slots[slot]
        expect(n == anchor, "wrong anchor: slot", slot, "has", n, "not", anchor)
        expect(length - anchor <= len(tail), "a tail that does not reach back to its anchor", anchor, length)
        for at in range(anchor, length):
            digest = absorb(digest, tail[at % len(tail)])
        return length, digest

    def _extend_tail(
        self, row: DecodeRow, own: DeviceRow, slot_writes: SlotWrites, read: int, anchor: int, start: int,
        fed: list[tuple[int, int]],
    ) -> None:  # fmt: skip
        """A decode step under replay: inputs into the tail, and the state at a multiple of R, if it is reached."""
        tail, interval = self.tails[row.row_id], self.config.replay_interval
        expect(start - anchor + len(fed) <= len(tail), "the tail is too short", row)
        for t, (token, _) in enumerate(fed):
            tail[(start + t) % len(tail)] = token
        own.slot, own.anchor = read, anchor
        reached = start - start % interval + interval
        if start < reached <= start + len(fed):
            expect(row.access.writes, "nowhere to write the state at a multiple of R", row)
            slot_writes.append((row.access.writes[0], (reached, fed[reached - start - 1][1])))
            if own.length >= reached:
                own.slot, own.anchor = row.access.writes[0], reached

    def propose(self, truth: Truth, n: int) -> list[int]:
        """Drafts after n tokens: right, wrong, or nothing (-1)."""
        count = self.config.num_speculative_tokens
        truth.reach(n + count)
        drafts = []
        for token in truth.tokens[n : n + count]:
            if self.rng.random() < self.rightness:
                drafts.append(token)
            else:
                drafts.append(self.rng.randrange(-1, self.model.vocab))
        return drafts

    # -- pages --

    def _page_at(self, row: Row, position: int) -> int:
        at = position // self.config.page_size
        return row.pages[at] if at < len(row.pages) else 0

    def _check_page_write(self, page: int, scheduler: Scheduler, who: object) -> None:
        pool = scheduler.cache.pages
        expect(pool.owners[page] is None, "a published page is written", page, who)
        expect(pool.refs[page] <= 1, "a shared page is written", page, who)

    def _write_pages(self, row: Row, start: int, states: list[int], scheduler: Scheduler) -> None:
        if not self.config.num_pages:
            return
        size = self.config.page_size
        for t, digest in enumerate(states):
            page = self._page_at(row, start + t)
            if page:
                self._check_page_write(page, scheduler, row)
                self.pages[page][(start + t) % size] = digest

    def _check_pages(self, row: Row, end: int) -> None:
        """A row's tokens see all positions before them: each must be there, and right."""
        if row.request.finished:
            return
        truth, size = self.truth(row.request), self.config.page_size
        # The very last token that a sequence can have is never fed; what optimism puts there needs no page.
        end = min(end, row.request.max_total - 1)
        digests = truth.digests
        for at in range(0, end, size):
            page = self._page_at(row, at)
            members = self.config.context_members
            owner = page * members // self.config.num_pages
            expect(not page or owner == at // size % members, "a page of another member", page, row)
            stop = min(end, at + size)
            if self.pages[page][: stop - at] != digests[at + 1 : stop + 1]:
                raise Violation(f"wrong page {page} at {at}: of {row}")

    # -- the index --

    def check_index(self, scheduler: Scheduler) -> None:
        """Everything that can be found is what it says it is."""
        index = scheduler.index
        if index is None:
            return
        size, slots, pool = self.config.page_size, scheduler.cache.slots, scheduler.cache.pages
        slots_found: list[int] = []
        pages_found: list[int] = []
        for scope, root in index.roots.items():
            stack: list[tuple[Node, list[int]]] = [(root, [start_digest(scope)])]
            while stack:
                node, digests = stack.pop()
                if node is not root and pool:
                    expect(self.pages[node.page] == digests[-size:], "a page in the index is wrong", node.page)
                    expect(pool.owners[node.page] is node, "a page in the index is not its own", node.page)
                    pages_found.append(node.page)
                for tail, entry in node.states.items():
                    ends = list(accumulate(tail, absorb, initial=digests[-1]))
                    expect(entry.position == len(digests) - 1 + len(tail), "position of a state", entry.position)
                    found = self.slots[entry.slot]
                    expect(found == (entry.position, ends[-1]), "a state in the index is wrong", entry.slot, found)
                    expect(slots.owners[entry.slot] is entry, "a state is not its own", entry.slot)
                    slots_found.append(entry.slot)
                    if tail and pool:
                        pages_found.append(entry.page)
                        expect(self.pages[entry.page][: len(tail)] == ends[1:], "a tail's page is wrong", entry.page)
                for key, child in node.children.items():
                    stack.append((child, digests[:-1] + list(accumulate(key, absorb, initial=digests[-1]))))
        for name, owners, found in (("slot", slots.owners, slots_found), ("page", pool.owners, pages_found)):
            owned = [i for i, owner in enumerate(owners) if owner is not None]
            expect(sorted(found) == owned, f"a published {name} cannot be found", found, owned)
