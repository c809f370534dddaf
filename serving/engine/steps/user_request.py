"""A user's request in the engine: one scheduler request for each of its choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from serving.core import Request
from serving.engine.requests.adapters import LoadedAdapter
from serving.engine.requests.output import Choice, RequestOutput
from serving.engine.requests.request import EngineRequest
from serving.engine.structured.mask_workers import FollowedChoice


class UserRequest:
    """A user's request: its choices and their common output."""

    __slots__ = ("adapter", "given", "members", "output", "params")

    def __init__(self, given: EngineRequest, output: RequestOutput, adapter: LoadedAdapter | None = None) -> None:
        self.given, self.params, self.adapter = given, given.params, adapter
        self.output = output
        """The output since the last `take`; of a request that is not live, all of it."""
        self.members: list[Request] = []

    @property
    def choices(self) -> list[Choice]:
        """The choices, in order."""
        return [member.user.choice for member in self.members]

    def take(self) -> RequestOutput:
        """Returns the output: of a live request as a delta, which later calls do not change."""
        if not self.given.live:
            return self.output
        return replace(self.output, outputs=[choice.take() for choice in self.choices if choice.changed])


class ChoiceState:
    """One choice of a user's request; the scheduler's request carries it as `user`."""

    __slots__ = ("choice", "followed", "parent", "proposed", "seed")

    def __init__(self, parent: UserRequest, choice: Choice, seed: int, followed: FollowedChoice | None) -> None:
        self.parent, self.choice, self.seed, self.followed = parent, choice, seed, followed
        self.proposed: Sequence[int] = ()
        """With a grammar: the drafts for the next step, from the last settled step."""
