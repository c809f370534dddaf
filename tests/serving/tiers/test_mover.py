"""Units leave a store and come back into other slots and pages, through memory or files, bit by bit as they were."""

import time
from types import SimpleNamespace
from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mamba_jax.store import Store, StoreShape, init_store
from serving.core.requests.request import RemoteLoad, RemoteState
from serving.core.tiers.tier import Tier, Unit
from serving.core.tiers.tiers import TierCopy, TierHit, Tiers
from serving.state_transfer.programs import Arrangement, PointPrograms
from serving.state_transfer.source import Inbox
from serving.tiers.folder import Folder
from serving.tiers.mover import Layout, Mover
from serving.tiers.storage import Disk, Memory
from tests.serving.core.units import unit as unit_of
from tests.support.models.tiny_configs import FOR_ENGINES

B, PAGE = 8, 4
TOKENS = list(range(19))
SOURCE, TARGET = [1, 3, 5, 7, 2], [4, 6, 8, 10, 9]
PROGRAMS: dict[str, PointPrograms] = {}


class Loop:
    """As much of a step loop as a mover sees."""

    in_flight = False

    def __init__(self, store: Store) -> None:
        self.store, self.done, self.failed = store, [], []
        self.scheduler = SimpleNamespace(arrived=self.done.append, lost=self.failed.append, index=None)

    def replace_store(self, change) -> None:
        self.store = change(self.store)

    def fetch(self, mover: Mover, tier: Tier, unit: Unit, start: int = 0) -> Self:
        """A request that waits for a unit, until it has it or not."""
        request = SimpleNamespace(transfer=SimpleNamespace(load=None))
        remote = RemoteState(unit.position, held=TierHit(tier, unit))
        self.inbox = mover._inbox
        pages = TARGET[start // PAGE :] if mover.layout.kv is not None else []
        request.transfer.load = load = RemoteLoad(request, remote, start, 4, pages)
        mover.fetch(self, load)
        until = time.monotonic() + 60
        while not (self.done or self.failed):
            self.inbox.take_all(idle=True)
            mover.exchange(self)
            assert time.monotonic() < until
        return self


def depart(mover: Mover, tier: Tier, store: Store, tokens=TOKENS) -> Unit:
    """An eviction of the state in slot 2 and the pages of `SOURCE`."""
    unit = unit_of(tokens, block=B)
    change = tier.add(unit)
    assert change is not None
    pages = SOURCE[: -(-len(tokens) // PAGE)] if mover.layout.kv is not None else []
    mover.tiers._copies.append(TierCopy(unit, tier, 2, pages, change, False))
    mover.tiers.copying += change.bytes
    mover.copy_out(store)
    return unit


@pytest.fixture
def movers(tmp_path):
    made = []

    def make(kind: str, model: str = "nemotronh") -> tuple[Mover, Store, Store]:
        """A mover with these tiers, a store of random numbers, and one of zeros."""
        config, rng = FOR_ENGINES[model], np.random.default_rng(0)
        empty = init_store(config, num_slots=6, num_pages=12, page_size=PAGE, dtype=jnp.float32)
        full = jax.tree.map(lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape), leaf.dtype), empty)
        layout = Layout.of(Arrangement(StoreShape.of(config)), empty, B)
        host = Tier("host", 1 << 30, layout.sizes(in_files=False)) if "host" in kind else None
        disk = Tier("disk", 1 << 30, layout.sizes(in_files=True)) if "disk" in kind else None
        tiers = Tiers(host, disk, max_copying=1 << 30)
        programs = PROGRAMS.setdefault(model, PointPrograms(layout.arrangement))
        below = None
        if disk is not None:
            folder = Folder(tmp_path / layout.fingerprint("model"))
            below = Disk(disk, folder, layout.block, with_blocks=layout.kv is not None)
        made.append(Mover(tiers, layout, programs, None if host is None else Memory(host), below, Inbox()))
        return made[-1], full, empty

    yield make
    for mover in made:
        mover.close()


def same(mover: Mover, before: Store, after: Store, start: int = 0) -> None:
    """Slot 4 holds what slot 2 held, pages of `TARGET` what those of `SOURCE` held; nothing else has changed."""
    was, now = (mover.programs.read_state(store, slot) for store, slot in ((before, 2), (after, 4)))
    assert was.keys() == now.keys()
    for name in was:
        np.testing.assert_array_equal(was[name], now[name], err_msg=name)
    for old, new in zip(before.kv, after.kv, strict=True):
        old, new = np.asarray(old), np.asarray(new)
        for at, (source, target) in enumerate(zip(SOURCE, TARGET, strict=True)):
            tokens = min(PAGE, len(TOKENS) - at * PAGE)
            if at * PAGE >= start:
                np.testing.assert_array_equal(old[source][:tokens], new[target][:tokens])
            else:
                assert not new[target].any()
        others = [page for page in range(1, len(new)) if page not in TARGET]
        assert not new[others].any(), "pages of other requests were written"


@pytest.mark.parametrize("kind", ["host", "disk"])
@pytest.mark.parametrize("model", ["nemotronh", "mamba2"])
def test_a_unit_comes_back_as_it_was(movers, model, kind):
    mover, full, empty = movers(kind, model)
    (tier,) = mover.tiers.tiers
    unit = depart(mover, tier, full)
    mover.settle()
    assert mover.tiers.copying == 0
    loop = Loop(empty).fetch(mover, tier, unit)
    assert len(loop.done) == 1
    same(mover, full, loop.store)
    assert mover.tiers.fetching == 0
    assert mover.tiers.fetches[kind].arrived == 1
    assert mover.tiers.fetch_costs.per_byte[tier.name] > 0


def test_only_what_the_device_lacks_is_written(movers):
    mover, full, empty = movers("host")
    unit = depart(mover, mover.tiers.host, full)
    loop = Loop(empty).fetch(mover, mover.tiers.host, unit, start=3 * PAGE)
    same(mover, full, loop.store, start=3 * PAGE)


def test_memory_spills_to_the_disk_and_a_new_process_finds_it(movers):
    mover, full, empty = movers("host disk")
    long = depart(mover, mover.tiers.host, full)
    short = depart(mover, mover.tiers.host, full, TOKENS[:10])
    mover.settle()
    assert mover.tiers.spilling == 0
    assert set(mover.tiers.disk.units) == {long.name, short.name}
    again, *_ = movers("disk")
    assert set(again.tiers.disk.units) == {long.name, short.name}
    same(again, full, Loop(empty).fetch(again, again.tiers.disk, long).store)


def test_sizes_are_those_of_the_files(movers):
    mover, full, _ = movers("disk")
    depart(mover, mover.tiers.disk, full)
    depart(mover, mover.tiers.disk, full, TOKENS[:10])
    mover.settle()
    found = sum(path.stat().st_size for path in mover.disk.folder.path.iterdir())
    assert found <= mover.tiers.disk.used < found + 4 * 4096


@pytest.mark.parametrize("which", ["own", "block"])
def test_what_is_damaged_is_dropped_and_the_request_told(movers, which):
    mover, full, empty = movers("disk")
    unit = depart(mover, mover.tiers.disk, full)
    mover.settle()
    path = mover.disk.folder.file(unit.name if which == "own" else unit.blocks[1])
    path.write_bytes(path.read_bytes()[:-3])
    loop = Loop(empty).fetch(mover, mover.tiers.disk, unit)
    assert (loop.done, len(loop.failed)) == ([], 1)
    mover.settle()
    assert not mover.tiers.disk.units
    assert not list(mover.disk.folder.path.glob("*.safetensors"))


def test_what_memory_has_dropped_meanwhile_is_not_waited_for(movers):
    mover, full, empty = movers("host")
    unit = depart(mover, mover.tiers.host, full)
    mover.tiers.lost(TierHit(mover.tiers.host, unit))
    mover.settle()
    assert not mover.memory._parts
    loop = Loop(empty).fetch(mover, mover.tiers.host, unit)
    assert (loop.done, len(loop.failed)) == ([], 1)
