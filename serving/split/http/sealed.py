"""Signed HTTP messages between workers."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import httpx
from fastapi import Depends, Request

from serving.api.http.errors import ApiError
from serving.split.seal import HEADER, RECEIVER, Seal, SealChecker

_MOST_NAMES = 4096


def sealed(seal: Seal) -> Any:
    """Returns a dependency for the endpoints of a role: 401 for messages without the fleet's signature."""
    checker = SealChecker(seal)

    async def check(request: Request) -> None:
        if not checker.holds(request.headers.get(HEADER, ""), request.url.path, await request.body()):
            raise ApiError(
                401, "this path requires a message signed with the fleet's secret", code="not_sealed",
                headers={RECEIVER: checker.name},
            )  # fmt: skip

    return Depends(check)


class SealAuth(httpx.Auth):
    """Signs requests to the fleet's servers. It learns a receiver's name from its first refusal, also after a restart.

    Names are public. A server that claims another server's name gains nothing, because it can only forward the
    messages to that server.
    """

    requires_request_body = True

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._names: dict[str, str] = {}
        """Names of receivers by URL, without the last part of the path."""

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Sends the request, and repeats it if the receiver reports another name."""
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
