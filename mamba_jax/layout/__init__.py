"""Arrangements of packed tokens: whole sequences, decode rows, ragged prefill tiles."""

from mamba_jax.layout.base import (
    Along,
    Anchors,
    Divisible,
    Hidden,
    Inputs,
    Layout,
    Operation,
    Parameters,
    Span,
    Transition,
)
from mamba_jax.layout.decode import BlockLayout, DecodeLayout, ReplayLayout
from mamba_jax.layout.mixed import MixedLayout, has_tails
from mamba_jax.layout.prefill import PrefillLayout
from mamba_jax.layout.sequence import PackedLayout, SequenceLayout
from mamba_jax.layout.shares import ShareLayout
