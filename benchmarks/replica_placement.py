"""Simulates many replicas under agents' traffic, to compare routing by affinity, by events, and by events with tiers.

    python -m benchmarks.replica_placement [--replicas 1,8,64] [--requests 100] [--policies affinity,events,tiers]

Sessions begin with one of many system prompts (Zipf's law) and continue for several turns of user and tool messages,
each after a pause. A replica is one server: it computes the prompt tokens that are not in its cache one after the
other, then decodes the answer in a batch. Its device holds a number of states with their pages, managed by a tier
(`serving.core.tiers.tier`); with tiers, its host memory holds more. Policies:

* `affinity`: rendezvous hashing of the prompt's beginning, as in the router, except to a replica that is much busier.
* `events`: the shortest expected time to the first token: waiting work, plus the tokens that the replica would have to
  compute according to the states that it reported (`serving.core.tiers.directory`).
* `tiers`: the same, and hosts hold what devices evict.
* `router`: the router's own rule (`serving.core.placing`), which counts tokens, not seconds: as `tiers`, but by
  affinity where no replica has a state, and without the cost of fetching.

A line of JSON each: `hits` (prompt tokens not computed, by those an infinite cache shared by all would find), `balance`
(the largest replica's work by the mean), and the mean and 99th percentile of time to the first token.
"""

import argparse
import hashlib
import heapq
import math
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from serving.core import CheckpointKind
from serving.core.cache.prefix_tree import Scope
from serving.core.placing import price
from serving.core.tiers.content import Chain, Name, state_name
from serving.core.tiers.directory import Directory
from serving.core.tiers.tier import Sizes, Tier, Unit

GRAIN = 16
"""Tokens that one simulated token stands for."""
B = 256 // GRAIN
STATE = 400
"""A state in pages of 16 tokens: 100 MB by 16 kB a token."""
PREFILL = 8000 / GRAIN
"""Prompt tokens a second."""
FETCH = 40_000
"""Pages a second from the host: about 10 GB/s."""
DECODE = 0.02
"""Seconds per token of an answer in a batch."""
LATELY = 60.0
"""Seconds after which work counts for a third of what it did."""
EVENNESS = 0.8
"""Seconds that a replica must save for having had twice its share of work lately."""
POLICIES = ("affinity", "events", "tiers", "router")
SLACK = 4
"""`router`: how many requests more than the least busy replica one may have for affinity."""
SCOPE = Scope(None)


@dataclass(slots=True)
class Session:
    """One agent's conversation: what it says next, and when."""

    tokens: list[int]
    turns: int
    rng: random.Random
    chain: Chain = field(default_factory=lambda: Chain(SCOPE, B))
    system: int = 0
    """Tokens of the system prompt."""
    served: int = 0
    """Tokens of the last prompt that was answered."""

    def answered(self, answer: int) -> float:
        """Append the answer and the next message; returns the pause before it."""
        rng = self.rng
        message = rng.randrange(40, 400) if rng.random() < 0.6 else rng.randrange(400, 2400)
        self.tokens += [rng.getrandbits(40) for _ in range(max(1, (answer + message) // GRAIN))]
        self.turns -= 1
        return rng.expovariate(1 / 8)


class Replica:
    """Books of one replica's device and host, and when it has worked off what waits."""

    def __init__(self, number: int, room: int, host: int, directory: Directory) -> None:
        sizes = Sizes(state=STATE, page=1, page_size=1, block=B)
        self.number, self.directory = number, directory
        self.device = Tier("device", room * STATE, sizes)
        self.host = Tier("host", host * STATE, sizes) if host else None
        self.free_at = self.work = 0.0
        self._recent = self._at = 0.0
        self._ends: list[float] = []

    def begun(self, end: float) -> None:
        """A request that it has taken will end then."""
        heapq.heappush(self._ends, end)

    def load(self, now: float) -> int:
        """Requests under way."""
        while self._ends and self._ends[0] <= now:
            heapq.heappop(self._ends)
        return len(self._ends)

    def recent(self, now: float) -> float:
        """Seconds of work, those of long ago counted less."""
        return self._recent * math.exp((self._at - now) / LATELY)

    def cost(self, position: int, tokens: int, now: float, *, on_host: bool) -> float:
        """Seconds until an answer to so many tokens could begin, if it goes on from a position."""
        fetch = (STATE + position) / FETCH if on_host else 0.0
        return max(0.0, self.free_at - now) + (tokens - position) / PREFILL + fetch

    def serve(self, session: Session, now: float) -> tuple[int, float]:
        """Take a request; returns the tokens that it did not compute, and when the answer begins."""
        tokens, chain = session.tokens, session.chain
        found = self.device.find(chain, tokens, 0)
        position, fetch = (found.position if found is not None else 0), 0.0
        if found is not None:
            self.device.touch(found.name)
        below = self.host.find(chain, tokens, position) if self.host is not None else None
        if below is not None and self.host is not None:
            gain = (below.position - position) / PREFILL
            seconds = self.host.sizes.unit(below) / FETCH
            if seconds < gain:
                self.host.touch(below.name)
                position, fetch = below.position, seconds
        seconds = (len(tokens) - position) / PREFILL
        begin = max(now + fetch, self.free_at) + seconds
        self.free_at = begin
        self._recent, self._at = self.recent(now) + seconds, now
        self.work += seconds
        for length in (session.system - session.system % B, len(tokens)):
            if length:
                self._hold(chain, tokens, length)
        return position, begin

    def _hold(self, chain: Chain, tokens: Sequence[int], length: int) -> None:
        links = chain.reach(tokens)[: length // B + 1]
        tail = tokens[len(links) * B - B : length]
        unit = Unit(state_name(links[-1], tail), tuple(links), len(tail), length, CheckpointKind.PROMPT_END)
        self._store(self.device, unit)

    def _store(self, tier: Tier, unit: Unit) -> None:
        held = dict(tier.units) if tier.used + tier.sizes.unit(unit) > tier.capacity else {}
        change = tier.add(unit)
        if change is None:
            return
        self.directory.stored(self.number, tier.name, unit.state)
        for name in change.gone:
            left = held.get(name)
            if left is not None:
                self.directory.evicted(self.number, tier.name, left.name)
                if tier is self.device and self.host is not None:
                    self._store(self.host, left)


class Infinite:
    """A cache that all replicas share and that forgets nothing."""

    def __init__(self) -> None:
        self._systems: set[Name] = set()

    def serve(self, session: Session) -> int:
        """Tokens of a prompt that it has; it then has all of them."""
        length = session.system - session.system % B
        name = session.chain.reach(session.tokens)[length // B]
        found = session.served or (length if name in self._systems else 0)
        self._systems.add(name)
        return found


def sessions(seed: int, prompts: int = 200, zipf: float = 1.1) -> Iterator[Session]:
    """Endless sessions, each with its system prompt."""
    rng = random.Random(seed)
    systems = [[rng.getrandbits(40) for _ in range(rng.randrange(300, 4000) // GRAIN)] for _ in range(prompts)]
    weights = [1 / (rank + 1) ** zipf for rank in range(prompts)]
    while True:
        (system,) = rng.choices(systems, weights)
        own = random.Random(rng.getrandbits(64))
        first = [own.getrandbits(40) for _ in range(own.randrange(50, 600) // GRAIN)]
        turns = min(20, 1 + int(own.expovariate(1 / 6)))
        yield Session(system + first, turns, own, system=len(system))


def affine(session: Session, replicas: Sequence[Replica], now: float, slack: float) -> Replica:
    """By the prompt's beginning: by rendezvous among those not much busier than the least busy."""
    least = min(max(0.0, replica.free_at - now) for replica in replicas)
    return _rendezvous(session, [each for each in replicas if max(0.0, each.free_at - now) <= least + slack])


def _rendezvous(session: Session, able: Sequence[Replica]) -> Replica:
    key = repr(session.tokens[: 512 // GRAIN]).encode()
    return max(able, key=lambda replica: hashlib.blake2b(key + replica.number.to_bytes(4, "little")).digest())


def routed(session: Session, replicas: Sequence[Replica], directory: Directory, now: float) -> Replica:
    """As `serving.split.router.placement` chooses."""
    loads = [replica.load(now) for replica in replicas]
    found = {each.replica: each.position for each in directory.find(session.chain, session.tokens)}
    if not found:
        return _rendezvous(session, [each for each in replicas if loads[each.number] <= min(loads) + SLACK])
    speed = PREFILL * GRAIN
    share = speed * sum(replica.recent(now) for replica in replicas) / len(replicas)

    def cost(replica: Replica) -> float:
        return price(
            (len(session.tokens) - found.get(replica.number, 0)) * GRAIN, requests=loads[replica.number], share=share,
            pending=speed * max(0.0, replica.free_at - now), recent=speed * replica.recent(now),
        )  # fmt: skip

    return min(replicas, key=lambda replica: (cost(replica), loads[replica.number]))


def cheapest(session: Session, replicas: Sequence[Replica], directory: Directory, now: float) -> Replica:
    """Where the answer is expected to begin first: of those that have some of the prompt, and the least busy one.

    A replica that has had more than its share of work lately must save so much more.
    """
    tokens = session.tokens
    share = sum(replica.recent(now) for replica in replicas) / len(replicas) or 1.0

    def price(replica: Replica, position: int, on_host: bool) -> float:
        excess = max(0.0, replica.recent(now) / share - 1.0)
        return replica.cost(position, len(tokens), now, on_host=on_host) + EVENNESS * excess

    least = min(replicas, key=lambda replica: (max(0.0, replica.free_at - now), replica.recent(now)))
    best, cost = least, price(least, 0, on_host=False)
    for found in directory.find(session.chain, tokens):
        replica = replicas[found.replica]
        seconds = price(replica, found.position, "device" not in found.tiers)
        if seconds < cost:
            best, cost = replica, seconds
    return best


def simulate(policy: str, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """One line: `options.requests` for each of `count` replicas."""
    directory, infinite = Directory(B), Infinite()
    host = options.host if policy in ("tiers", "router") else 0
    replicas = [Replica(number, options.room, host, directory) for number in range(count)]
    source = sessions(options.seed, options.prompts)
    arriving = random.Random(options.seed + 1)
    queue: list[tuple[float, int, Session]] = []
    for number in range(options.sessions * count):
        heapq.heappush(queue, (arriving.random() * 10, number, next(source)))
    hits = possible = prompt = 0
    waits: list[float] = []
    now, begun = 0.0, len(queue)
    for _ in range(options.requests * count):
        now, number, session = heapq.heappop(queue)
        if policy == "affinity":
            replica = affine(session, replicas, now, options.slack)
        elif policy == "router":
            replica = routed(session, replicas, directory, now)
        else:
            replica = cheapest(session, replicas, directory, now)
        possible += infinite.serve(session)
        position, begin = replica.serve(session, now)
        hits += position
        prompt += len(session.tokens)
        waits.append(begin - now)
        session.served = len(session.tokens)
        answer = session.rng.randrange(40, 400)
        replica.begun(begin + DECODE * answer)
        pause = session.answered(answer)
        if session.turns <= 0:
            session, number, begun = next(source), begun, begun + 1
        heapq.heappush(queue, (begin + DECODE * answer + pause, number, session))
    work = [replica.work for replica in replicas]
    waits.sort()
    return {
        "policy": policy,
        "replicas": count,
        "hits": round(hits / possible, 4),
        "hit_rate": round(hits / prompt, 4),
        "possible_rate": round(possible / prompt, 4),
        "balance": round(max(work) / (sum(work) / count), 3),
        "busy": round(sum(work) / count / now, 3),
        "first_token_mean": round(statistics.fmean(waits), 3),
        "first_token_p99": round(waits[int(len(waits) * 0.99)], 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", default="1,8,64")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--requests", type=int, default=100, help="for each replica")
    parser.add_argument("--sessions", type=int, default=24, help="at once, for each replica")
    parser.add_argument("--prompts", type=int, default=200, help="system prompts")
    parser.add_argument(
        "--room", type=int, default=32, help="states that a device holds, their pages counted as states"
    )
    parser.add_argument("--host", type=int, default=256, help="states that a host holds")
    parser.add_argument(
        "--slack", type=float, default=1.0, help="affinity: seconds of work beyond the least busy one's"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    from serving.bench.report import command_line, cpu_name, emit  # here, since it imports jax and nothing else does

    emit(metric="environment", cpu=cpu_name(), command=command_line())
    for count in options.replicas.split(","):
        for policy in options.policies.split(","):
            emit(metric="replicas", **simulate(policy, int(count), options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
