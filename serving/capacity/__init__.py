"""Planning: whether a model fits another machine, and which machine it fits.

For TPU slices the real step programs are compiled by the TPU's own compiler, which runs on an ordinary machine; no
weights are loaded. Everything else is arithmetic.
"""
