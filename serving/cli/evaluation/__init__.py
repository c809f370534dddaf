"""`mamba-jax eval`: quality of answers, and agreement with another model or with training. `mamba-jax bits`."""
