"""Calls of each operation at sizes of real models and odd ones."""
