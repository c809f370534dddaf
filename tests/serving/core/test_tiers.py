"""The policy of tiers below the device: what is held, what goes, what is found, and random schedules over all of it."""

import collections
import random
from collections import Counter

import pytest

from serving.core.cache import content
from serving.core.cache.content import Chain, Scope, link, root, state_name
from serving.core.tiers.journal import Journal
from serving.core.tiers.tier import Sizes, Tier, Unit
from serving.core.tiers.tiers import FetchCosts, Tiers
from tests.serving.core.drive import Loop
from tests.serving.core.schedules import run_seeds
from tests.serving.core.test_fuzz import SHARDS
from tests.serving.core.tiered import run_tiered
from tests.serving.core.truth import Violation
from tests.serving.core.units import B, unit

SIZES = Sizes(state=10, page=2, page_size=2, block=B)


def test_names_depend_on_all_tokens_before_and_on_the_scope():
    scopes = [Scope(None, adapter=adapter) for adapter in (None, "a", "b")]
    scopes += [Scope(""), Scope("a"), Scope("a", 1), Scope("a", adapter="a")]
    assert len(set(map(root, scopes))) == len(scopes)
    assert link(root(Scope(None)), [1, 2]) != link(root(Scope(None)), [1, 3]) != link(root(Scope("a")), [1, 3])
    assert state_name(root(Scope(None)), [1]) != link(root(Scope(None)), [1])
    chain = Chain(Scope(None), 2)
    assert chain.reach([1, 2, 3])[-1] == link(root(Scope(None)), [1, 2])
    assert chain.reach([1, 2, 3, 4])[-1] == link(link(root(Scope(None)), [1, 2]), [3, 4])


def test_the_least_recently_used_goes_first_and_what_is_worth_little_before_it():
    tier = Tier("host", 45, SIZES)  # three states of fewer tokens than a block
    units = [unit([i, i]) for i in range(5)]
    tier.add(units[0])
    tier.add(units[1], spare=True)
    tier.add(units[2])
    assert tier.add(units[3]) == ([], [units[1].name], 12)
    tier.touch(units[0].name)
    assert tier.add(units[4]) == ([], [units[2].name], 12)
    assert tier.stats.evicted == 2
    tier.check()


def test_a_client_below_its_share_of_a_tier_loses_nothing_to_others():
    """The third of three clients floods a tier whose units share blocks, with its own and with the victim's."""
    tier = Tier("disk", 400, SIZES)
    victims = [unit([1] * length)._replace(client="victim") for length in (9, 13, 17)]
    other = unit([2] * 6)._replace(client="other")
    for each in (*victims, other):
        assert tier.add(each, spare=each is victims[0]) is not None
    for n in range(10, 90):
        for tokens in ([n] * 9, [*[1] * 8, n]):
            assert tier.add(unit(tokens)._replace(client="attacker")) is not None
        tier.check()
    assert {victims[0].name, victims[1].name, victims[2].name, other.name} < tier.units.keys()
    assert tier.stats.evicted > 100
    for n in range(10, 90):
        tier.add(unit([n, *[2] * 8])._replace(client="victim"))
    held = Counter(each.client for each in tier.units.values())
    assert held["other"] == 1, "it holds less than its share"
    assert held["victim"] > 5, "the other two divide the rest"
    assert held["attacker"] > 5
    assert tier.used > 360, "all of it is used"


def test_a_unit_may_count_for_another_client_when_it_comes_again():
    """The place in the queue of the client that had it before must not be taken for the new one."""
    tier = Tier("disk", 10**6, SIZES)
    again = unit([1] * 9)._replace(client="a")
    tier.add(again)
    for n in range(30, 35):
        tier.add(unit([n] * 9)._replace(client="a"))
    tier.drop_external(again.name)
    tier.add(again._replace(client="b"))
    tier.capacity = tier.used
    change = tier.add(unit([40] * 9)._replace(client="a"))
    assert change is not None
    assert again.name not in change.gone, "a holds more than b"


def test_units_count_for_the_client_that_computed_them():
    loop = Loop().run_each([[1] * 6], client="a")
    assert {Unit.of(entry, B).client for entry in loop.index.by_worth()} == {"a"}


def test_what_was_noted_of_a_unit_is_not_trusted():
    """Names alone decide: a unit whose links were damaged on the disk is found by its tokens, with the right links."""
    tier, tokens = Tier("disk", 1000, SIZES), list(range(6))
    right = unit(tokens)
    tier.add(right._replace(links=(*right.links[:-1], right.links[-1]), position=99))
    found = tier.find(Chain(Scope(None), B), tokens, 0)
    assert found is not None
    assert (found.position, found.links) == (6, right.links)


def test_fetching_is_tried_until_it_is_known_to_be_dearer_and_again_after_a_while():
    prices = FetchCosts()
    assert prices.worth_fetching("disk", 10**9, 1)
    prices.computed(100, 0.1)
    prices.fetched("disk", 1000, 1.0)
    assert prices.worth_fetching("disk", 1000, 2000)
    assert not prices.worth_fetching("disk", 1000, 900)
    assert prices.worth_fetching("host", 1000, 1), "another tier's speed says nothing"
    refused = 1
    while not prices.worth_fetching("disk", 1000, 500):
        refused += 1
    assert 10 < refused < 200


def test_what_other_weights_computed_never_goes_to_the_disk():
    disk = Tier("disk", 1000, SIZES)
    tiers = Tiers(Tier("host", 1000, SIZES), disk, max_copying=1000)
    before, after = unit([1] * 5), unit([2] * 5)
    assert tiers.host is not None
    tiers.host.add(before)
    assert tiers.spill(before) is not None
    tiers.outdate()
    assert not tiers.host.units
    tiers.host.add(after)
    tiers.host.touch(after.name)
    assert tiers.spill(after) is None
    assert list(disk.units) == [before.name]


def test_what_others_do_to_a_disk_counts_like_the_own():
    disk = Tier("disk", 45, SIZES)
    tiers = Tiers(None, disk, max_copying=1000)
    own, brought, more = unit([1] * 9), unit([1] * 10), unit([2] * 9)
    disk.stored(disk.add(own))
    tiers.sync_external([], [brought, own], [])
    assert (set(disk.units), disk.stats.stored) == ({own.name, brought.name}, 1)
    tiers.sync_external([], [], [own.name])
    tiers.sync_external([], [more], [])
    assert brought.name not in disk.units, "the one that was used for longest ago had to go"
    assert brought.name in [name for _, names in tiers.take_gone() for name in names]
    tiers.sync_external([own.blocks[0]], [], [])
    assert set(disk.units) == {more.name}
    assert [name for _, names in tiers.take_gone() for name in names] == [own.name], "blocks are for others to remove"
    tiers.sync_external([more.name], [], [])
    assert (len(disk), disk.used, tiers.take_gone()) == (0, 0, [(disk, [])])
    tiers.outdate()
    tiers.sync_external([], [more], [])
    assert not disk.units, "states of other weights are never found"
    disk.check()


REACHED = (
    "departed", "spilled", "fetched", "fetched from host", "fetched from disk", "fetched whole prompt", "fetched tail",
    "fetch failed", "late", "tier evictions", "preemptions", "reset", "withdrawn", "abort running", "weight_changes",
)  # fmt: skip


@pytest.mark.fuzz
@pytest.mark.smoke
@pytest.mark.parametrize("shard", range(SHARDS))
def test_random_schedules_with_tiers(shard: int, request: pytest.FixtureRequest) -> None:
    count = max(100, request.config.option.examples // 10 // SHARDS)
    first = 5_000_000_000 + shard * 1_000_000
    run_seeds(run_tiered, range(first, first + count), REACHED if count >= 400 else ())


LEFT_OUT = {
    "salt": lambda scope: scope._replace(salt=None),
    "empty salt": lambda scope: scope._replace(salt=scope.salt or None),
    "weights": lambda scope: scope._replace(weights=0, lineage=0),
}


@pytest.mark.parametrize("part", LEFT_OUT)
def test_a_part_of_the_scope_that_names_leave_out_is_seen(part, monkeypatch):
    """A name below the device that lacks it lets a request go on from another's state."""
    monkeypatch.setattr(content, "root", lambda scope: root(LEFT_OUT[part](scope)))
    with pytest.raises(Violation):
        collections.deque(map(run_tiered, range(2, 2000, 4)), maxlen=0)  # those with changes of weights


def test_random_books():
    """After any sequence of verbs, what is held is what was added and is not said to be gone."""
    rng = random.Random(5)
    tier = Tier("disk", 800, Sizes(state=10, page=2, page_size=2, block=B, overhead=3))
    held: dict[bytes, tuple[str | None, list[int], set[bytes]]] = {}
    sequences = [[rng.randrange(2) for _ in range(length)] for length in (24, 24, 24, 24, 99)]  # one may not fit

    def blocks() -> set[bytes]:
        return {block for *_, own in held.values() for block in own}

    for _ in range(3000):
        salt, tokens = rng.choice([None, "salt"]), rng.choice(sequences)
        tokens = tokens[: rng.randrange(1, len(tokens))]
        gone, lost, before = [], set(), blocks()
        match rng.randrange(8):
            case 0:  # all that begins like it
                gone = tier.forget(Chain(Scope(salt), B), tokens)
                lost = {name for name, (other, each, _) in held.items()
                        if other == salt and each[:B] == tokens[: min(B, len(each))]}  # fmt: skip
            case 1 if held:
                lost = {rng.choice(list(held))}
                gone = tier.drop(*lost)
            case 2 if held:
                tier.touch(rng.choice(list(held)), spare=rng.random() < 0.5)
            case 3 if before:
                block = rng.choice(sorted(before))
                gone, lost = tier.drop_block(block), {name for name, (*_, own) in held.items() if block in own}
            case _:
                new = unit(tokens, salt)._replace(client=rng.choice("ab"))
                change = tier.add(new, spare=rng.random() < 0.3)
                if change is not None:
                    held[new.name] = salt, tokens, set(new.blocks)
                    gone, lost = change.gone, {name for name in change.gone if name in held}
                    assert set(change.blocks) == set(new.blocks) - before, "blocks are held once"
        assert {name for name in gone if name in held} == lost
        before = blocks()
        for name in lost:
            del held[name]
        assert sorted({*gone} - lost) == sorted(before - blocks()), "blocks go with the last unit that needs them"
        assert tier.units.keys() == held.keys()
        tier.check()
        beyond = rng.randrange(12)
        deepest = max((len(each) for other, each, _ in held.values()
                       if other == salt and each == tokens[: len(each)]), default=0)  # fmt: skip
        found = tier.find(Chain(Scope(salt), B), tokens, beyond)
        assert (found.position if found is not None else 0) == (deepest if deepest > beyond else 0)
    assert min(tier.stats.not_kept, tier.stats.evicted, tier.stats.lost) > 10


class Reader:
    """Holds what it was told of, by tier and name."""

    def __init__(self, journal: Journal) -> None:
        self.journal, self.began = journal, 0
        self.begin()

    def begin(self) -> None:
        found = self.journal.snapshot()
        self.began += 1
        self.number, self.weights = found.number, found.weights
        self.held = {(tier, state.name): state for _, tier, state, _ in found.states}

    def read(self, most: int = 512) -> bool:
        events = self.journal.since(self.number, most)
        if events is None:
            self.begin()
            return False
        for event in events:
            assert event.number == self.number + 1, "an event was left out, or came twice"
            self.number = event.number
            key = (event.tier, event.state.name)
            assert (key in self.held) != event.stored, "said twice"
            if event.stored:
                self.held[key] = event.state
            else:
                del self.held[key]
        return True


def test_readers_at_any_pace_know_what_is_held():
    rng = random.Random(4)
    journal = Journal(B, most=20)
    prompt, slow = Reader(journal), Reader(journal)
    held: dict[tuple[str, bytes], object] = {}
    for _ in range(3000):
        state, tier = unit([rng.randrange(2) for _ in range(rng.randrange(1, 7))]).state, rng.choice(["device", "host"])
        match rng.randrange(40):
            case 0:
                journal.lost(tier)
                held = {key: state for key, state in held.items() if key[0] != tier}
            case 1:
                journal.outdate()
                held.clear()
            case choice if choice % 2:
                journal.stored(tier, state)
                held[tier, state.name] = state
            case _:
                journal.evicted(tier, state.name)
                held.pop((tier, state.name), None)
        prompt.read()
        assert prompt.held == held
        if rng.random() < 0.05 and slow.read():
            assert slow.held == held
    assert prompt.weights > 0
    assert 1 < prompt.began < 400
    assert slow.began > prompt.began / 4, "one that is slow has begun anew"


def test_a_reader_that_is_too_slow_is_told_so():
    journal = Journal(B, most=5)
    number = journal.snapshot().number
    for length in range(1, 7):
        journal.stored("device", unit([7] * length).state)
    assert journal.since(number) is None
    assert [event.number for event in journal.since(number + 1)] == [2, 3, 4, 5, 6]
    assert [event.number for event in journal.since(number + 2, most=2)] == [3, 4]
    assert journal.since(6) == []
    assert journal.since(7) is None, "a number of another server's"
