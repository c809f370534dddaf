"""Quantised weights as they are published: which tensors there are, and what they mean."""

from checkpoints.quantised.description import Quantisation, read_quantisation
from checkpoints.quantised.tensors import LogicalTensors

__all__ = ["LogicalTensors", "Quantisation", "read_quantisation"]
