"""Other people's clients against `mamba-jax serve`: what they need is what the server must do."""
