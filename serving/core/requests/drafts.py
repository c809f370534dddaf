"""Decides how many drafts to verify. The decisions change the speed, and never a token."""

from collections.abc import Sequence

from serving.core.requests.request import Request

OPTIMISM = 0.8
"""Assumed acceptance rate of drafts before the first observation."""
_PACE = 1 / 8
"""Weight of one verified draft in a row's running acceptance."""
_COMMON_PACE = 1 / 32
"""Weight of one verified draft in the acceptance of all rows, from which new rows start."""
_FORGETTING = 1 / 512
"""Fraction by which a step without drafts moves the estimate towards `OPTIMISM`, so that drafts are tried again."""
LEAST_CHANCE = 1 / 8
"""Minimum acceptance rate: a draft that is less likely to be accepted does not justify the slot of its state."""


class DraftPolicy:
    """Always plans K drafts, or as many as fit."""

    def __init__(self, most: int) -> None:
        self.most = most
        """K."""

    def begin(self, decoding: Sequence[Request]) -> None:
        """Called before a step is planned for these rows."""

    def wanted(self, request: Request) -> int:
        """Returns the number of drafts of a row's next step. The scheduler cuts numbers that do not fit."""
        return self.most

    def observe(self, request: Request, made: int, accepted: int) -> None:
        """Called when a step with planned drafts has settled, with the numbers of verified and accepted drafts."""


class AdaptiveDrafts(DraftPolicy):
    """Plans drafts if the expected tokens outweigh the time of verifying them.

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
        while count < self.most and chance >= LEAST_CHANCE:
            count, chance = count + 1, chance * acceptance
        # At least one, so that a row notices when its drafts have become better.
        return max(count, 1)

    def observe(self, request: Request, made: int, accepted: int) -> None:
        # A run of drafts ends with the first wrong one. A missing draft counts as wrong.
        failed = accepted < made or not made
        acceptance = self._acceptance(request)
        for right in [True] * accepted + [False] * failed:
            acceptance += _PACE * (right - acceptance)
            self._common += _COMMON_PACE * (right - self._common)
        request.draft_acceptance = acceptance

    def _acceptance(self, request: Request) -> float:
        return self._common if request.draft_acceptance is None else request.draft_acceptance

    def _expected(self, acceptance: float) -> float:
        """Returns the expected number of accepted drafts of K: a + a^2 + ... + a^K."""
        total, chance = 0.0, 1.0
        for _ in range(self.most):
            chance *= acceptance
            total += chance
        return total
