"""Settings of the prefill/decode split, defined once for `mamba-jax serve --role` and `mamba-jax router`."""

from __future__ import annotations

import os
from typing import Any, Literal

from pydantic import Field

from serving.api.http.settings import ConnectionBounds, RequestBounds
from serving.settings import Settings, json_object
from serving.split.seal import SECRET_VARIABLE, Seal
from serving.split.wire import FailurePolicy, Handoff

Role = Literal["prefill", "decode"]


class FleetSettings(Settings):
    """The secret of a fleet, which its workers and routers have."""

    split_secret: str | None = Field(
        None,
        min_length=16,
        repr=False,
        description="A secret shared by all workers and routers of a fleet; workers accept only messages signed with "
        f"it. Also read from {SECRET_VARIABLE}. A worker needs it unless it listens on loopback.",
    )

    @property
    def seal(self) -> Seal:
        """Signs and checks messages with the fleet's secret."""
        return Seal(self.split_secret or os.environ.get(SECRET_VARIABLE, ""))


class KvEventsSettings(Settings):
    """The value of `--kv-events-config`, with vLLM's names."""

    enable_kv_cache_events: bool = False
    publisher: str = Field("zmq", pattern="^(zmq|null)$")
    endpoint: str = "tcp://127.0.0.1:5557"
    replay_endpoint: str | None = None
    topic: str = ""
    hwm: int = Field(100_000, ge=1)
    cache_salt: bool = False  # not vLLM's: a field for Dynamo, with which vLLM's router drops events
    buffer_steps: int = 10_000  # not used: a replay is a snapshot
    max_queue_size: int = 100_000  # not used: the queue's bound is fixed


class SplitSettings(FleetSettings):
    """Settings of one worker."""

    COMMON = ("role",)

    role: Role | None = None
    """Role of this worker behind `mamba-jax router`: prefill or decode. Unset: a server that does both."""
    transport: tuple[Literal["jax", "tcp"], ...] = ()
    """How states are transferred: jax (device to device, JAX's transfer engine) or tcp (through host memory);
    repeatable, the preferred one first. Unset: jax if available, then tcp."""
    advertise: str | None = None
    """Host name or address by which other workers reach this one."""
    lease: float = Field(30.0, gt=0)
    """prefill: seconds to hold a state for its decode worker after its last renewal."""
    max_lease: float = Field(600.0, gt=0)
    """prefill: maximum seconds to hold a state, with renewals."""
    max_kept: int = Field(64, ge=1)
    """prefill: maximum number of states held for decode workers."""
    max_transfer_bytes: int = Field(1 << 30, ge=1)
    """Maximum bytes of states in transfer, in addition to the store: copies that wait to be fetched (prefill), or
    arriving states (decode)."""
    peer: tuple[str, ...] = ()
    """decode: URL of a prefill worker to fetch states from; repeatable. Unset: any worker that a signed message
    names."""
    on_failure: FailurePolicy = "recompute"
    """decode: whether to recompute or fail a request whose state does not arrive."""
    fetch_timeout: float = Field(30.0, gt=0)
    """decode: seconds to wait for a state."""
    share: bool = False
    """decode: let other workers fetch this worker's states. Needs --max-transfer-bytes a second time."""
    convert_state: bool = False
    """decode: accept recurrent states of another dtype and convert them."""
    kv_events_config: str | None = None
    """JSON object with vLLM's names: publish KV events over ZeroMQ for other routers. Token ids are sent unencrypted.
    Needs the extra events."""

    @property
    def kv_events(self) -> KvEventsSettings | None:
        """Settings of KV events; None if none are published.

        Raises:
            ConfigError: `kv_events_config` is not a JSON object, or has unknown names or invalid values.
        """
        chosen = KvEventsSettings.create(**json_object("kv_events_config", self.kv_events_config or "{}"))
        return chosen if chosen.enable_kv_cache_events and chosen.publisher == "zmq" else None

    @property
    def followed(self) -> bool:
        """Whether routers follow the engine's states."""
        return bool(self.seal.secret) or self.kv_events is not None

    @property
    def engine_flags(self) -> dict[str, Any]:
        """Defaults of engine flags for the role: data stored for the other side, and memory for states in transfer."""
        if self.role is None:
            return {}
        times = 2 if self.role == "decode" and self.share else 1
        return {"reserved_bytes": times * self.max_transfer_bytes} | (
            {"keep_draft_kv": True} if self.role == "prefill" else {}
        )


class RouterSettings(ConnectionBounds, RequestBounds, FleetSettings):
    """Settings of the router. It has the same limits on requests as a server."""

    prefill: tuple[str, ...] = ()
    """URL of a prefill worker; repeatable."""
    decode: tuple[str, ...] = ()
    """URL of a decode worker; repeatable."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(8000, ge=0, le=65535)
    """Port to listen on."""
    handoff: Handoff = "full"
    """full: the decode worker samples the first token from the state it receives. recompute-last: it computes the
    prompt's last token itself."""
    on_failure: FailurePolicy = "recompute"
    """If no prefill worker is available: recompute on the decode worker, or fail."""
    share_above: int | None = Field(None, ge=0)
    """Make a decode worker fetch the state of another, busier worker if that state covers this many tokens more than
    its own; workers need --share. Unset: never."""
    share_timeout: float = Field(2.0, gt=0)
    """Seconds to wait for such a state before computing it."""
    split_above: int = Field(0, ge=0)
    """Prompts of up to this many characters skip the prefill workers."""
    routing: Literal["events", "affinity"] = "events"
    """How the router chooses workers. events: by the deepest state of the prompt that workers report, and by the
    prompt's text if there is none. affinity: by the text only."""
    affinity: int = Field(2048, ge=0)
    """Number of leading characters of a prompt that choose its workers, so that shared prefixes meet."""
    slack: int = Field(4, ge=0)
    """Maximum number of requests that the chosen worker may have more than the least busy one."""
    max_worker_requests: int = Field(3072, ge=1)
    """Maximum number of running requests per worker; further ones go to another worker or get 503. Keep the sum over
    all routers below the worker's --max-connections, with a reserve for health checks."""
    check_interval: float = Field(1.0, gt=0)
    """Seconds between health checks of each worker."""
    check_timeout: float = Field(5.0, gt=0)
    """Seconds to wait for a health check; after three missed ones a worker is down."""
    connect_timeout: float = Field(3.0, gt=0)
    """Seconds to wait for a worker to accept a connection."""
    first_token_timeout: float = Field(120.0, gt=0)
    """Maximum seconds until a stream starts, including retries on other workers."""
    request_timeout: float = Field(600.0, gt=0)
    """Maximum seconds for a response without streaming."""
    stall_timeout: float = Field(60.0, gt=0)
    """Maximum seconds between two pieces of a stream."""
    drain_timeout: float = Field(30.0, ge=0)
    """Seconds that running requests have to finish at shutdown."""
    api_key: tuple[str, ...] = ()
    """A key that clients must send; repeatable. Unset: the workers check clients' keys."""
