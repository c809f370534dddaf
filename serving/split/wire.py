"""Messages between workers about states. A `Transport` sends the arrays."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Handoff = Literal["full", "recompute-last"]
"""`full`: S(N) with its hidden state, from which the decode side samples the first token. `recompute-last`: S(N-1), and
the decode side computes token N itself."""

FailurePolicy = Literal["recompute", "fail"]
"""For a request whose state is not available: compute it on the decode worker, or end it with an error."""


class SplitError(RuntimeError):
    """Another worker's state is not available. The message is one line. The request can be computed without the
    state."""


class SplitTimeout(SplitError):
    """The other worker did not answer in time."""


class AdapterMismatch(SplitError):
    """This worker does not have the adapter with which a state was computed."""


class Message(BaseModel):
    """A message between workers. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Ticket(Message):
    """Where the state of a computed prompt can be fetched until its lease expires."""

    id: str
    worker: str = Field(max_length=2048)
    """The prefill worker's URL."""
    handoff: Handoff
    prompt_token_ids: list[int]
    """The whole prompt."""
    position: int
    """Number of tokens that the state covers; 0: there is no state to fetch."""
    cached_tokens: int = 0
    """Number of these tokens that the prefill worker found in its cache."""
    lease: float = 0.0
    """Seconds until the lease expires, unless it is renewed."""
    patience: float = 0.0
    """Seconds until the router's deadline for the request; 0: no deadline."""
    shared: bool = False
    """The state is from another worker's cache, so the request can always be computed without it."""
    manifest: str = ""
    """Digest of the prefill worker's manifest. If it differs from the handshake's, a new handshake is needed."""
    salt: str | None = None
    """The salt of the request for which the state was computed. Only requests with the same salt may use the state."""
    adapter: str | None = None
    """Digest of the adapter with which the state was computed; None without one. Only requests whose adapter has the
    same digest may use the state."""
    adapter_name: str | None = None
    """The name of this adapter in the request, for error messages; None for a state from another worker's cache."""


class Tokens(Message):
    """A prompt's tokens, salt and adapter, from which the names of its states are computed."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
    salt: str | None = None
    adapter: str | None = None
    """Digest of the request's adapter."""


class ShareRequest(Tokens):
    """A router's request for a state of a whole prompt, from which another worker will continue."""

    beyond: int = Field(0, ge=0)
    """The state must cover more than this many tokens."""


class StateRequest(Message):
    """A decode worker's request for the part of a state that it does not have."""

    id: str
    start: int = Field(ge=0)
    """First token whose keys and values are missing; the state's position if none is missing."""
    unit: int = Field(ge=1)
    """A number of tokens that fills whole pages on both sides."""
    layers: int = Field(ge=0)
    """Layers of keys and values: the model's, then the requested draft layers."""
    transport: str
    manifest: str
    """Digest of the prefill worker's manifest at the handshake."""
    checksum: bool = False


class Offer(Message):
    """A copy that can be fetched: a state, then pieces of the missing tokens as in `point.pieces`."""

    id: str
    key: int
    """Key in the transport."""
    address: str
    position: int
    shapes: list[tuple[tuple[int, ...], str]]
    """Shape and dtype of each array."""
    checksums: list[int] | None = None
    """CRC-32 of each array's bytes, if requested."""
