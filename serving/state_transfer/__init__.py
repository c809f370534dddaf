"""Resumption points outside of a store: their parts, the programs that read and write them, their sources."""
