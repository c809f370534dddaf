"""Which prompts get a step's tokens: short ones overtake long ones, and decoding rows are not kept waiting for long.

While a long prompt is under way, short ones come first in each step but share only half of its tokens, so neither kind
waits for the other to finish. Long prompts may hold half of the row ids while they prefill; the rest is left to short
prompts, which overtake the long ones in the queue. A step that also decodes feeds as many prompt tokens as fit into
`max_decode_pause`, judging by what such steps have taken so far. Without decoding rows a step may take five times as
long: that bounds the wait of a short prompt that comes meanwhile.
"""

from serving.core.config import SchedulerConfig
from serving.core.requests.request import Request

MOST_OVERTAKEN = 64
"""How many waiting requests are looked past for one that is short."""
_PAUSES_WITHOUT_DECODING = 5
"""Maximum duration of a step without decode rows, as a multiple of `max_decode_pause`."""
_WEIGHT = 0.3
"""Of the latest step in the moving average of seconds per token."""


class Fairness:
    """The policy of one scheduler."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._tile, self._most = config.tile_size, config.max_num_batched_tokens
        self._short = max(config.tile_size, config.max_num_batched_tokens // 4)
        self._most_long = max(1, config.num_rows // 2)
        self._pause = config.max_decode_pause
        self._seconds_per_token: float | None = None

    def prompt_tokens(self, *, decoding: bool) -> int:
        """Prompt tokens of a step at most: whole tiles, at least one. `decoding`: whether it decodes, too.

        A step that does not decode may take longer, but not as long as a short prompt that comes must not wait.
        """
        if self._pause is None or not self._seconds_per_token:  # a clock may say that no time has passed
            return self._most
        fits = int(self._pause * (1 if decoding else _PAUSES_WITHOUT_DECODING) / self._seconds_per_token)
        return min(self._most, max(fits - fits % self._tile, self._tile))

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records the duration of a step with this number of prompt tokens.

        A step with less than a tile counts only if it was faster per token than the average: it measures overhead.
        """
        latest = seconds / num_tokens
        before = self._seconds_per_token
        if before is not None and num_tokens < self._tile and latest > before:
            return
        self._seconds_per_token = latest if before is None else before + _WEIGHT * (latest - before)

    def is_long(self, request: Request) -> bool:
        """Returns whether more than a quarter of a step is left of a prompt. With a state from another worker, nothing
        is left."""
        if request.transfer.remote is not None or request.transfer.load is not None:
            return False
        return len(request.tokens) - request.progress.num_computed > self._short

    def room_for_long(self, running: list[Request]) -> int:
        """How many more long prompts may start."""
        prefilling = (request for request in running if not request.progress.num_sampling_steps)
        return self._most_long - sum(map(self.is_long, prefilling))
