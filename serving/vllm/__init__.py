"""vLLM's flags and keyword names, translated to those of this project."""
