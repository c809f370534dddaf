"""The operations of hybrid Mamba2/attention models, one folder each, over slots and pages that are updated in place.

Every folder has `api.py` (the public functions), `reference.py` (the sequential definition, in numpy), one file per
implementation (`xla.py` runs everywhere) and `shapes.py` (real workload shapes, for tests and benchmarks).
"""
