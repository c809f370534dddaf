"""The least that a step must move and multiply: weights once, states read and written once, keys and values read.

All figures are those of one of the devices that a model is divided over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax

from mamba_jax.config import LATENT, WINDOWED, HybridConfig, StateUnit, need
from mamba_jax.modules.quantized import bits_of, weight_of
from mamba_jax.sharding import TENSOR, Partition
from mamba_jax.sharding.axis import shares_of
from mamba_jax.store import Replay, StoreShape
from serving.capacity.targets import Device
from serving.engine.assembly.sizing import StoreSize

_DRAFTERS = ("mtp.", "drafter.")
LONG_CONTEXTS = (1 << 17, 1 << 19, 1 << 20)
_LONGEST_CHUNK, _ALMOST = 1 << 16, 1.02


@dataclass(frozen=True)
class Work:
    """One step of one program."""

    bytes: int
    """To and from the device's memory."""
    flops: int
    """Of products with weights."""


@dataclass(frozen=True)
class LongContext:
    """One sequence of many tokens, at published speeds."""

    tokens: int
    sequences: int
    """Number of sequences that run at once."""
    bytes: int
    """Of its states and pages on one device."""
    first_token_s: float
    """The least time to the first token of an uncached prompt, computed in steps of `max_num_batched_tokens`."""
    chunk: int
    """The fewest tokens of a step with which the first token comes almost as soon as with any number."""
    chunked_first_token_s: float
    """The least time to the first token with steps of `chunk` tokens."""
    decode_ms: float
    """The least time to each next token."""


@dataclass(frozen=True)
class Step:
    """One program: the least that it must move and compute, and the time for this at published speeds."""

    name: str
    tokens: int
    """Fed to the model."""
    work: Work
    memory_ms: float
    compute_ms: float
    bound_ms: float
    """No step is faster: the larger of memory and compute. Exchanges between devices come on top."""
    tokens_per_second: float
    """At the bound; of a decode step those that come out, of a prefill step those that go in."""


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
        self.config, self._members = config, partition.members
        self._dtype, self._ssm_dtype = parameters["final_norm.weight"].dtype, ssm_dtype
        self._kv_dtype = self._dtype if kv_dtype is None else kv_dtype
        self._sizes = {
            path: math.prod(leaf.shape) // (partition.shards if TENSOR in tuple(partition.parameter(path)) else 1)
            for path, leaf in parameters.items()
        }
        self._bits = {path: bits_of(leaf.dtype) for path, leaf in parameters.items()}
        scores = (_score_flops(config, kind) for kind in config.pattern if config.state(kind, StateUnit.TOKEN))
        self._flops_per_score = sum(scores) / partition.shards / partition.members
        self._shape = replace(partition.device_shape(StoreShape.of(config)), lanes=lanes)
        # Pages of draft layers are read in the drafts' own steps.
        elements = sum(array.size() for array in self._shape.pages[: config.num_attention_uses])
        self._bytes_per_key = elements * self._kv_dtype.itemsize / partition.members

    @property
    def weight_bytes(self) -> int:
        """Of all parameters on one device."""
        return sum(size * self._bits[path] // 8 for path, size in self._sizes.items())

    def decode(self, *, rows: int, drafts: int, context: int, replay: Replay | None = None) -> Work:
        """The least of a decode step of full rows: each reads one state, and writes one after each token.

        Under replay, it writes one per interval; a row's tail is half full on average, and only that half is read.
        """
        tokens, tails = rows * (1 + drafts), 0.0
        written = tokens if replay is None else tokens / replay.interval
        if replay is not None:
            token = self._shape.bytes_per_tail(self._dtype, self._ssm_dtype, replay) / replay.longest
            tails = token * (rows * replay.interval / 2 + tokens)
        return self._work(tokens, tokens, states=rows + written, keys=rows * context, others=tails)

    def prefill(self, *, tokens: int, rows: int, tile_size: int) -> Work:
        """The least of a prefill step of prompts from their start, each row's share of the tokens in one piece."""
        each = -(-tokens // rows)
        # A tile of queries reads all keys before it.
        keys = rows * sum(min(start + tile_size, each) for start in range(0, each, tile_size))
        return self._work(self._share(tokens), rows, states=rows, keys=keys)

    def _share(self, tokens: int) -> int:
        """Returns how many of a prefill step's tokens each member computes; the engine pads them to a multiple."""
        padded = -(-tokens // self._members) * self._members
        return padded // self._members if shares_of(padded, self._members) > 1 else tokens

    def _work(self, tokens: int, heads: int, *, states: float, keys: int = 0, others: float = 0.0) -> Work:
        """`heads`: positions that go through the output head; `states`: those read and written; `keys`: those read from
        pages, over all rows; `others`: further bytes."""
        config, flops = self.config, 0.0
        moved = self._shape.bytes_per_slot(self._dtype, self._ssm_dtype) * states + keys * self._bytes_per_key + others
        for path, size in self._sizes.items():
            if path.startswith(_DRAFTERS):
                continue  # the layer that drafts is a step of its own
            read = used = 1.0  # the parts that a step reads and that a token is multiplied with
            positions = tokens
            if (weight_of(path) or path) == "embed.weight" and not config.tie_word_embeddings:
                read, used = min(1.0, tokens / config.vocab_size), 0.0
            elif path.startswith(("embed.", "lm_head.")):
                positions = heads
            elif ".experts." in path:
                moe = need(config.moe)
                # Assume that each token's experts are random; an expert that no token chooses is not read.
                used = moe.experts_per_token / moe.num_experts
                read = 1 - (1 - used) ** tokens
            moved += size * self._bits[path] / 8 * read
            if path.removesuffix(".values").endswith(("weight", "experts.up", "experts.down")):
                flops += 2 * size * used * positions
        return Work(int(moved), int(flops))

    def long_context(
        self, tokens: int, size: StoreSize, chunk: int, device: Device, replay: Replay | None
    ) -> LongContext:
        """The bounds of one sequence of many tokens, which is prefilled in chunks."""
        pages = -(-tokens // (size.page_size * size.members)) * size.bytes_per_page
        slots = size.bytes_per_slot * size.running_slots // size.max_num_seqs + size.bytes_per_tail
        decode = bounds("", 1, self.decode(rows=1, drafts=0, context=tokens, replay=replay), device, counted=1)
        doublings = range(max(1, (_LONGEST_CHUNK // chunk).bit_length()))
        seconds = {chunk << i: self._first_token_seconds(tokens, chunk << i, device) for i in doublings}
        best = next(size for size, each in seconds.items() if each <= _ALMOST * min(seconds.values()))
        sequences = size.sequences_at(tokens)
        return LongContext(tokens, sequences, pages + slots, seconds[chunk], best, seconds[best], decode.bound_ms)

    def _first_token_seconds(self, tokens: int, chunk: int, device: Device) -> float:
        """Each chunk reads the weights, and the keys before it once."""
        seconds, work = 0.0, functools.cache(lambda size, later: self._work(self._share(size), 1, states=1 + later))
        for start in range(0, tokens, chunk):
            size = min(chunk, tokens - start)
            least = work(size, int(start > 0))
            moved = least.bytes + (start + size) * self._bytes_per_key
            scores = size * start + size * size // 2  # pairs of a query and a key
            flops = least.flops + scores * self._flops_per_score
            seconds += max(moved / device.bandwidth, flops / device.flops)
        return seconds


def bounds(name: str, tokens: int, work: Work, device: Device, *, counted: int) -> Step:
    """Returns the bounds of a step on a device; `counted` of its tokens are those of a sequence."""
    memory, compute = work.bytes / device.bandwidth, work.flops / device.flops
    bound = max(memory, compute)
    return Step(name, tokens, work, memory * 1e3, compute * 1e3, bound * 1e3, counted / bound)


def _score_flops(config: HybridConfig, kind: str) -> int:
    """Operations of one layer for a query and one of the keys before it. Windows have few keys."""
    if kind == WINDOWED:
        return 0
    if kind == LATENT:
        latent = need(config.latent_attention)
        return 2 * latent.num_heads * (2 * latent.latent_size + latent.shared_key_size)
    attention = need(config.attention)
    return 4 * attention.num_heads * attention.head_dim
