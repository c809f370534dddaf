"""Structured outputs: compiles grammars, follows them, and computes masks of allowed tokens."""
