"""`mamba-jax eval`: quality of a model's answers, and how far its predictions are from another model's."""
