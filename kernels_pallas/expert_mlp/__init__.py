"""The products of tokens with the weights of their experts."""

from kernels_pallas.expert_mlp.api import expert_mlp, multiply_rows

__all__ = ["expert_mlp", "multiply_rows"]
