"""The commands of the program `mamba-jax`."""
