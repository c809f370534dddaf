"""Which dimension of each parameter and of each state is divided over the devices."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jax.sharding import PartitionSpec as P

from mamba_jax.config import ConfigError, HybridConfig
from mamba_jax.sharding.axis import AXIS
from mamba_jax.store import MambaSlots, Store, StoreShape

# By the end of a parameter's dotted path; what is not here is the same on all devices (norms, routers, latent
# projections, adapters' first halves). The convolution's weights for B and C are tiny: each device picks its own.
_BY_HEADS = {
    r"in_proj_zx\.weight": P(None, AXIS, None),
    r"in_proj_zx\.bias": P(None, AXIS),
    r"in_proj_dt\.weight": P(AXIS, None),
    r"in_proj_dt\.bias": P(AXIS),
    r"conv_x\.weight": P(AXIS, None),
    r"conv_x\.bias": P(AXIS),
    r"(dt_bias|a_log|d)": P(AXIS),
    r"(mixer|mamba)\.norm\.weight": P(AXIS),
    r"(out_proj|o_proj|down_proj)\.weight": P(None, AXIS),
    r"(q_proj|gate_proj|up_proj)\.weight": P(AXIS, None),
    r"(q_proj|gate_proj|up_proj)\.bias": P(AXIS),
    r"adapters\.q\.up\.weight": P(AXIS, None),
    r"adapters\.gate_up\.up\.weight": P(None, AXIS, None),
    # The product of a whole input: each device takes a piece of the input.
    r"(eh_proj|linear)\.weight": P(None, AXIS),
}
_BY_GROUPS = {r"in_proj_bc\.weight": P(None, AXIS, None), r"in_proj_bc\.bias": P(None, AXIS)}
_BY_KV_HEADS = {
    r"(k_proj|v_proj)\.weight": P(AXIS, None),
    r"(k_proj|v_proj)\.bias": P(AXIS),
    r"adapters\.[kv]\.up\.weight": P(AXIS, None),
}
_BY_VOCABULARY = {r"(embed|lm_head)\.weight": P(AXIS, None)}
_ADDED_ONCE = re.compile(r"(^|\.)(out_proj|o_proj|down_proj|latent_out|eh_proj|linear)\.bias$")


@dataclass(frozen=True)
class Partition:
    """How a model is divided over `shards` devices. `Partition.of` makes one."""

    config: HybridConfig
    shards: int
    groups: bool
    """B and C are divided by groups; otherwise (fewer groups than devices) every device has all of them."""
    kv_heads: bool
    """Keys and values are divided by heads; otherwise (fewer than devices) several devices keep the same head."""
    whole_experts: bool
    """Each device has some of the experts; otherwise a piece of every expert."""
    vocabulary: bool
    """Embedding and head are divided by tokens of the vocabulary; otherwise every device has all of them."""

    @classmethod
    def of(cls, config: HybridConfig, shards: int) -> Partition:
        """The division of a model.

        Raises:
            ConfigError: something does not divide evenly.
        """
        return _partition(config, shards)

    def parameter(self, path: str) -> P:
        """The division of the parameter with this dotted path (or with the end of one, from its mixer on)."""
        return _spec(self, path)

    def added_once(self, path: str) -> bool:
        """Whether the parameter is added to a sum over devices: one device only may do that."""
        return _ADDED_ONCE.search(path) is not None

    def state(self, state: Any) -> Any:
        """The division of a sublayer's piece of the store, in the same structure."""
        if state is None:
            return None
        if isinstance(state, tuple):
            return tuple(self.state(part) for part in state)
        if isinstance(state, MambaSlots):
            # Device by device, its own groups' B before their C: the order of channels depends on `shards`.
            bc = P(None, None, AXIS) if self.groups else P()
            return MambaSlots(ssm=P(None, AXIS), conv_x=P(None, None, AXIS), conv_bc=bc)  # type: ignore[arg-type]
        return P(None, None, AXIS)  # keys and values

    def store(self, store: Store) -> Store:
        """The division of the whole store, in its structure."""
        return Store(
            mamba=self.state(store.mamba),
            kv=self.state(store.kv),
            hidden=P(),  # type: ignore[arg-type]
            tags=None if store.tags is None else P(),  # type: ignore[arg-type]
        )

    def store_shape(self, shape: StoreShape) -> StoreShape:
        """The state of the whole model as arrays of all devices: heads of keys and values may occur several times."""
        return shape if self.kv_heads else _replace(shape, kv_heads=self.shards)

    def device_shape(self, shape: StoreShape) -> StoreShape:
        """The state that one device holds."""
        whole, shards = self.store_shape(shape), self.shards
        groups = whole.groups // shards if self.groups else whole.groups
        return _replace(whole, heads=whole.heads // shards, groups=groups, kv_heads=whole.kv_heads // shards)


@lru_cache(maxsize=64)
def _partition(config: HybridConfig, shards: int) -> Partition:
    mamba, attention, moe = config.mamba, config.attention, config.moe

    def divide(what: str, count: int) -> None:
        if count % shards:
            raise ConfigError(f"tensor_parallel_size {shards} does not divide this model's {count} {what}")

    def spread(what: str, count: int) -> bool:
        """Whether `count` things are divided; fewer than devices may be shared by equally many devices each."""
        if count % shards and shards % count:
            raise ConfigError(
                f"tensor_parallel_size {shards} neither divides this model's {count} {what} nor is a multiple of them"
            )
        return count % shards == 0

    groups = kv_heads = whole_experts = True
    if mamba:
        divide("Mamba heads", mamba.num_heads)
        groups = spread("Mamba groups", mamba.num_groups)
    if attention:
        divide("attention heads", attention.num_heads)
        kv_heads = spread("key-value heads", attention.num_kv_heads)
    if config.mlp:
        sizes = config.mlp.intermediate_size
        for size in sorted({sizes} if isinstance(sizes, int) else set(sizes)):
            divide("MLP channels", size)
    if moe:
        whole_experts = moe.num_experts % shards == 0
        if not whole_experts:
            divide(f"channels in each of {moe.num_experts} experts", moe.intermediate_size)
        divide("channels of the shared expert", moe.shared_size)
    if config.mtp_pattern or config.shared:
        divide("hidden channels", config.hidden_size)
    return Partition(config, shards, groups, kv_heads, whole_experts, config.vocab_size % shards == 0)


@lru_cache(maxsize=1 << 16)
def _spec(partition: Partition, path: str) -> P:
    if re.search(r"experts\.(up|down)$", path):
        gated = bool(partition.config.moe and partition.config.moe.gated)
        if partition.whole_experts:
            return P(AXIS)
        return P(None, None, AXIS) if path.endswith("down") or gated else P(None, AXIS)
    tables = [_BY_HEADS]
    tables += [_BY_GROUPS] if partition.groups else []
    tables += [_BY_KV_HEADS] if partition.kv_heads else []
    tables += [_BY_VOCABULARY] if partition.vocabulary else []
    for table in tables:
        for pattern, spec in table.items():
            if re.search(rf"(^|\.){pattern}$", path):
                return spec
    return P()


def _replace(shape: StoreShape, **sizes: int) -> StoreShape:
    return StoreShape(**(vars(shape) | sizes))
