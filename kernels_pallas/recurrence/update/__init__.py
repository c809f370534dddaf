"""The recurrence step by step, for decode."""
