"""Commands that answer prompts: one prompt, a file of prompts, or a conversation in the terminal."""
