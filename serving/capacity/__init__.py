"""Planning: does a model fit a machine that is not at hand, and how fast can it be there at best?

For TPU slices the real step programs are compiled by the TPU's own compiler, which runs on an ordinary machine; no
weights are loaded. Everything else is arithmetic.
"""
