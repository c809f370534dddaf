"""The scan of whole prompts, a block of tokens at a time."""
