"""Arrangements of packed tokens: whole sequences, decode rows, ragged prefill tiles."""

from mamba_jax.layout.base import Layout
from mamba_jax.layout.block import BlockLayout
from mamba_jax.layout.decode import DecodeLayout
from mamba_jax.layout.mixed import MixedLayout, has_tails
from mamba_jax.layout.operation import Anchors, Inputs, Operation, Parameters
from mamba_jax.layout.packed import PackedLayout
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.layout.replay import ReplayLayout
from mamba_jax.layout.sequence import SequenceLayout

__all__ = [
    "Anchors",
    "BlockLayout",
    "DecodeLayout",
    "Inputs",
    "Layout",
    "MixedLayout",
    "Operation",
    "PackedLayout",
    "Parameters",
    "PrefillLayout",
    "ReplayLayout",
    "SequenceLayout",
    "has_tails",
]
