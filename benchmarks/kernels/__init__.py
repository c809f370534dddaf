"""Times each operation by each of its implementations: `python -m benchmarks.kernels`."""
