"""A prefill worker in another process, and the signatures of requests to workers."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import logging
import os
from collections.abc import Generator, Sequence

import httpx
from pydantic import BaseModel, Field, ValidationError

from serving.api.http.protocol.common import ErrorBody
from serving.split.prefill_side import TooMany
from serving.split.seal import RECEIVER, Seal
from serving.split.wire import Manifest, ManifestMismatch, Message, Offer, SplitError, SplitTimeout, StateRequest

log = logging.getLogger(__name__)

KEY_VARIABLE = "MAMBA_JAX_API_KEY"
JSON = {"content-type": "application/json"}  # headers of every client of workers, whose requests with a body are JSON
_LONGEST = 1 << 20  # maximum size of a response in bytes
_BRIEF = 5.0  # timeout in seconds of requests without a caller that waits for the response
_MOST_NAMES = 4096


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


class SealAuth(httpx.Auth):
    """Signs requests to the fleet's servers. It learns a receiver's name from its first refusal, also after a restart.

    Names are public. A server that claims another server's name gains nothing, because it can only forward the
    messages to that server.
    """

    requires_request_body = True

    def __init__(self, seal: Seal) -> None:
        self._seal = seal
        self._names: dict[str, str] = {}  # names of receivers by URL, without the last part of the path

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
            client = httpx.AsyncClient(base_url=url, timeout=timeout, headers=headers(keys) | JSON)
        except httpx.InvalidURL as error:
            raise SplitError(f"prefill worker {url[:200]} is unreachable: {error}") from None
        peer = cls(url, ours, client, seal or Seal())
        try:
            status, content = await peer._post("/split/hello", HandshakeRequest(manifest=ours), timeout)
            if status == 409:
                raise ManifestMismatch(f"refused by {url}: {error_of(status, content).message}")
            if status != 200:
                raise SplitError(f"handshake with prefill worker {url} failed: {error_of(status, content).message}")
            peer.manifest = Manifest.model_validate_json(content)
        except BaseException as error:
            await client.aclose()
            if isinstance(error, SplitTimeout | ValidationError):
                raise SplitError(f"prefill worker {url} is unreachable: {error}") from None
            raise
        return peer

    def offer(self, want: StateRequest, seconds: float) -> Offer:
        """Requests an offer; see `PrefillSide.offer`."""
        future = self._start("/split/offer", want, seconds)
        if future is None:
            raise SplitError("this worker is shutting down")
        try:
            status, content = future.result(seconds + 1.0)
        except (TimeoutError, concurrent.futures.CancelledError):
            future.cancel()
            raise SplitTimeout(f"prefill worker {self.url} did not answer within {seconds:.1f} s") from None
        if status == 503:
            raise TooMany(error_of(status, content).message)
        if status != 200:
            raise SplitError(error_of(status, content).message)
        try:
            return Offer.model_validate_json(content)
        except ValidationError:
            raise SplitError(f"prefill worker {self.url} sent an invalid offer") from None

    def renew(self, ids: Sequence[str]) -> None:
        """Renews leases; see `PrefillSide.renew`."""
        self._start("/split/renew", RenewRequest(ids=list(ids)[:8192]), _BRIEF)

    def release(self, id: str, *, wanted: bool) -> None:
        """Releases a state; see `PrefillSide.release`."""
        self._start("/split/release", Release(id=id, wanted=wanted), _BRIEF)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    def _start(
        self, path: str, message: BaseModel, seconds: float
    ) -> concurrent.futures.Future[tuple[int, bytes]] | None:
        """Starts a request on the event loop; None if the loop is closed, because this worker shuts down."""
        work = self._post(path, message, seconds)
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            return None

    async def _post(self, path: str, message: BaseModel, seconds: float) -> tuple[int, bytes]:
        """Returns the status and the content of the response."""
        body, content = message.model_dump_json().encode(), bytearray()
        stream = self._client.stream("POST", path, content=body, auth=self._auth)
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


def error_of(status: int, content: bytes) -> ErrorBody:
    """Returns the error of a response; its message is the status if the content is not an error object."""
    try:
        error = json.loads(content)["error"]
        return ErrorBody(message=error["message"], type="", code=error.get("code"))
    except (ValueError, LookupError, TypeError, RecursionError):
        return ErrorBody(message=f"status {status}", type="")
