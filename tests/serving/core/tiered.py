"""Symbolic schedules with tiers below the device: bytes are what the symbolic device has in slots and pages.

What leaves is copied right after each plan, as the engine does it; what comes back arrives late, in any order, or not
at all. A tier's parts are kept by name and deleted when the policy says so: a fetch whose parts are not there fails.
"""

import functools
import random
from typing import Any

from serving.core.cache.content import Scope
from serving.core.planning.plan import StepPlan
from serving.core.requests.request import RemoteLoad
from serving.core.scheduler import Scheduler
from serving.core.tiers.journal import Journal
from serving.core.tiers.tier import Sizes, Tier
from serving.core.tiers.tiers import Tiers
from tests.serving.core.schedules import Run, random_config, run_seed
from tests.serving.core.truth import Truth, expect


class TieredScheduler(Scheduler):
    """Moves parts before and after each plan."""

    run: "TieredRun"

    def schedule(self) -> StepPlan | None:
        """As ever, with departures and arrivals around it."""
        if self.needs_settle_before_schedule():
            return None
        self.run.exchange(all_of_it=False)
        plan = super().schedule()
        self.run.copy_out()
        self.run.exchange(all_of_it=False)
        for _ in range(20):  # one after the other may wait for a tier in vain
            if plan is not None or self.run.waiting_results or not self.queues.unfinished:
                break
            self.run.exchange(all_of_it=True)
            plan = super().schedule()
            self.run.copy_out()
        return plan


class TieredRun(Run):
    """One schedule with tiers of any size."""

    salts = (None, None, "", "salt")
    """An empty salt is a salt: what has none must not find it, below the device either."""

    def __init__(self, seed: int) -> None:
        apart = random.Random(seed * 31 + 7)
        config = random_config(random.Random(seed))
        state, overhead, page = apart.choice([3, 10]), apart.choice([0, 1]), 2 if config.num_pages else 0
        sizes = Sizes(state, page, config.page_size, config.state_block_size, overhead)
        host = Tier("host", apart.choice([20, 60, 1000]), sizes) if apart.random() < 0.8 else None
        disk = Tier("disk", apart.choice([60, 1000]), sizes) if host is None or apart.random() < 0.5 else None
        self.tiers = Tiers(host, disk, max_copying=apart.choice([1, 40, 1000]))
        self.apart, self.journal = apart, Journal(sizes.block)
        self.parts: dict[str, dict[bytes, Any]] = {tier.name: {} for tier in self.tiers.tiers}
        self.loads: list[RemoteLoad] = []
        super().__init__(seed, scheduler=TieredScheduler)
        self.scheduler.use_tiers(self.tiers)
        self.scheduler.tell(self.journal)
        self.scheduler.run = self

    def copy_out(self) -> None:
        """Departures, and what goes for them."""
        self._delete()
        config, device = self.config, self.device
        per_block = config.state_block_size // config.page_size
        for departure in self.tiers.take_copies():
            unit, parts = departure.unit, self.parts[departure.tier.name]
            state = device.slots[departure.slot]
            expect(state[0] == unit.position, "a slot that leaves does not hold its state", state, unit)
            new = {
                name: [list(device.pages[page]) for page in departure.pages_of(at, per_block)]
                for at, name in enumerate(unit.blocks)
                if name in departure.change.blocks
            }
            tail = [list(device.pages[page]) for page in departure.tail_pages(per_block)] if config.num_pages else []
            for name in departure.change.gone:
                parts.pop(name, None)
            lost = self.apart.random() < 0.05
            if not lost:
                parts.update(new)
                parts[unit.name] = (state, tail)
            self.tiers.copying -= departure.change.bytes
            self.coverage["departed"] += 1
            if not departure.memory_only:
                self._spill(departure.unit, parts)
        self._delete()

    def _spill(self, unit, parts) -> None:
        change = self.tiers.spill(unit)
        if change is not None:
            assert self.tiers.disk is not None
            below = self.parts[self.tiers.disk.name]
            for name in change.gone:
                below.pop(name, None)
            for name in (*change.blocks, unit.name):
                if name in parts:
                    below[name] = parts[name]
            self.tiers.spilling -= change.bytes
            self.coverage["spilled"] += 1

    def _delete(self) -> None:
        for tier, names in self.tiers.take_gone():
            for name in names:
                self.parts[tier.name].pop(name, None)

    def exchange(self, *, all_of_it: bool) -> None:
        """Some of what is waited for arrives, or is lost."""
        self.loads += self.scheduler.loads
        self.scheduler.loads = []
        self.apart.shuffle(self.loads)
        waiting, self.loads = self.loads, []
        for load in waiting:
            if not all_of_it and self.apart.random() < 0.85:
                self.loads.append(load)
            elif load.valid:
                self._arrive(load)
            else:
                self.coverage["late"] += 1

    def _arrive(self, load: RemoteLoad) -> None:
        held, request, config = load.remote.held, load.request, self.config
        assert held is not None
        unit, parts = held.unit, self.parts[held.tier.name]
        per_block = config.state_block_size // config.page_size
        found = parts.get(unit.name)
        blocks = [parts.get(name) for name in unit.blocks] if config.num_pages else []
        if found is None or None in blocks or self.apart.random() < 0.05:
            self.coverage["fetch failed"] += 1
            self.tiers.lost(held)
            self.scheduler.lost(load)
            return
        truth = Truth(self.device.model, request.tokens, Scope(request.cache_salt, self.device.weights))
        state, tail = found
        expect(state == (unit.position, truth.digests[unit.position]), "another sequence's state", request, unit)
        self.device.slots[load.slot] = state
        pages = [page for block in blocks for page in block] + tail
        for at, page in enumerate(load.pages, load.start // config.page_size if config.num_pages else 0):
            self.device.pages[page] = list(pages[at])
        expect(not config.num_pages or len(pages) <= len(request.progress.pages.table), "pages are missing")
        expect(not blocks or len(pages) * config.page_size >= unit.position, "keys and values are missing", per_block)
        self.scheduler.arrived(load)
        self.coverage.update(("fetched", f"fetched from {held.tier.name}"))
        self.coverage["fetched whole prompt"] += unit.position == request.prompt_len
        self.coverage["fetched tail"] += unit.tail > 0
        self.device.check_index(self.scheduler)

    def run(self) -> None:
        """To the end, and then the accounts, those of tiers and journal included."""
        super().run()
        self.copy_out()
        self.tiers.check()
        assert self.tiers.copying == self.tiers.spilling == 0
        _check_journal(self)
        for tier in self.tiers.tiers:
            held = {name for unit in tier.units.values() for name in (unit.name, *unit.blocks)}
            assert self.parts[tier.name].keys() <= held, "bytes are kept that no unit needs"
            self.coverage["tier evictions"] += tier.stats.evicted


run_tiered = functools.partial(run_seed, kind=TieredRun)


def _check_journal(run: TieredRun) -> None:
    """What routers are told is what can be gone on from."""
    found = run.journal.snapshot()
    weights = run.device.weights
    assert found.weights == weights
    told: dict[str, set[bytes]] = {}
    for _, tier, state, _ in found.states:
        told.setdefault(tier, set()).add(state.name)
    index = run.scheduler.index
    entries = [entry for entry in index.by_worth() if not entry.stale] if index is not None else []
    expect(told.get("device", set()) == {entry.state.name for entry in entries}, "the device's states", told)
    for tier in run.tiers.tiers:
        names = told.get(tier.name, set())
        # What the disk has from before the weights were replaced is not reported: no request can use it.
        right = names <= tier.units.keys() if weights and tier is run.tiers.disk else names == tier.units.keys()
        expect(right, "a tier's states", tier.name)
    run.coverage["told of"] += len(found.states)
