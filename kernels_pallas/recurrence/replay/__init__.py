"""The recurrence from a stored state and the tokens since then, for decode."""
