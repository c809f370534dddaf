"""The calls that a model makes of its operations, compared with their plain forms and timed.

One list of calls, found by tracing a model's steps (`calls`) and filled with numbers of every class of rows (`values`),
serves the check at start, `mamba-jax check` and the tests.
"""
