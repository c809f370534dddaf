"""Measurements. Each prints JSON lines that state machine, versions, model, lengths and command."""
