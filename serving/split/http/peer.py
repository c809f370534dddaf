"""A prefill worker in another process."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import os
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from serving.split.http.sealed import SealAuth
from serving.split.manifest import Manifest, ManifestMismatch
from serving.split.prefill_side import TooMany
from serving.split.seal import Seal
from serving.split.wire import Message, Offer, SplitError, SplitTimeout, StateRequest

log = logging.getLogger(__name__)

T = TypeVar("T")

KEY_VARIABLE = "MAMBA_JAX_API_KEY"
_LONGEST = 1 << 20
"""Maximum size of a response in bytes."""
_BRIEF = 5.0
"""Timeout in seconds of requests without a caller that waits for the response."""


class HandshakeRequest(Message):
    """A decode worker's side of the handshake."""

    manifest: Manifest


class Release(Message):
    """Whether a state was fetched."""

    id: str
    wanted: bool


class RenewRequest(Message):
    """States whose leases to renew."""

    ids: list[str] = Field(max_length=8192)


class HttpPeer:
    """A client of a prefill worker's `/split` endpoints. Create one with `connect`, on the event loop that it will use.

    The methods of `Peer` may be called from any other thread. Each call has one deadline, including the time to read
    the response. HTTP errors become `SplitError`.
    """

    def __init__(self, url: str, manifest: Manifest, client: httpx.AsyncClient, seal: Seal) -> None:
        self.url, self.manifest, self._client, self._auth = url, manifest, client, SealAuth(seal)
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def connect(
        cls, url: str, ours: Manifest, *, seal: Seal | None = None, keys: Sequence[str] = (), timeout: float = 5.0
    ) -> HttpPeer:
        """Connects to a prefill worker, which may require one of `keys`.

        Raises:
            ManifestMismatch: the worker refused, and logged the same message.
            SplitError: the worker is unreachable.
        """
        try:
            client = httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers(keys))
        except httpx.InvalidURL as error:
            raise SplitError(f"prefill worker {url[:200]} is unreachable: {error}") from None
        peer = cls(url, ours, client, seal or Seal())
        try:
            status, content = await peer._post("/split/hello", HandshakeRequest(manifest=ours), timeout)
            if status == 409:
                raise ManifestMismatch(f"refused by {url}: {error_message(status, content)}")
            if status != 200:
                raise SplitError(f"handshake with prefill worker {url} failed: {error_message(status, content)}")
            peer.manifest = Manifest.model_validate_json(content)
        except (SplitTimeout, ValidationError) as error:
            await client.aclose()
            raise SplitError(f"prefill worker {url} is unreachable: {error}") from None
        except BaseException:
            await client.aclose()
            raise
        return peer

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        """Requests an offer; see `PrefillSide.offer`."""
        status, content = self._from_thread(self._post("/split/offer", want, seconds), seconds)
        if status == 503:
            raise TooMany(error_message(status, content))
        if status != 200:
            raise SplitError(error_message(status, content))
        try:
            return Offer.model_validate_json(content)
        except ValidationError:
            raise SplitError(f"prefill worker {self.url} sent an invalid offer") from None

    def renew(self, ids: Sequence[str]) -> None:
        """Renews leases; see `PrefillSide.renew`."""
        self._send("/split/renew", RenewRequest(ids=list(ids)[:8192]))

    def release(self, id: str, *, wanted: bool) -> None:
        """Releases a state; see `PrefillSide.release`."""
        self._send("/split/release", Release(id=id, wanted=wanted))

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    def _from_thread(self, work: Coroutine[Any, Any, T], seconds: float) -> T:
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed: this worker shuts down
            work.close()
            raise SplitError("this worker is shutting down") from None
        try:
            return future.result(seconds + 1.0)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise SplitTimeout(f"prefill worker {self.url} did not answer within {seconds:.1f} s") from None

    def _send(self, path: str, message: BaseModel) -> None:
        async def post() -> None:
            with contextlib.suppress(SplitError):
                await self._post(path, message, _BRIEF)

        work = post()
        try:
            asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()

    async def _post(self, path: str, message: BaseModel, seconds: float) -> tuple[int, bytes]:
        """Returns the status and the content of the response."""
        body, content = message.model_dump_json().encode(), bytearray()
        own = {"content-type": "application/json"}
        stream = self._client.stream("POST", path, content=body, headers=own, auth=self._auth)
        try:
            async with asyncio.timeout(seconds), stream as answer:
                async for piece in answer.aiter_bytes():
                    content += piece
                    if len(content) > _LONGEST:
                        raise SplitError(f"prefill worker {self.url} sent more than {_LONGEST:,} bytes")
                return answer.status_code, bytes(content)
        except (TimeoutError, httpx.TimeoutException):
            raise SplitTimeout(f"prefill worker {self.url} did not answer within {seconds:.1f} s") from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise SplitError(f"prefill worker {self.url} is unreachable: {error or type(error).__name__}") from None


def headers(keys: Sequence[str] = ()) -> dict[str, str]:
    """Returns the headers with the fleet's API key: the first of `keys`, or the one in the environment."""
    key = next(iter(keys), None) or os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def error_message(status: int, content: bytes) -> str:
    """Returns the message of an error object; the status if the content is not an error object."""
    with contextlib.suppress(ValidationError):
        return _Error.model_validate_json(content).error.message
    return f"status {status}"


def error_code(content: bytes) -> str | None:
    """Returns the code of an error object; None if the object has no code or the content is not an error object."""
    with contextlib.suppress(ValidationError):
        return _Error.model_validate_json(content).error.code
    return None


class _ErrorBody(BaseModel):
    message: str
    code: str | None = None


class _Error(BaseModel):
    error: _ErrorBody
