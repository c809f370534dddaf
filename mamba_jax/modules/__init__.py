"""The Flax NNX modules that models consist of.

A mixer is called as `mixer(x [T, hidden], layout, state) -> (y [T, hidden], state)`, where `state` is its own piece of
the store, or None for whole sequences without a store.
"""
