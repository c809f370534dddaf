"""A dense layer's product, with the weight as checkpoints store it."""

from kernels_pallas.linear.api import linear, linear_pair

__all__ = ["linear", "linear_pair"]
