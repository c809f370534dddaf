"""The least that a step must move and compute: weights once, states read and written once, keys and values read.

All figures are those of one of the devices that a model is divided over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.sharding import PartitionSpec

from mamba_jax.config import SHARED, HybridConfig, need
from mamba_jax.modules.quantised import bits_of, weight_of
from mamba_jax.sharding import TENSOR, Partition
from mamba_jax.store import StoreShape
from mamba_jax.tails import Replay

_DRAFTERS = ("mtp.", "drafter.")


@dataclass(frozen=True)
class Work:
    """One step of one program."""

    bytes: int
    """To and from the device's memory."""
    flops: int
    collective_bytes: int
    """Total size of arrays that devices reduce or gather."""


@dataclass(frozen=True)
class Workload:
    """The inputs of a step."""

    tokens: int
    """Fed to the model."""
    rows: int
    heads: int
    """Positions that go through the output head."""
    states_read: int
    states_written: float
    context: int
    """Tokens that each fed token attends to, on average."""
    keys_read: int
    """Keys read from pages, over all rows."""
    replay: Replay | None = None
    """The replay settings of rows; None: a state after each token."""


def decode_workload(*, rows: int, drafts: int, context: int, replay: Replay | None = None) -> Workload:
    """A decode step of full rows: each reads one state, and writes one after each token.

    Under replay, one after every so many tokens; a row's tail is half full on average, and read as far.
    """
    width = 1 + drafts
    written = rows * width if replay is None else rows * width / replay.interval
    return Workload(rows * width, rows, rows * width, rows, written, context, rows * context, replay)


def prefill_workload(*, tokens: int, rows: int, tile_size: int) -> Workload:
    """A prefill step of prompts from their start, each row's share of the tokens in one piece."""
    each = -(-tokens // rows)
    # A tile of queries reads all keys before it.
    keys = rows * sum(min(start + tile_size, each) for start in range(0, each, tile_size))
    return Workload(tokens, rows, rows, 0, rows, each // 2, keys)


class Counter:
    """Counts for one model on one number of devices."""

    def __init__(
        self,
        config: HybridConfig,
        partition: Partition,
        parameters: Mapping[str, jax.ShapeDtypeStruct],
        *,
        ssm_dtype: Any,
        kv_dtype: Any = None,
        lanes: int = 1,
    ) -> None:
        self.config, self.partition = config, partition
        self._dtype, self._ssm_dtype = parameters["final_norm.weight"].dtype, ssm_dtype
        self._kv_dtype = self._dtype if kv_dtype is None else kv_dtype
        self._sizes = {
            path: _own(leaf, partition.parameter(path), partition.shards) for path, leaf in parameters.items()
        }
        self._bits = {path: bits_of(leaf.dtype) for path, leaf in parameters.items()}
        self._shape = replace(partition.device_shape(StoreShape.of(config)), lanes=lanes)

    @property
    def weight_bytes(self) -> int:
        """Of all parameters on one device."""
        return sum(size * self._bits[path] // 8 for path, size in self._sizes.items())

    def work(self, *loads: Workload) -> Work:
        """The least that a step can do. A mixed step has two loads, and reads the weights once for both."""
        moved = self._weights_read(sum(load.tokens for load in loads)) + sum(map(self._state_bytes, loads))
        return Work(int(moved), sum(map(self._flops, loads)), sum(map(self._collectives, loads)))

    def _weights_read(self, tokens: int) -> float:
        config, weights = self.config, 0.0
        for path, size in self._sizes.items():
            if path.startswith(_DRAFTERS):
                continue  # the layer that drafts is a step of its own
            share = 1.0
            if (weight_of(path) or path) == "embed.weight" and not config.tie_word_embeddings:
                share = min(1.0, tokens / config.vocab_size)
            elif ".experts." in path:
                moe = need(config.moe)
                # Assume that each token's experts are random; an expert that no token chooses is not read.
                share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** tokens
            weights += size * self._bits[path] / 8 * share
        return weights

    def _state_bytes(self, load: Workload) -> float:
        config, shape = self.config, self._shape
        slot = shape.bytes_per_slot(self._dtype, self._ssm_dtype)
        # Pages of draft layers are read in the drafts' own steps.
        per_key = sum(array.size() for array in shape.pages[: config.num_attention_uses])
        kv = load.keys_read * per_key * self._kv_dtype.itemsize
        tails = 0.0
        if load.replay is not None:
            token = shape.bytes_per_tail(self._dtype, self._ssm_dtype, load.replay) / load.replay.longest
            tails = token * (load.rows * load.replay.interval / 2 + load.tokens)
        return slot * (load.states_read + load.states_written) + kv + tails

    def _flops(self, load: Workload) -> int:
        config, shards = self.config, self.partition.shards
        total = 0.0
        for parameter, size in self._sizes.items():
            path = parameter.removesuffix(".values")
            if path.startswith(_DRAFTERS) or not path.endswith(("weight", "experts.up", "experts.down")):
                continue
            if path in ("embed.weight", "lm_head.weight"):
                if path == "lm_head.weight" or config.tie_word_embeddings:
                    total += 2 * size * load.heads
                continue
            share = 1.0
            if ".experts." in path:
                moe = need(config.moe)
                share = moe.experts_per_token / moe.num_experts
            uses = 1
            if path.startswith("shared."):
                uses = config.pattern.count(SHARED) // need(config.shared).num_blocks
            total += 2 * size * share * uses * load.tokens
        per_token = sum(config.mixer(kind).flops(load.context) for kind in config.pattern)
        total += per_token / shards * load.tokens
        return int(total)

    def _collectives(self, load: Workload) -> int:
        if self.partition.shards == 1:
            return 0
        config, counts = self.config, collectives(self.config, self.partition)
        hidden = load.tokens * config.hidden_size * self._dtype.itemsize
        inside = load.tokens * sum(_sums_inside(config, self.partition)) * 4
        # For each head, every device sends the largest logit of its part, its index, and whether all are finite.
        largest = load.heads * self.partition.shards * 3 * 4
        return counts["sums"] * hidden + inside + counts["largest"] * largest


def collectives(config: HybridConfig, partition: Partition) -> dict[str, int]:
    """How often devices have to tell each other something in a step without drafts of the model's own.

    `sums` of hidden states (one for each mixer, one for the embedding), `norms` of squares where a group of the gated
    norm lies on several devices, and the `largest` logits of each device's part of the vocabulary, collected once. For
    rows that ask for more than the largest, all logits are collected.
    """
    if partition.shards == 1:
        return {"sums": 0, "norms": 0, "largest": 0}
    # A shared block has attention, an MLP and a projection in addition to its Mamba mixer.
    sums = sum(4 if kind == SHARED else 1 for kind in config.pattern)
    vocabulary = TENSOR in partition.parameter("embed.weight")
    norms = sum(numbers > 0 for numbers in _sums_inside(config, partition))
    return {"sums": sums + vocabulary, "norms": norms, "largest": int(vocabulary)}


def _sums_inside(config: HybridConfig, partition: Partition) -> list[int]:
    """For each sublayer, how many numbers of each token devices add up inside of its mixer."""
    return [config.mixer(kind).sums_inside(partition.shards) for kind in config.pattern]


def _own(leaf: jax.ShapeDtypeStruct, spec: PartitionSpec, shards: int) -> int:
    """Numbers of a parameter that one device has."""
    size = math.prod(leaf.shape)
    return size // shards if TENSOR in tuple(spec) else size
