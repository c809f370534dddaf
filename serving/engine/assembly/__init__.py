"""Assembles an engine: its design, its sizes, and its initial arrays and programs."""
