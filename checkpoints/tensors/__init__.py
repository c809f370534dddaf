"""Tensors in files: reading, checking, hashing, replacing and writing them."""
