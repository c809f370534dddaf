"""Tiers below the device: host memory and disk keep evicted checkpoints, which can be fetched back.

Policy only: units are known by content, and nothing here moves a byte. `serving/tiers` does.
"""
