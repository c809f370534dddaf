"""Choice of a worker for a prompt: the one with the least work, according to the states that workers hold, or by text.

Names of states are hashes of tokens, so a worker, which has the chat template, tokenizes the prompt for the router.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import httpx
from pydantic import ValidationError

from serving.api.http.apis.text_api import TEXT_APIS
from serving.core.load_balancing import price
from serving.core.stats import exported
from serving.core.tiers.journal import Resumable
from serving.split.router.event_followers import EventFollowers
from serving.split.router.workers import Fleet, Remote, choose
from serving.split.wire import Tokens

log = logging.getLogger(__name__)

_PATH = "/internal/tokens"
_PATIENCE = 1.0  # seconds to wait for a prompt's tokens
_LONGEST = 1 << 26  # maximum size of a response in bytes
_TIERS = ("device", "host", "disk")  # tiers, the fastest first

_RESUMABLE = "Prompt tokens that the chosen workers had, by the fastest tier that had them."


def _placed(by: str) -> Any:
    return exported("router_placed", "Choices of a worker by criterion.", "by", value=by)


@dataclass
class PlacementStats:
    """Counters of choices and of the states found. Each request counts once per role."""

    by_state: int = _placed("state")  # choices of a worker that had part of the prompt
    by_load: int = _placed("load")  # choices of a worker without any part, because those with one were too busy
    by_text: int = _placed("text")  # choices by the prompt's beginning: no worker reported a part of it
    untold: int = exported("router_untold", "Choices by text because no worker tokenized the prompt in time.")
    resumable_tokens: dict[tuple[str, str], int] = exported(
        "router_resumable_tokens", _RESUMABLE, "role", "tier", kind=dict
    )
    saved_tokens: int = exported(
        "router_saved_tokens", "Resumable tokens that a worker chosen by text would have computed."
    )


@dataclass(frozen=True)
class ClientRequest:
    """One request of a client, and properties of its prompt that need no tokenizer."""

    kind: str  # the path below `/v1/`, a key of `TEXT_APIS`
    content: bytes  # the body, forwarded unchanged
    body: dict[str, Any]  # the parsed and validated body
    headers: dict[str, str]  # the headers to forward
    num_continued: int = 1  # prompts that need no more than their state: 0 if the response has scores of the prompts

    def message(self, **fields: Any) -> bytes:
        """Returns a message to a worker: these fields, and the unchanged body as `body`."""
        return json.dumps(fields).encode()[:-1] + b', "body": ' + self.content + b"}"

    @property
    def stream(self) -> bool:
        """Whether the response is streamed."""
        return bool(self.body.get("stream"))

    @cached_property
    def text(self) -> str:
        """Text for choosing workers: prompts with the same beginning have texts with the same beginning."""
        names, body = TEXT_APIS[self.kind].prompt_fields, self.body
        fields: Any = [body[name] for name in names if body.get(name) is not None]
        fields = fields[0] if len(fields) == 1 else fields
        return fields if isinstance(fields, str) else json.dumps(fields)

    @property
    def estimated_tokens(self) -> int:
        """An estimate of the prompt's number of tokens."""
        prompt = self.body.get("prompt")
        return len(prompt) if isinstance(prompt, list) else len(self.text) // 4


class Placement:
    """Chooses workers."""

    def __init__(self, fleet: Fleet, following: EventFollowers | None) -> None:
        self.fleet, self.settings, self.following = fleet, fleet.settings, following
        self.stats = PlacementStats()

    async def look(self, asked: ClientRequest) -> PromptMatch:
        """Finds how much of a request's prompt each worker has."""
        following = self.following
        numbers = [sum(worker.up for worker in workers) for workers in (self.fleet.prefill, self.fleet.decode)]
        if following is None or not following.knows_any or max(numbers) < 2:
            return PromptMatch(tokens=asked.estimated_tokens)
        prompt = await self._tokenize(asked)
        if prompt is None:
            return PromptMatch(untold=True, tokens=asked.estimated_tokens)
        return PromptMatch(following.find(prompt.tokens, prompt.salt, prompt.adapter), len(prompt.tokens), prompt)

    def choose(
        self,
        workers: Sequence[Remote],
        key: bytes,
        match: PromptMatch,
        *,
        without: Sequence[Remote] = (),
        counts: bool = True,
    ) -> Remote | None:
        """Returns the worker for a prompt, whose beginning is `key`: the one with the least work before it can answer
        (`load_balancing.price`), then with the fewest requests, then with the state in the fastest tier. If no worker
        has a state, the text decides. `without`: workers to exclude; `counts`: update the statistics.
        """
        without = [*without, *(worker for worker in workers if worker.load >= self.settings.max_worker_requests)]
        by_text = choose(workers, key, slack=self.settings.slack, without=without)
        up = [worker for worker in workers if worker.up and worker not in without]
        if by_text is None or not any(worker in match.states for worker in up):
            if counts and by_text is not None:
                self.stats.by_text += 1
                self.stats.untold += match.untold
            return by_text
        now = time.monotonic()
        share = sum(worker.work.recent(now) for worker in up) / len(up)

        def cost(worker: Remote) -> tuple[float, int, int, bool]:
            tokens, work = match.to_compute(worker), worker.work
            whole = price(tokens, pending=work.pending, requests=worker.load, recent=work.recent(now), share=share)
            return whole, worker.load, _rank(match.states.get(worker)), worker is not by_text

        best = min(up, key=cost)
        if counts:
            self._count(best, match.states.get(best), match.states.get(by_text))
        return best

    def state_owner(self, worker: Remote, match: PromptMatch) -> Remote | None:
        """Returns the worker from which the chosen one should fetch a deeper state, which must be on its device; None
        if there is no such worker."""
        following, above = self.following, self.settings.share_above
        if following is None or above is None or match.prompt is None:
            return None
        own = match.states.get(worker)
        deep = (own.position if own is not None else 0) + max(above, 1)
        able = [
            other for other, state in match.states.items()
            if other is not worker and other.up and state.position >= deep and "device" in state.tiers
            and following.can_share(worker, other)
        ]  # fmt: skip
        return max(able, key=lambda other: (match.states[other].position, -other.load), default=None)

    def status(self) -> dict[str, Any]:
        """Returns statistics for the router's `/status`."""
        resumable = {f"{role} {tier}": count for (role, tier), count in self.stats.resumable_tokens.items()}
        return asdict(self.stats) | {"resumable_tokens": resumable}

    def _count(self, worker: Remote, state: Resumable | None, other: Resumable | None) -> None:
        if state is None:
            self.stats.by_load += 1
            return
        stats, tier = self.stats, _TIERS[min(_rank(state), len(_TIERS) - 1)]
        stats.by_state += 1
        counts = stats.resumable_tokens
        counts[worker.role, tier] = counts.get((worker.role, tier), 0) + state.position
        stats.saved_tokens += max(0, state.position - (other.position if other is not None else 0))

    async def _tokenize(self, asked: ClientRequest) -> Tokens | None:
        following, fleet = self.following, self.fleet
        assert following is not None
        able = [worker for worker in (*fleet.decode, *fleet.prefill) if worker.up and following.has_stream(worker)]
        if not able:
            return None
        worker = min(able, key=lambda each: each.load)
        message = asked.message(kind=asked.kind)
        begin, answer = time.monotonic(), bytearray()
        try:
            async with (
                asyncio.timeout(_PATIENCE),
                fleet.client.stream(
                    "POST", worker.url + _PATH, content=message, headers=asked.headers, auth=fleet.auth
                ) as response,
            ):
                async for piece in response.aiter_bytes():
                    answer += piece
                    if len(answer) > _LONGEST:
                        raise ValueError(f"more than {_LONGEST:,} bytes")
            return Tokens.model_validate_json(answer) if response.status_code == 200 else None
        except (TimeoutError, httpx.HTTPError, ValidationError, ValueError) as error:
            seconds = time.monotonic() - begin
            log.debug("no tokens from %s in %.1f s: %s", worker.url, seconds, error or type(error).__name__)
            return None


@dataclass(frozen=True)
class PromptMatch:
    """The states of one prompt that each worker has."""

    states: Mapping[Remote, Resumable] = field(default_factory=dict)
    tokens: int = 0  # number of the prompt's tokens; an estimate if no worker tokenized it
    prompt: Tokens | None = None
    untold: bool = False  # whether no worker tokenized it

    def to_compute(self, worker: Remote) -> int:
        """Returns the number of tokens that a worker would compute."""
        state = self.states.get(worker)
        return self.tokens - (state.position if state is not None else 0)


def _rank(state: Resumable | None) -> int:
    if state is None:
        return len(_TIERS)
    return min((_TIERS.index(tier) for tier in state.tiers if tier in _TIERS), default=len(_TIERS))
