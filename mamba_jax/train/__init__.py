"""Training of the demo model, and of multi-token-prediction layers for any hybrid model."""
