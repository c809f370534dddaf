"""Published formats of quantized weights: their tensors and the meaning of these."""
