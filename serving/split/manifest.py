"""Settings that two workers must have in common to exchange states, and settings that may differ."""

from __future__ import annotations

import hashlib

from pydantic import BaseModel, ConfigDict

PROTOCOL = 4
"""Version of the messages between workers."""
LAYOUT = "state[layer]; kv[layer, token, K even V odd, head_dim]"
"""Layout of the transferred arrays."""


class ManifestMismatch(ValueError):
    """Two workers cannot exchange states. The message, one line, names the difference and the solution."""


class Manifest(BaseModel):
    """One worker's settings. `protocol`, `layout` and values marked with a star must be equal on both sides."""

    model_config = ConfigDict(frozen=True, extra="ignore", protected_namespaces=())

    protocol: int
    layout: str
    model: str
    """* Digest of configuration and weights (`AssembledEngine.weights_digest`)."""
    dtype: str
    """* Dtype of states, except accumulated ones."""
    kv_dtype: str
    """* Dtype of keys and values."""
    ssm_dtype: str
    """* Dtype of transferred recurrent states (accumulated). May differ if the decode side converts."""
    rounding: str = "off"
    """* Rounding of running rows."""
    state: dict[str, tuple[int, ...]]
    """* Shapes of a state's transferred arrays, by name."""
    attention_layers: int
    """Number of attention layers, without draft layers."""
    draft_layers: int
    """Draft layers with stored keys and values; the prefill side needs at least as many as the decode side."""
    page_size: int
    """Tokens per page; 0 without attention."""
    state_block_size: int
    shards: int
    """Devices that share each layer."""
    max_model_len: int
    converts_state: bool = False
    """Whether a decode worker accepts recurrent states of another dtype."""
    versions: dict[str, str]
    transports: dict[str, str]
    """Addresses from which arrays can be fetched, by kind of transport."""

    @property
    def digest(self) -> str:
        """A hash of all settings except addresses, sent with every transfer."""
        text = self.model_dump_json(exclude={"transports"}) + " ".join(sorted(self.transports))
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def check(prefill: Manifest, decode: Manifest) -> list[str]:
    """Checks that a decode worker can use a prefill worker's states. Returns notices for the user.

    Page sizes, state block sizes, and numbers of drafts and devices may differ.

    Raises:
        ManifestMismatch: the decode worker cannot use them.
    """
    pairs = {
        "protocol": (prefill.protocol, decode.protocol, "run the same version of mamba-jax on both"),
        "layout": (prefill.layout, decode.layout, "run the same version of mamba-jax on both"),
        "dtype": (prefill.dtype, decode.dtype, "give both the same --dtype"),
        "kv_cache_dtype": (prefill.kv_dtype, decode.kv_dtype, "give both the same --kv-cache-dtype"),
        "model": (prefill.model, decode.model, "give both the same --model, weights and --schedule-invariant"),
        "state": (prefill.state, decode.state, "give both the same --model"),
        "rounding": (prefill.rounding, decode.rounding, "give both the same --checkpoint-dtype and --state-block-size"),
        "attention layers": (prefill.attention_layers, decode.attention_layers, "give both the same --model"),
    }
    for what, (theirs, ours, advice) in pairs.items():
        if theirs != ours:
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
