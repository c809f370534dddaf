"""Messages between workers count only with the fleet's seal."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
from fastapi import Depends, Request

from serving.api.http.errors import ApiError
from serving.split.seal import HEADER, RECEIVER, Seal, SealChecker

_MOST_NAMES = 4096


def sealed(seal: Seal) -> Any:
    """A dependency for the endpoints of a role: 401 for messages that do not come from the fleet."""
    checker = SealChecker(seal)

    async def check(request: Request) -> None:
        if not checker.holds(request.headers.get(HEADER, ""), request.url.path, await request.body()):
            raise ApiError(
                401, "only the fleet's own workers and routers may ask for this", code="not_sealed",
                headers={RECEIVER: checker.name},
            )  # fmt: skip

    return Depends(check)


class SealAuth(httpx.Auth):
    """Seals requests to the fleet's servers. A receiver's name is learned from its first refusal, also after a restart.

    The name is public: a server that gives another one's gets messages that it could have passed on as they came.
    """

    requires_request_body = True

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._names: dict[str, str] = {}
        """By the URL of a group of endpoints, without their own names."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Sends the request, and once more under the name that the receiver asks for."""
        place = str(request.url.copy_with(query=None)).rpartition("/")[0]
        for _ in range(2):
            name = self._names.get(place, "")
            request.headers.update(self._seal.headers(request.url.path, request.content, name))
            answer = yield request
            wanted = answer.headers.get(RECEIVER, "")[:64]
            if answer.status_code != 401 or not self._seal.secret or wanted in ("", name):
                return
            if len(self._names) >= _MOST_NAMES:
                self._names.clear()
            self._names[place] = wanted
