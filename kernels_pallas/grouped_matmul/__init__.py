"""Matrix products of tokens sorted by expert, each with its expert's weight (mixture of experts)."""

from kernels_pallas.grouped_matmul.api import grouped_matmul

__all__ = ["grouped_matmul"]
