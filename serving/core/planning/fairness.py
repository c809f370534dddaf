"""How a step is shared: by clients (API keys), and within a client by short and long prompts.

While a long prompt is under way, short ones come first in each step but share only half of its tokens, so neither kind
waits for the other to finish. Long prompts may hold half of the row ids while they prefill; the rest is left to short
prompts, which overtake the long ones in the queue. A step that also decodes feeds as many prompt tokens as fit into
`max_decode_pause`, judging by what such steps have taken so far. Without decoding rows a step may take five times as
long: that bounds the wait of a short prompt that comes meanwhile.

With k active clients, each gets 1/k of what it would get alone. For a client that decodes this means that a step takes
at most k times as long as one with only its rows. Up to that length, rows and prompts of other clients take part:

* Rows of one client take turns if decoding all rows takes too long. Where a step of 64 rows takes as long as a step of
  one (accelerators), all rows take part in every step. If even a row of each takes too long (it samples, for example),
  clients with more rows than others sit out steps.
* Prompt tokens are divided by deficit round robin: a client's deficit grows by its part of each step and falls by the
  tokens that the step feeds. A client with a positive deficit may feed a tile at least. Where that is not enough for
  all, they take turns, and a new client comes first.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from serving.core.cache.eviction_queue import in_turn
from serving.core.config import SchedulerConfig
from serving.core.requests.request import Request

MOST_OVERTAKEN = 64
"""How many waiting requests are looked past for one that is short."""
_PAUSES_WITHOUT_DECODING = 5
"""Maximum duration of a step without decode rows, as a multiple of `max_decode_pause`."""
_WEIGHT = 0.3
"""Of the latest step in the moving averages of durations."""
_RISE = 1 / 32
"""Of the latest step in an average that slower steps hardly change."""
_FORGETTING = 1 / 512
"""Fraction by which the duration of a step that was too long is lowered, so that such a step is tried again."""

_ATTEMPTS = 8
"""Maximum number of steps in a row that measure decode rows: measured times may never come, or be 0."""

_IN_STEPS = 0.9
"""Fraction of k times a step alone that a step with k clients may take: requests also take time outside of steps."""

_MOST_TURNS = 4096
"""Maximum number of clients whose last turns are remembered."""

Client = str | None


class StepTimes:
    """How long steps take on the device: moving averages."""

    def __init__(self, tile_size: int) -> None:
        self._tile = tile_size
        self.per_token = 0.0
        """Seconds per prompt token; 0 before the first observation."""
        self._decode: dict[int, float] = {}
        """Seconds of a step without prompts, by the binary logarithm of its rows, rounded up."""
        self._quiet: dict[int, float] = {}
        """The same on a machine without other load, which makes single steps longer: this average rises slowly."""

    def observe_prompts(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a step with this number of prompt tokens.

        A step with less than a tile counts only if it was faster per token than the average: it measures overhead.
        """
        latest = seconds / num_tokens
        if not self.per_token or num_tokens >= self._tile or latest < self.per_token:
            self.per_token = _average(self.per_token, latest)

    def observe_decode(self, rows: int, seconds: float) -> None:
        """Records the duration of a step without prompts."""
        size = (rows - 1).bit_length()
        self._decode[size] = _average(self._decode.get(size, 0.0), seconds)
        before = self._quiet.get(size, 0.0)
        self._quiet[size] = _average(before, seconds, _WEIGHT if seconds < before else _RISE)

    def decode(self, rows: int, *, quiet: bool = False) -> float:
        """Returns the duration of a step with as many rows, or of the next larger one that is known; 0 if none is.

        `quiet`: without the effect of other programs on the machine.
        """
        size, known = (rows - 1).bit_length(), self._quiet if quiet else self._decode
        return next((known[each] for each in sorted(known) if each >= size), 0.0)

    def knows(self, rows: int) -> bool:
        """Returns whether a step with about as many rows has been observed."""
        return (rows - 1).bit_length() in self._decode

    def rows_within(self, rows: int, least: int, seconds: float) -> int:
        """Returns how many of these rows may decode so that a step takes no longer; `least` in any case."""
        while rows > least and (known := self._decode.get((rows - 1).bit_length(), 0.0)) > seconds:
            self._decode[(rows - 1).bit_length()] = known * (1 - _FORGETTING)
            rows = max(least, 1 << (rows - 1).bit_length() - 1)
        return rows


class Fairness:
    """The policy of one scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._tile, self._most = config.tile_size, config.max_num_batched_tokens
        self._short = max(config.tile_size, config.max_num_batched_tokens // 4)
        self._most_long = max(1, config.num_rows // 2)
        self._pause = config.max_decode_pause
        self.times = StepTimes(config.tile_size)
        self._deficits: dict[Client, float] = {}
        """Prompt tokens that clients may feed, by client. A debt stays after a client's last prompt."""
        self._served: dict[Client, int] = {}
        """The last step in which a client had its turn, the earliest first; also while it has no requests."""

        self._attempts = 0
        """How many steps have been planned in a row to measure decode rows."""
        self._saved = 0.0
        """Seconds that steps without the clients with many rows have saved for a step with them."""
        self._measuring = False
        """Whether the step being planned measures decode rows."""

    def limit(self, tokens: int) -> None:
        """Limits the prompt tokens of a step further than the settings, to whole tiles."""
        self._most = min(self._most, max(tokens - tokens % self._tile, self._tile))

    # -- by durations --

    def prompt_tokens(self, *, decoding: bool) -> int:
        """Prompt tokens of a step at most: whole tiles, at least one. `decoding`: whether it decodes, too.

        A step that does not decode may take longer, but is limited too: a short prompt that comes waits for its end.
        """
        if self._pause is None or not self.times.per_token:  # a clock may say that no time has passed
            return self._most
        fits = int(self._pause * (1 if decoding else _PAUSES_WITHOUT_DECODING) / self.times.per_token)
        return min(self._most, max(fits - fits % self._tile, self._tile))

    def _alone(self, rows: Mapping[Client, int]) -> float:
        """Returns the duration of a step with only the rows of the client with the fewest; 0 if it is not known.

        Without `max_decode_pause`, plans must not depend on clocks.
        """
        return self.times.decode(min(rows.values()), quiet=True) if self._pause is not None else 0.0

    # -- by clients --

    def decode_in_turn(self, decoding: Sequence[Request], prompts: Mapping[Client, int], most: int) -> list[Request]:
        """Returns the requests of several clients that decode in the next step, in their order.

        Args:
            decoding: all that could.
            prompts: clients with prompts; half of such a client's part is left to them.
            most: maximum number of rows.
        """
        rows = Counter(request.client for request in decoding)
        self._measuring = self._must_measure(rows, prompts)
        if self._measuring:
            client = min(rows, key=lambda client: rows[client])
            return [request for request in decoding if request.client == client][:most]
        part = sum(0.5 if client in prompts else 1.0 for client in rows)
        if len(rows) > 1 and (alone := self._alone(rows)):
            limit, least = max(1.0, _IN_STEPS * part) * alone, len(rows)
            lowest = self.times.decode(least) if self.times.knows(least) else 0.0
            if lowest > limit and not self._may_exceed(lowest - limit, max(limit - alone, alone / 4)):
                fewest = min(rows.values())
                few = [request for request in decoding if rows[request.client] == fewest]
                if len(few) < len(decoding):
                    return few[:most]
            most = min(most, self.times.rows_within(len(decoding), least, max(limit, lowest)))
        if most >= len(decoding):
            return list(decoding)
        waiting = sorted(decoding, key=lambda each: (each.queueing.decoded_at, each.order))
        chosen = set(in_turn(waiting)[:most])
        return [request for request in decoding if request in chosen]

    def _may_exceed(self, excess: float, saved: float) -> bool:
        """Returns whether a step may take so much longer than its limit. If not, it saves time for a later step."""
        if self._saved >= excess:
            self._saved = 0.0
            return True
        self._saved += saved
        return False

    def prompt_quotas(
        self, demands: Mapping[Client, int], rows: Mapping[Client, int], tokens: int
    ) -> dict[Client, int]:
        """Returns how many prompt tokens each of several clients may feed in the next step.

        Args:
            demands: prompt tokens that are left, by client.
            rows: decode rows of the step, by client.
            tokens: prompt tokens of the step at most.
        """
        if self._measuring:
            self._measuring = False
            return dict.fromkeys(demands, 0)
        allowance = self._allowance(demands, rows)
        deficits = self._deficits
        for client in deficits.keys() - demands.keys():  # a debt is paid off, and nothing is saved up
            deficits[client] += tokens if allowance is None else allowance
            if deficits[client] >= 0:
                del deficits[client]
        left: float = tokens
        for place, client in enumerate(sorted(demands, key=lambda client: demands[client])):
            part = min(demands[client], left / (len(demands) - place))
            left -= part
            if allowance is not None and rows.keys() - {client}:
                part = min(part, allowance)
            before = deficits.get(client, 1.0)
            # Without decode rows, some client must feed prompts: debts then decide only the order.
            deficits[client] = min((before if rows else max(1.0, before)) + part, part + self._tile)
        quotas = {}
        for client in sorted(demands, key=lambda client: (self._served.get(client, -1), demands[client])):
            quota = max(int(deficits[client]), self._tile) if deficits[client] > 0 else 0
            quotas[client] = min(quota, tokens)
            tokens -= min(quotas[client], demands[client])
        return quotas

    def _must_measure(self, rows: Mapping[Client, int], prompts: Mapping[Client, int]) -> bool:
        """Returns whether the next step should have only the rows of the client with the fewest, to measure them."""
        if self._pause is None or not self.times.per_token or not rows or len(rows.keys() | prompts.keys()) < 2:
            return False
        self._attempts = 0 if self.times.knows(min(rows.values())) else self._attempts + 1
        return 0 < self._attempts <= _ATTEMPTS

    def _allowance(self, demands: Mapping[Client, int], rows: Mapping[Client, int]) -> float | None:
        """Returns the prompt tokens that one client may feed in a step with decode rows of others; None: any number."""
        alone = self._alone(rows) if rows else 0.0
        if not alone or not self.times.per_token:
            return None
        spare = _IN_STEPS * len(demands.keys() | rows.keys()) * alone - self.times.decode(sum(rows.values()))
        return max(spare, alone / 2) / self.times.per_token / max(1, len(demands))

    def fed(self, num_tokens: Mapping[Client, int], with_quota: Iterable[Client], step: int) -> None:
        """Records the prompt tokens that a step feeds, by client. These clients have had their turn.

        A client whose quota was of no use, because others have the rows or the memory, keeps its turn, unless no prompt
        was fed at all: then it loses its turn, so that it cannot hold up all others.
        """
        for client in self._deficits.keys() & num_tokens.keys():
            self._deficits[client] -= num_tokens[client]
        for client in num_tokens or with_quota:
            self._served.pop(client, None)
            self._served[client] = step
        while len(self._served) > _MOST_TURNS:
            del self._served[next(iter(self._served))]

    @property
    def keeps_deficits(self) -> bool:
        """Whether any client has a deficit: `prompt_quotas` must be called for each step."""
        return bool(self._deficits)

    # -- by lengths --

    def is_long(self, request: Request) -> bool:
        """Returns whether more than a quarter of a step is left of a prompt. With a state from another worker, nothing
        is left."""
        if request.transfer.remote is not None or request.transfer.load is not None:
            return False
        return len(request.tokens) - request.progress.num_computed > self._short

    def long_prompts(self, running: Sequence[Request]) -> Counter[Client]:
        """Returns the number of long prompts under way by client."""
        prefilling = (request for request in running if not request.progress.num_sampling_steps)
        return Counter(request.client for request in prefilling if self.is_long(request))

    def may_start_long(self, client: Client, under_way: Mapping[Client, int], num_clients: int) -> bool:
        """Returns whether one more long prompt may start: half of the rows may have one, or a client's part of them."""
        if num_clients > 1:
            return under_way.get(client, 0) < max(1, self._most_long // num_clients)
        return sum(under_way.values()) < self._most_long


def _average(before: float, latest: float, weight: float = _WEIGHT) -> float:
    return before + weight * (latest - before) if before else latest
