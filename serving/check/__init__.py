"""`mamba-jax check`: are the kernels of this machine right and fast, and how fast are whole steps and the engine."""
