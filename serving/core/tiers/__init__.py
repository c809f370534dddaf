"""Tiers below the device: what host memory and disk hold of checkpoints that eviction took, and what is fetched back.

Policy only: units are known by content, and nothing here moves a byte. `serving/tiers` does.
"""
