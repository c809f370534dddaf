"""Keys of clients and of operators.

A client's key is asked for on every path that is not open, by the middleware `Limits`. An operator's (`--admin-key`) is
asked for on paths that change what the server does for everybody: a router of such paths is made with
`dependencies=[Depends(admin_only)]`. If no such key is set, these paths refuse every request.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable
from contextvars import ContextVar

from fastapi import Request
from starlette.datastructures import Headers

from serving.api.http.context import context_of
from serving.api.http.errors import ApiError
from serving.api.http.settings import ServerSettings
from serving.core.cache.prefix_tree import client_salt


def sent_key(headers: Headers) -> str | None:
    """The key of a request, in OpenAI's header (`Authorization: Bearer KEY`) or in Anthropic's (`x-api-key: KEY`)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key")


_client: ContextVar[str | None] = ContextVar("client", default=None)


def client_id() -> str | None:
    """Whose request is being handled, as a digest of its key; None where the server has no keys."""
    return _client.get()


def set_client(headers: Headers) -> None:
    """Have `client_id` name the sender of the request that the current task handles."""
    key = sent_key(headers)
    _client.set(None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16])


def is_one_of(key: str | None, keys: Iterable[str]) -> bool:
    """Whether a key is among those; an empty one never is. Compared in full with every one, so that the time it takes
    tells nothing."""
    given = (key or "").encode()
    equal = [secrets.compare_digest(given, each.encode()) for each in keys]
    return bool(key) and any(equal)


def check_key(headers: Headers, keys: Iterable[str]) -> None:
    """Refuse a request without one of the keys.

    Raises:
        ApiError: 401.
    """
    if not is_one_of(sent_key(headers), keys):
        raise ApiError(
            401, "missing or wrong API key: send the header Authorization: Bearer KEY", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


def salt_of(salt: str | None, headers: Headers, settings: ServerSettings) -> str | None:
    """The salt under which a request's prefixes are cached.

    With more than one API key each key has prefixes of its own, unless the server is told to share them.
    """
    key = sent_key(headers)
    if settings.share_prefix_cache or len(set(settings.api_key)) < 2 or key is None:
        return salt
    return client_salt(salt, key)


def admin_only(request: Request) -> None:
    """Refuse a request that does not carry an operator's key; a dependency of the paths that are theirs.

    Raises:
        ApiError: 403 where the server has no such key, or the client's is another; 401 where there is none.
    """
    keys = context_of(request).settings.admin_key
    if not keys:
        raise ApiError(403, "this path is for operators: start the server with --admin-key", code="no_admin_key")
    if not sent_key(request.headers):
        check_key(request.headers, keys)
    if not is_one_of(sent_key(request.headers), keys):
        raise ApiError(403, "this path is for operators: it needs the key given as --admin-key", code="not_admin")
