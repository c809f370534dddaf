"""What workers say to each other about a state. Arrays go by a `Transport`; this is everything else."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Handoff = Literal["full", "recompute-last"]
"""`full`: S(N) with its hidden state, from which the decode side samples the first token. `recompute-last`: S(N-1), and
the decode side runs token N itself."""


FailurePolicy = Literal["recompute", "fail"]
"""What becomes of a request whose state cannot be had: computed by the decode worker, or ended with an error."""


class SplitError(RuntimeError):
    """A state cannot be had from another worker: one line that says why. The request can be computed without it."""


class SplitTimeout(SplitError):
    """The other worker has not answered in time."""


class Ticket(BaseModel):
    """A prompt has been computed: where its state waits, for as long as the lease runs."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    worker: str
    """The prefill worker's URL."""
    handoff: Handoff
    prompt_token_ids: list[int]
    """All of the prompt."""
    position: int
    """Tokens that the state has absorbed; 0 = there is nothing to fetch."""
    cached_tokens: int = 0
    """Of those, how many the prefill worker found in its cache."""
    lease: float = 0.0
    """Seconds for which it is kept, unless it is renewed."""
    patience: float = 0.0
    """Seconds for which its request may still wait, by the router's deadline; 0 = it has none."""
    shared: bool = False
    """The state is one that the other worker happens to have: the request can always do without it."""
    manifest: str = ""
    """Digest of the prefill worker's manifest: another one than at the handshake asks for a new handshake."""


class ShareRequest(BaseModel):
    """What a router asks a worker for whose state another one is to go on from."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    tokens: list[int]
    """Of the whole prompt."""
    salt: str | None = None
    beyond: int = Field(0, ge=0)
    """A state of no more than so many tokens is of no use."""


class Tokens(BaseModel):
    """A prompt's tokens and the salt of its cache: what the names of its states are made of."""

    tokens: list[Annotated[int, Field(ge=0, lt=1 << 31)]]
    salt: str | None = None


class StateRequest(BaseModel):
    """What a decode worker lacks of it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    start: int = Field(ge=0)
    """Keys and values of tokens from here on are missing. `start` = position: none."""
    unit: int = Field(ge=1)
    """Tokens that fill whole pages on both sides."""
    layers: int = Field(ge=0)
    """Layers of keys and values: the model's, then as many draft layers as are wanted."""
    transport: str
    manifest: str
    """Digest of the prefill worker's manifest, as the decode worker knows it."""
    checksum: bool = False


class Offer(BaseModel):
    """The copy is made and can be fetched: a state, then pieces as `point.pieces` cuts the missing tokens."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: str
    key: int
    """Of the transport."""
    address: str
    position: int
    shapes: list[tuple[tuple[int, ...], str]]
    """Shape and dtype of each array."""
    checksums: list[int] | None = None
    """CRC-32 of each array's bytes, where asked for."""
