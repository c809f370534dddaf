"""Keys of clients and of operators.

The middleware `Limits` requires a client's key on every path except `OPEN_PATHS`. Paths that affect all clients require
an operator's key (`--admin-key`): their router has `dependencies=[Depends(admin_only)]`. Without such a key in the
settings, these paths refuse every request.
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
from serving.core.cache.content import client_salt


def sent_key(headers: Headers) -> str | None:
    """Returns the key of a request, from OpenAI's header (`Authorization: Bearer KEY`) or Anthropic's
    (`x-api-key: KEY`)."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    return headers.get("x-api-key")


_client: ContextVar[str | None] = ContextVar("client", default=None)


def client_id() -> str | None:
    """Returns the digest of the key of the request that the current task handles; None if the server has no keys."""
    return _client.get()


def set_client(headers: Headers) -> None:
    """Makes `client_id` return the sender of the request that the current task handles."""
    key = sent_key(headers)
    _client.set(None if key is None else hashlib.sha256(key.encode()).hexdigest()[:16])


def is_one_of(key: str | None, keys: Iterable[str]) -> bool:
    """Returns whether `key` is one of `keys`; never true for an empty key. Compares with every key in constant time."""
    sent = (key or "").encode()
    equal = [secrets.compare_digest(sent, each.encode()) for each in keys]
    return bool(key) and any(equal)


def check_key(headers: Headers, keys: Iterable[str]) -> None:
    """Checks that a request has one of the keys; refuses it with 401 otherwise."""
    if not is_one_of(sent_key(headers), keys):
        raise ApiError(
            401, "missing or wrong API key: send the header Authorization: Bearer KEY", code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )  # fmt: skip


def has_several_keys(settings: ServerSettings) -> bool:
    """Returns whether clients have different API keys, which are then kept apart."""
    return len(set(settings.api_key)) > 1


def salt_of(salt: str | None, headers: Headers, settings: ServerSettings) -> str | None:
    """Returns the salt for a request's prefixes in the cache: with several API keys, each key has its own prefixes
    unless `share_prefix_cache` is set."""
    key = sent_key(headers)
    if settings.share_prefix_cache or not has_several_keys(settings) or key is None:
        return salt
    return client_salt(salt, key)


def admin_only(request: Request) -> None:
    """Checks that a request has an operator's key. A dependency of operators' paths.

    Raises:
        ApiError: 403 if the server has no operator's key, or the client's key is not one; 401 if no key was sent.
    """
    keys = context_of(request).settings.admin_key
    if not keys:
        raise ApiError(403, "this path is for operators: start the server with --admin-key", code="no_admin_key")
    if not sent_key(request.headers):
        check_key(request.headers, keys)
    if not is_one_of(sent_key(request.headers), keys):
        raise ApiError(403, "this path is for operators: it needs the key given as --admin-key", code="not_admin")
