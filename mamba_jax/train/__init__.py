"""Training: the demo model, and multi-token-prediction layers for any hybrid."""
