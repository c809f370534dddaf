"""A prefill worker in another process."""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Any

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from serving.disagg.manifest import Manifest, ManifestMismatch
from serving.disagg.wire import Offer, SplitError, Want

log = logging.getLogger(__name__)

KEY_VARIABLE = "MAMBA_JAX_API_KEY"


class Hello(BaseModel):
    """A decode worker's side of the handshake."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    manifest: Manifest


class Release(BaseModel):
    """What has become of a state."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    wanted: bool


class HttpPeer:
    """Speaks to a prefill worker's `/split` endpoints. `connect` makes one. Thread-safe.

    Errors of HTTP become `SplitError`: to the one who waits for a state it is all the same why it does not come.
    """

    def __init__(self, url: str, manifest: Manifest, client: httpx.Client) -> None:
        self.url, self.manifest, self._client = url, manifest, client

    @classmethod
    def connect(cls, url: str, ours: Manifest, *, timeout: float = 30.0) -> HttpPeer:
        """Shake hands with a prefill worker.

        Raises:
            ManifestMismatch: it has refused; it says the same in its log.
            SplitError: it cannot be reached.
        """
        client = httpx.Client(base_url=url, timeout=timeout, headers=headers())
        hello = Hello(manifest=ours)
        try:
            answer = client.post("/split/hello", json=hello.model_dump())
            if answer.status_code == 409:
                raise ManifestMismatch(f"{url} refuses: {said(answer)}")
            found = Manifest.model_validate(_checked(answer))
        except (httpx.HTTPError, ValidationError) as error:
            client.close()
            raise SplitError(f"prefill worker {url} cannot be reached: {error}") from None
        except BaseException:
            client.close()
            raise
        return cls(url, found, client)

    def offer(self, want: Want) -> Offer:
        """See `PrefillSide.offer`."""
        try:
            return Offer.model_validate(_checked(self._client.post("/split/offer", json=want.model_dump())))
        except (httpx.HTTPError, ValidationError) as error:
            raise SplitError(f"prefill worker {self.url} does not answer: {error}") from None

    def release(self, id: str, *, wanted: bool) -> None:
        """See `PrefillSide.release`."""
        with contextlib.suppress(httpx.HTTPError):
            self._client.post("/split/release", json={"id": id, "wanted": wanted}, timeout=5.0)

    def close(self) -> None:
        """Close its connections."""
        self._client.close()


def headers() -> dict[str, str]:
    """Workers with an API key find it in the environment, as they do for themselves."""
    key = os.environ.get(KEY_VARIABLE)
    return {"Authorization": f"Bearer {key}"} if key else {}


def said(answer: httpx.Response) -> str:
    """The message of an error object, or whatever else came."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        return str(answer.json()["error"]["message"])
    return f"status {answer.status_code}"


def _checked(answer: httpx.Response) -> Any:
    if answer.status_code != 200:
        raise SplitError(said(answer))
    return answer.json()
