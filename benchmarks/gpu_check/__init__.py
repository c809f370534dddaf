"""Checks of kernels on a GPU, and their speed and that of whole programs."""
