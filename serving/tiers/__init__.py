"""Moves checkpoints between the device, the host's memory and a disk, as `serving.core.tiers` decides."""
