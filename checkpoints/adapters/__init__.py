"""Additions to a model's weights: low-rank adapters and trained initial states."""
