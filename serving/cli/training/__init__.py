"""Commands for training: from a corpus, of draft layers, and by reinforcement learning."""
