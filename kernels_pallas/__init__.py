"""The operations of hybrid Mamba2/attention models, one folder each, over slots and pages that are updated in place.

Every folder has `api.py` (the public functions), `reference.py` (the sequential definition, in numpy), and one file
per implementation (`xla.py` runs everywhere), whose functions are those of `api.py`. Where an implementation does not
run every call, `unsupported` returns why it cannot, or should not, run one, or None.

Every operation raises ValueError if the shapes of its arguments do not match, and UnsupportedError if the named
implementation does not exist or cannot run the call. Every one is differentiable in its float arrays, and takes arrays
without elements.
"""
