"""How many drafts are worth verifying. Whatever is decided here changes how fast tokens come, and no token."""

from collections.abc import Sequence

from serving.core.requests.request import Request

OPTIMISM = 0.8
"""How often a draft is expected to be right where nothing is known."""
_PACE = 1 / 8
"""Weight of one verified draft in a row's running acceptance."""
_COMMON_PACE = 1 / 32
"""The same in that of all rows, from which new ones start."""
_FORGETTING = 1 / 512
"""The part of the way back to `OPTIMISM` that a step without drafts goes, so that they are tried again some time."""
_LEAST_CHANCE = 1 / 8
"""A draft less likely to be right is not worth the slot that its state takes."""


class DraftPolicy:
    """Always K drafts, or as many as fit."""

    def __init__(self, most: int) -> None:
        self.most = most
        """K."""

    def begin(self, decoding: Sequence[Request]) -> None:
        """A step is about to be planned for these rows."""

    def wanted(self, request: Request) -> int:
        """How many drafts a row's next step should have; anything above what fits is cut."""
        return self.most

    def observe(self, request: Request, made: int, accepted: int) -> None:
        """A step for which drafts were planned has settled: so many there were, and so many were right."""


class AdaptiveDrafts(DraftPolicy):
    """Drafts for as long as the tokens they bring are worth the time that verifying them takes.

    A step that feeds T tokens takes about 1 + T / `knee` times as long as one that feeds next to none: the weights are
    read whatever T is, then arithmetic and states take over. All rows of a step are as wide as the widest, so it has
    drafts for (nearly) all or for none: with n rows, G of whose n K drafts are expected to be accepted, drafts win if
    (n + G) / (knee + n (1 + K)) > n / (knee + n).

    Each row has a running estimate of how often a draft of its own is right, given that those before it were. Among the
    rows of a step with drafts, it decides how many of the K a row gets.
    """

    def __init__(self, most: int, *, knee: float) -> None:
        super().__init__(most)
        self.knee = knee
        self._common = OPTIMISM
        self._drafting = True

    def begin(self, decoding: Sequence[Request]) -> None:
        rows = len(decoding)
        gain = sum(self._expected(self._acceptance(request)) for request in decoding)
        self._drafting = gain * (self.knee + rows) > rows * rows * self.most
        if not self._drafting:
            for request in decoding:
                acceptance = self._acceptance(request)
                request.draft_acceptance = acceptance + _FORGETTING * (OPTIMISM - acceptance)

    def wanted(self, request: Request) -> int:
        if not self._drafting:
            return 0
        acceptance = self._acceptance(request)
        count, chance = 0, acceptance
        while count < self.most and chance >= _LEAST_CHANCE:
            count, chance = count + 1, chance * acceptance
        # One at least: where drafts cost next to nothing, that is how a row shows that they have become better.
        return max(count, 1)

    def observe(self, request: Request, made: int, accepted: int) -> None:
        # A run of drafts ends with the first that is wrong; where the source had none, that is no better.
        failed = accepted < made or not made
        acceptance = self._acceptance(request)
        for right in [True] * accepted + [False] * failed:
            acceptance += _PACE * (right - acceptance)
            self._common += _COMMON_PACE * (right - self._common)
        request.draft_acceptance = acceptance

    def _acceptance(self, request: Request) -> float:
        return self._common if request.draft_acceptance is None else request.draft_acceptance

    def _expected(self, acceptance: float) -> float:
        """Of K drafts, how many will be accepted: a + a^2 + ... + a^K."""
        total, chance = 0.0, 1.0
        for _ in range(self.most):
            chance *= acceptance
            total += chance
        return total
