"""Pads query heads with zeros, so that tensor parallelism can divide models whose number of heads does not divide."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from mamba_jax.config import Division, HybridConfig, ModelConfigError, need
from mamba_jax.model import HybridModel, num_parameters, parameters
from mamba_jax.sharding import TENSOR, Partition, shard_parameters
from mamba_jax.sharding.parameters import placement, placements

MAX_COST = 0.25
"""Largest share of the model's weights that padding may add."""


@dataclass(frozen=True)
class HeadPadding:
    """Zero heads of queries at the end of each group of heads that shares keys and values.

    The columns of the output projection that belong to a zero head are zeros too, so the results are unchanged. Keys,
    values and states have the same shapes with and without padding.
    """

    config: HybridConfig
    """The model as its checkpoint has it."""
    padded: HybridConfig
    """The model with padded heads; equal to `config` if nothing is padded."""
    cost: float = 0.0
    """Parameters that padding adds, as a share of the model's."""

    @staticmethod
    @lru_cache(maxsize=64)
    def of(config: HybridConfig, shards: int) -> HeadPadding:
        """Returns the padding that the model needs on this number of devices.

        Raises:
            ModelConfigError: the model does not divide over the devices, and padding cannot change that, or would add
                more than `MAX_COST`.
        """
        attention = config.attention
        if attention is None or attention.num_heads % shards == 0 or shards % attention.num_kv_heads:
            return HeadPadding(config, config)
        if attention.qk_norm is not None and attention.qk_norm.all_heads:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} does not divide this model's {attention.num_heads} attention heads, "
                "which cannot be padded: a norm takes the mean over all of them"
            )
        of_each = shards // attention.num_kv_heads  # devices that share a head of keys
        queries = attention.num_heads // attention.num_kv_heads
        num_heads = attention.num_kv_heads * math.ceil(queries / of_each) * of_each
        windowed = config.windowed_attention
        padded = replace(
            config,
            attention=replace(attention, num_heads=num_heads),
            windowed_attention=None if windowed is None else replace(windowed, num_heads=num_heads),
        )
        Partition.of(padded, shards)
        before, after = (num_parameters(parameters(HybridModel.abstract(each))) for each in (config, padded))
        cost = after / before - 1
        if cost > MAX_COST:
            raise ModelConfigError(
                f"tensor_parallel_size {shards} does not divide this model's {attention.num_heads} attention heads; "
                f"padding them to {num_heads} would add {cost:.0%} to the weights (at most {MAX_COST:.0%} is allowed)"
            )
        return HeadPadding(config, padded, cost)

    def __bool__(self) -> bool:
        return self.cost > 0

    @property
    def notice(self) -> str:
        """Describes the padding in one line."""
        before, after = (need(config.attention).num_heads for config in (self.config, self.padded))
        return f"{before} attention heads are padded with zeros to {after}, which adds {self.cost:.1%} to the weights"

    def pads(self, path: str) -> Division | None:
        """Returns the division into heads of a parameter that is padded, before padding; None for other parameters."""
        before, after = (placement(placements(config), path) for config in (self.config, self.padded))
        return before if isinstance(before, Division) and before != after else None

    def shape(self, path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the padded shape of a parameter.

        Raises:
            ModelConfigError: it is quantized in groups that are larger than a head.
        """
        division = self.pads(path)
        if division is None:
            return shape
        size, heads = shape[division.axis], division.units
        if size % heads:
            raise ModelConfigError(
                f"{path} is quantized in {size} groups, which do not divide into {heads} attention heads: padding them "
                "is not supported; use a tensor_parallel_size that divides the heads"
            )
        sizes = list(shape)
        sizes[division.axis] = size // heads * need(self.padded.attention).num_heads
        return tuple(sizes)

    def values(self, values: Mapping[str, Array], mesh: Mesh) -> dict[str, Array]:
        """Returns all parameters by dotted path, padded and placed on the mesh."""
        partition = Partition.of(self.padded, mesh.shape[TENSOR])
        found = {}
        for path, value in values.items():
            division = self.pads(path)
            if division is not None and value.shape != self.shape(path, value.shape):
                place = NamedSharding(mesh, partition.parameter(path))
                if not isinstance(value.sharding, NamedSharding) or value.sharding.mesh != mesh:
                    value = jax.device_put(value, NamedSharding(mesh, P()))
                value = jax.jit(partial(self._with_zero_heads, division), out_shardings=place)(value)
            found[path] = value
        return shard_parameters(found, self.padded, mesh)

    def _with_zero_heads(self, division: Division, value: Array) -> Array:
        """Adds zero heads at the end of each group."""
        axis, groups = division.axis, need(self.config.attention).num_kv_heads
        before, after = value.shape[:axis], value.shape[axis + 1 :]
        of_group = value.reshape(*before, groups, division.units // groups, -1, *after)
        widths = [(0, 0)] * of_group.ndim
        widths[axis + 1] = (0, (need(self.padded.attention).num_heads - division.units) // groups)
        return jnp.pad(of_group, widths).reshape(*before, -1, *after)

    def load_sharding(self, partition: Partition, mesh: Any, path: str) -> NamedSharding:
        """Returns where a parameter is loaded to. Parameters that are padded later are loaded to every device."""
        # A config does not say whether the checkpoint has scales of keys and values, one number each, or an embedding
        # and a head of the draft layer's own, which are divided as the model's.
        whole = self.pads(path) or path.endswith((".k_scale", ".v_scale"))
        path = "embed.weight" if path in ("mtp.embed.weight", "mtp.lm_head.weight") else path
        return NamedSharding(mesh, P() if whole else partition.parameter(path))
