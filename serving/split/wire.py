"""Messages between workers about states, and the settings that they must have in common to exchange them.

A `Transport` sends the arrays.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

PROTOCOL = 4  # version of the messages between workers
LAYOUT = "state[layer]; kv[layer, token, K even V odd, head_dim]"  # layout of the transferred arrays

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


class ManifestMismatch(ValueError):
    """Two workers cannot exchange states. The message, one line, names the difference and the solution."""


class Message(BaseModel):
    """A message between workers. Unknown fields are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())


class Manifest(Message):
    """One worker's settings. `protocol`, `layout` and values marked with a star must be equal on both sides."""

    protocol: int
    layout: str
    model: str  # * Digest of configuration and weights (`AssembledEngine.weights_digest`)
    dtype: str  # * Dtype of states, except accumulated ones
    kv_dtype: str  # * Dtype of keys and values
    ssm_dtype: str
    """* Dtype of transferred recurrent states (accumulated). May differ if the decode side converts."""
    rounding: str = "off"  # * Rounding of running rows
    state: dict[str, tuple[int, ...]]  # * Shapes of a state's transferred arrays, by name
    attention_layers: int  # number of attention layers, without draft layers
    draft_layers: int
    """Draft layers with stored keys and values; the prefill side needs at least as many as the decode side."""
    page_size: int  # tokens per page; 0 without attention
    state_block_size: int
    shards: int  # devices that share each layer
    max_model_len: int
    converts_state: bool = False  # whether a decode worker accepts recurrent states of another dtype
    versions: dict[str, str]
    transports: dict[str, str]  # addresses from which arrays can be fetched, by kind of transport

    @property
    def digest(self) -> str:
        """A hash of all settings except addresses, sent with every transfer."""
        text = self.model_dump_json(exclude={"transports"}) + " ".join(sorted(self.transports))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


_EQUAL = {
    "protocol": "run the same version of mamba-jax on both",
    "layout": "run the same version of mamba-jax on both",
    "dtype": "give both the same --dtype",
    "kv_dtype": "give both the same --kv-cache-dtype",
    "model": "give both the same --model, weights, --speculative-model and --schedule-invariant (with it, also the "
    "same --tensor-parallel-size and --context-parallel-size)",
    "state": "give both the same --model",
    "rounding": "give both the same --checkpoint-dtype and --state-block-size",
    "attention_layers": "give both the same --model",
}
"""Fields that must be equal, and what to do where they are not."""


def check(prefill: Manifest, decode: Manifest) -> list[str]:
    """Checks that a decode worker can use a prefill worker's states. Returns notices for the user.

    Page sizes, state block sizes, and numbers of drafts and devices may differ (those of devices not with
    `schedule_invariant`).

    Raises:
        ManifestMismatch: the decode worker cannot use them.
    """
    for name, advice in _EQUAL.items():
        theirs, ours = getattr(prefill, name), getattr(decode, name)
        if theirs != ours:
            what = "kv_cache_dtype" if name == "kv_dtype" else name.replace("_", " ")
            raise ManifestMismatch(f"{what} differs: prefill has {theirs}, decode has {ours}; {advice}")
    notices = []
    if prefill.ssm_dtype != decode.ssm_dtype:
        if not decode.converts_state:
            raise ManifestMismatch(
                f"ssm_dtype differs: prefill has {prefill.ssm_dtype}, decode has {decode.ssm_dtype}; give both the "
                "same --ssm-dtype, or --convert-state to the decode worker"
            )
        notices.append(f"states are converted from {prefill.ssm_dtype} to {decode.ssm_dtype}: outputs may differ")
    if prefill.draft_layers < decode.draft_layers:
        raise ManifestMismatch(
            f"draft layers differ: decode drafts with {decode.draft_layers}, prefill keeps the keys and values of "
            f"{prefill.draft_layers}; start the prefill worker with --role prefill or the same drafts"
        )
    if not set(prefill.transports) & set(decode.transports):
        raise ManifestMismatch(
            f"no common transport: prefill has {sorted(prefill.transports)}, decode has {sorted(decode.transports)}; "
            "give both the same --transport"
        )
    for name, theirs in prefill.versions.items():
        ours = decode.versions.get(name, "none")
        if theirs != ours:
            notices.append(f"{name} differs: prefill has {theirs}, decode has {ours}")
    return notices


class Ticket(Message):
    """Where the state of a computed prompt can be fetched until its lease expires."""

    id: str
    worker: str = Field(max_length=2048)  # the prefill worker's URL
    handoff: Handoff
    prompt_token_ids: list[int]  # the whole prompt
    position: int  # number of tokens that the state covers; 0: there is no state to fetch
    cached_tokens: int = 0  # number of these tokens that the prefill worker found in its cache
    written_tokens: list[tuple[float | None, int]] = []  # numbers of those that it added, with the ttl of their marks
    lease: float = 0.0  # seconds until the lease expires, unless it is renewed
    patience: float = 0.0  # seconds until the router's deadline for the request; 0: no deadline
    shared: bool = False  # the state is from another worker's cache, so the request can always be computed without it
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
    adapter: str | None = None  # digest of the request's adapter


class ShareRequest(Tokens):
    """A router's request for a state of a whole prompt, from which another worker will continue."""

    beyond: int = Field(0, ge=0)  # the state must cover more than this many tokens


class StateRequest(Message):
    """A decode worker's request for the part of a state that it does not have."""

    id: str
    start: int = Field(ge=0)  # first token whose keys and values are missing; the state's position if none is missing
    unit: int = Field(ge=1)  # a number of tokens that fills whole pages on both sides
    layers: int = Field(ge=0)  # layers of keys and values: the model's, then the requested draft layers
    transport: str
    manifest: str  # digest of the prefill worker's manifest at the handshake
    checksum: bool = False


class Offer(Message):
    """A copy that can be fetched: a state, then pieces of the missing tokens as in `state_transfer.programs.pieces`."""

    id: str
    key: int  # key in the transport
    address: str
    position: int
    shapes: list[tuple[tuple[int, ...], str]]  # shape and dtype of each array
    checksums: list[int] | None = None  # CRC-32 of each array's bytes, if requested
