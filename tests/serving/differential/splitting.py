"""A second engine next to a trace's own. It computes prompts; their states arrive at random times, or not at all.

The two share nothing but the model: cache mode, block size and token budget are each side's own.
"""

import functools
import random
from collections import Counter
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from serving.config import EngineConfig
from serving.core.requests.request import RemoteState
from serving.split.decode_side import DecodeSide
from serving.split.prefill_side import ONCE, PrefillSide, fed_tokens
from serving.split.settings import SplitSettings
from serving.split.wire import Handoff, Offer, SplitError, StateRequest
from serving.split.worker import Worker
from serving.state_transfer.programs import PointPrograms
from tests.support.engines.shared_engines import FLAGS, MAX_LEN, TILE, SharedEngines
from tests.support.fleets.split_pair import DelayedExecutor, DirectTransport

_PATIENT = 20
"""Steps after which a prompt that finds no room over there takes it from states that were not fetched yet."""
_COUNTED = ("arrived", "failed", "late", "spared", "pages_spared")


@dataclass(frozen=True)
class Split:
    """What a trace decides about its other side."""

    mode: str
    flags: dict[str, Any]
    """Those that differ."""
    handoffs: dict[str, Handoff]
    """By request; what is not here is computed by the trace's own engine."""
    broken: float
    """Share of states that cannot be had when they are asked for."""
    lost: float
    """How likely the other side is to lose its store after a prompt."""
    haste: float
    """Share of what could arrive that does, each step."""
    seed: int


def draw_split(rng: random.Random, names: list[str]) -> Split:
    """Of the requests `names`, most come by way of the other side."""
    handoffs: list[Handoff | None] = ["full", "full", "recompute-last", "recompute-last", None]
    drawn = {name: rng.choice(handoffs) for name in names}
    mode = rng.choice(["none", "align", "all"])
    block, budget = rng.choice([TILE, 2 * TILE, 4 * TILE]), rng.choice([16, 40, MAX_LEN])
    flags = {"state_block_size": block, "max_num_batched_tokens": budget, "enable_chunked_prefill": True}
    given = {name: handoff for name, handoff in drawn.items() if handoff is not None}
    broken, lost, haste = rng.choice([0.0, 0.0, 0.3]), rng.choice([0.0, 0.0, 0.1]), rng.choice([0.1, 0.5, 1.0])
    return Split(mode, flags, given, broken, lost, haste, seed=rng.randrange(1 << 30))


_points = functools.cache(PointPrograms)
"""All workers of a model share what takes states out and puts them in."""


def worker_of(on: SharedEngines, engine, flags: dict[str, Any]) -> Worker:
    """One side's, around an engine that is there already."""
    config = EngineConfig.create(**(FLAGS | flags | on.flags))
    built: Any = SimpleNamespace(
        engine=engine, model=on.model, config=config, size=SimpleNamespace(max_model_len=MAX_LEN)
    )
    made = Worker(built, {"direct": DirectTransport("differential")}, model=on.name)
    made.programs = _points(made.arrangement)
    return made


class OtherSide:
    """The prefill side of a trace, and all that lies between the two. Flags are all that each engine was made with."""

    def __init__(
        self, on: SharedEngines, split: Split, prefill, prefill_flags: dict, decode, decode_flags: dict
    ) -> None:
        self._split, self._prefill = split, prefill
        self._rng = random.Random(split.seed)
        self._executor: Any = DelayedExecutor(self._rng)
        self._transport = DirectTransport("differential")
        self._transport.offered.clear()
        self._there = PrefillSide(worker_of(on, prefill, prefill_flags), SplitSettings(lease=3600.0))
        # As a peer of the decode side.
        self.manifest, self.renew, self.release = self._there.worker.manifest, self._there.renew, self._there.release
        self._here = DecodeSide(worker_of(on, decode, decode_flags), executor=self._executor)
        self._tickets: list[str] = []
        self._met: Counter[str] = Counter()

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        """As a peer: sometimes there is no answer."""
        if self._rng.random() < self._split.broken:
            raise SplitError("injected: no answer")
        return self._there.offer(want, seconds)

    def compute(self, ask) -> RemoteState | None:
        """A request's prompt, all of it; None if it is none of this side's business."""
        handoff = self._split.handoffs.get(ask.name)
        if handoff is None or not (fed := fed_tokens(ask.prompt, handoff)):
            return None
        export = self._there.begin()
        self._prefill.add_request(
            ask.name, {"prompt_token_ids": fed}, ONCE, cache_salt=ask.salt, export=export, lora_request=ask.adapter
        )
        for turn in range(3000):
            if not self._prefill.loop.busy:
                break
            self._prefill.step()
            if turn % _PATIENT == _PATIENT - 1 and self._tickets:
                kept = self._there.kept
                self._there.release(self._tickets.pop(0), wanted=False)
                self._met["taken back"] += kept - self._there.kept
        else:
            raise AssertionError("the prefill engine does not come to an end")
        self._prefill.loop.scheduler.check()
        name = None if ask.adapter is None else ask.adapter.lora_name
        ticket = self._there.ticket(export, ask.prompt, handoff, adapter_name=name)
        if self._rng.random() < self._split.lost:
            self._prefill.loop._forget()
            self._met["stores lost there"] += 1
        self._tickets.append(ticket.id)
        self._met[handoff] += 1
        return self._here.accept(self, ticket)

    def move(self) -> None:
        """Some of what is under way arrives, or fails to."""
        self._executor.run(self._split.haste)

    @property
    def done(self) -> bool:
        """Whether no transfer is pending."""
        return not self._executor.jobs

    def close(self) -> Counter[str]:
        """What it met. Raises `AssertionError` if anything is still kept over there."""
        self._prefill.loop.scheduler.check(idle=True)
        stats = self._there.stats
        assert (self._there.kept, stats.held, stats.copies, stats.copied_bytes) == (0, 0, 0, 0)
        assert not self._transport.offered
        for name in _COUNTED:
            self._met[name] += getattr(self._here.stats, name)
        return self._met
