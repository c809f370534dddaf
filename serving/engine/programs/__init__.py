"""Compiled programs: compiled at start-up and stored on disk for the next start."""
