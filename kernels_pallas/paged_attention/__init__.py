"""Causal attention over a paged key/value cache, writing and copying its pages, and attention over whole sequences."""

from kernels_pallas.paged_attention.api import (
    attention_sequence,
    copy_pages,
    merge_attention_parts,
    paged_attention,
    paged_attention_part,
    write_kv,
)

__all__ = [
    "attention_sequence",
    "copy_pages",
    "merge_attention_parts",
    "paged_attention",
    "paged_attention_part",
    "write_kv",
]
