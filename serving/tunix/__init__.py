"""Tunix, a library for reinforcement learning: this engine as its rollout, this library's model as its actor."""
