"""A user's request in the engine: one scheduler request for each of its choices."""

from __future__ import annotations

from collections.abc import Sequence

from serving.core import Request
from serving.engine.requests.adapters import LoadedAdapter
from serving.engine.requests.output import Choice, RequestOutput
from serving.engine.requests.sampling_params import SamplingParams
from serving.engine.structured.mask_workers import FollowedChoice


class UserRequest:
    """A user's request: its choices and their common output."""

    __slots__ = ("adapter", "live_text", "members", "output", "params")

    def __init__(
        self, output: RequestOutput, params: SamplingParams, live_text: bool, adapter: LoadedAdapter | None = None
    ) -> None:
        self.output, self.params, self.live_text, self.adapter = output, params, live_text, adapter
        self.members: list[Request] = []


class ChoiceState:
    """One choice of a user's request; the scheduler's request carries it as `user`."""

    __slots__ = ("choice", "followed", "parent", "proposed", "seed")

    def __init__(self, parent: UserRequest, choice: Choice, seed: int, followed: FollowedChoice | None) -> None:
        self.parent, self.choice, self.seed, self.followed = parent, choice, seed, followed
        self.proposed: Sequence[int] = ()
        """With a grammar: the drafts for the next step, from the last settled step."""
