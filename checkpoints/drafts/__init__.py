"""Draft layers and drafters as checkpoints of their own."""
