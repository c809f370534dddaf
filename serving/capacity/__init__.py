"""Planning: whether a model fits another machine, and how fast it can be there at best.

For TPU slices the real step programs are compiled by the TPU's own compiler, which runs on an ordinary machine; no
weights are loaded. Everything else is arithmetic.
"""
