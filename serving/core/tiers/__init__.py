"""Policy of tiers below the device, which keep evicted checkpoints: it moves no bytes (`serving/tiers` does)."""
