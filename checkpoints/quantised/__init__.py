"""Published formats of quantized weights: their tensors and the meaning of these."""

from checkpoints.quantised.description import Quantisation, read_quantisation
from checkpoints.quantised.tensors import LogicalTensors

__all__ = ["LogicalTensors", "Quantisation", "read_quantisation"]
