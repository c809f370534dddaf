"""Time of a step in addition to its bytes and operations. These are assumptions and counts; nothing was measured.

A kernel takes some microseconds to start and to end, also inside a CUDA graph. Devices that exchange little data wait
for each other. The host prepares a step while the one before runs, so its time only matters where it is the longest.
"""

from __future__ import annotations

from mamba_jax.config import ATTENTION, MOE, PARALLEL, HybridConfig

HOST_SECONDS = 300e-6
"""Assumed time of the host for a step of 64 rows."""
KERNEL_SECONDS = 2.5e-6
"""Assumed time to start and end a kernel of a CUDA graph, in which it moves next to nothing."""

KERNELS = {"M": 7, "D": 8, "*": 10, "-": 5, "E": 14, "F": 7, "L": 15, "P": 12, "Z": 35}
"""Kernels that one more layer of a kind adds to a decode step.

Counted in programs of 64 rows compiled for H200, one layer against two: of Nemotron-H-8B, Nemotron-3-Nano (`E`),
Qwen3.5-27B (`D`), Kimi-Linear-48B-A3B (`L`), Falcon-H1-7B (`P`, less `ROTARY_KERNELS`), Zamba2-7B (`Z`) and, on
8 devices, MiniMax-Text-01 (`F`).
"""
MANY_EXPERTS, MANY_EXPERTS_KERNELS = 128, 6
"""Layers with more experts than this are routed by XLA at 64 rows, not by the kernel `expert_choice` (see its `MOST`);
the kernels that this adds to a layer, counted in Qwen3-Next-80B-A3B."""
ROTARY_KERNELS = 4
"""Kernels that rotary positions and norms of queries and keys add to an attention layer."""
MOST_KERNELS = 20
"""Of kinds of layers that are not counted."""
OTHER_KERNELS = 18
"""Kernels of a decode step outside its layers: embedding, head, sampling, changes of rows."""


def decode_kernels(config: HybridConfig) -> int:
    """Kernels of a decode step on a GPU, by the counts of each kind of layer."""
    rotary = config.attention is not None and config.attention.rope is not None
    layers = sum(KERNELS.get(kind, MOST_KERNELS) for kind in config.pattern)
    if config.moe is not None and config.moe.num_experts > MANY_EXPERTS:
        layers += MANY_EXPERTS_KERNELS * config.pattern.count(MOE)
    attending = config.pattern.count(ATTENTION) + config.pattern.count(PARALLEL)
    return OTHER_KERNELS + layers + rotary * ROTARY_KERNELS * attending
