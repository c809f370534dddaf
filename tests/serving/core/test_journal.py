"""The journal of routing events: a reader knows what is held, or is told that it does not."""

import random

from serving.core.tiers.journal import Journal
from serving.core.tiers.tier import Sizes, Tier
from tests.serving.core.units import B, unit


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


def test_a_tier_tells_what_comes_and_goes():
    journal = Journal(B)
    reader = Reader(journal)
    tier = Tier("host", 60, Sizes(state=10, page=2, page_size=2, block=B), journal=journal)
    rng = random.Random(1)
    for _ in range(300):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        if rng.random() < 0.7:
            tier.add(unit(tokens))
        else:
            tier.drop(unit(tokens).name)
        reader.read()
        assert {name for _, name in reader.held} == tier.units.keys()
