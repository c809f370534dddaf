"""Messages between workers count only with the fleet's seal."""

from __future__ import annotations

from typing import Any

from fastapi import Depends, Request

from serving.api.http.errors import ApiError
from serving.split.seal import HEADER, Seal


def sealed(seal: Seal) -> Any:
    """A dependency for the endpoints of a role: 401 for whoever does not know the secret."""

    async def check(request: Request) -> None:
        if not seal.holds(request.headers.get(HEADER, ""), request.url.path, await request.body()):
            raise ApiError(401, "only the fleet's own workers and routers may ask for this", code="not_sealed")

    return Depends(check)
