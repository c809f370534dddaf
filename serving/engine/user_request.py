"""A user's request as the engine runs it: one scheduler request for each of its choices."""

from __future__ import annotations

from collections.abc import Sequence

from serving.core import Request
from serving.engine.mask_workers import FollowedChoice
from serving.engine.output import Choice, RequestOutput
from serving.engine.sampling_params import SamplingParams


class UserRequest:
    """A user's request: its choices and the output that they share."""

    __slots__ = ("live_text", "members", "output", "params")

    def __init__(self, output: RequestOutput, params: SamplingParams, live_text: bool) -> None:
        self.output, self.params, self.live_text = output, params, live_text
        self.members: list[Request] = []


class Member:
    """One choice of a user's request; the scheduler's request carries it as `user`."""

    __slots__ = ("choice", "followed", "parent", "proposed", "seed")

    def __init__(self, parent: UserRequest, choice: Choice, seed: int, followed: FollowedChoice | None) -> None:
        self.parent, self.choice, self.seed, self.followed = parent, choice, seed, followed
        self.proposed: Sequence[int] = ()
        """With a grammar: the drafts for the next step, as of the last settled step."""
